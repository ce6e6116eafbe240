"""An engine with several cache groups at a node's `Service` in this process; `service_stage` has the rest."""

import hashlib
import itertools
from contextlib import contextmanager

import pytest
from service_stage import CHUNKS, Below, attach, serving

from pdx.memory.arena import GRANULE_BYTES as G
from pdx.memory.rules import needed
from pdx.store.lifecycle import State
from pdx.store.tier import Held
from pdx.wire.messages import Admit, Admitted, Fill, Group

FULL = Group(nbytes=2 * G, layers=2, tail_nbytes=G)
WINDOW = Group(reach=2, tail_reach=2, nbytes=G, layers=1, tail_nbytes=G)
STATE = Group(reach=1, tail_reach=0, nbytes=3 * G, layers=1, tail_nbytes=3 * G)
HYBRID = [FULL, WINDOW, STATE]
ALL_GRANULES = 6 * (2 + 1 + 3)  # of six chunks of it
LOCAL = Group(period=3, nbytes=G, layers=1, tail_nbytes=G)
TRANSFER = "transfer-0123456789"


def without_tail(groups, **changes):
    """The same of a prompt that ends with a chunk."""
    return [
        Group(each.reach, each.tail_reach, each.period, **{"nbytes": each.nbytes, "layers": each.layers, **changes})
        for each in groups
    ]


class SizedBelow(Below):
    """A tier that knows how large the chunks of each group are."""

    def __init__(self, copies, sizes):
        super().__init__(copies)
        self.sizes = sizes

    def find(self, keys, shards):
        found = super().find(keys, shards)
        return [Held(*self.sizes[key]) for key, _ in zip(keys, found, strict=False)]


class GroupsStage:
    """One prompt of `count` chunks, of a model with these groups, whose engine has one worker."""

    def __init__(self, service, groups, count, *, has_tail=False, name="prompt", hello=None):
        self.service, self.count = service, count
        self.groups = groups if has_tail else without_tail(groups)
        self.has_tail = has_tail
        self.engine = attach(service, name, "scheduler", engine=name, **(hello or {}))
        self.worker = attach(service, name, "worker", engine=name)
        self.keys = [
            hashlib.blake2b(f"{name} {group} {chunk}".encode(), digest_size=16).digest()
            for group in range(len(groups))
            for chunk in range(count)
        ]
        self.sizes = {}
        for group, each in enumerate(self.groups):
            for chunk in range(count):
                is_tail = has_tail and chunk == count - 1
                self.sizes[self.key(group, chunk)] = each.tail_nbytes if is_tail else each.nbytes, each.layers

    def key(self, group, chunk):
        return self.keys[group * self.count + chunk]

    def named(self, keys):
        """Which (group, chunk) these are."""
        return [divmod(self.keys.index(key), self.count) for key in keys]

    def needs(self, end):
        """The (group, chunk) that the leading `end` need."""
        return [divmod(at, self.count) for at in needed(self.groups, self.count, end, has_tail=self.has_tail)]

    def ask(self, **fields):
        """A request's question, and its answer; None: that comes later. It asks for no room where nothing is said."""
        groups = fields.pop("groups", None) or [
            Group(each.reach, each.tail_reach, each.period, **{**_sizes(each), "nbytes": 0}) for each in self.groups
        ]
        ask = Admit(**{"keys": self.keys, "groups": groups, "lease_s": 30.0, **fields})
        return self.service.handle(self.engine, ask)

    def ask_room(self, **fields):
        return self.ask(groups=self.groups, **fields)

    def fill(self, slots, *, seal=True):
        for slot in slots:
            layers = self.service.store.at(slot).layers
            self.service.handle(self.worker, Fill([slot], 0, layers, seal=seal))

    def store(self, but=()):
        """All chunks are computed and stored, but for these (group, chunk)."""
        answer = self.ask_room(lease_s=0.0, part="writes")
        places = [divmod(at, self.count) for at in answer.granted]
        wanted = [slot for place, slot in zip(places, answer.granted_slots, strict=True) if place not in but]
        self.fill(wanted)
        self.give_back([slot for slot in answer.granted_slots if slot not in wanted])

    def give_back(self, slots):
        chunks = self.service.store.unfinished(slots)
        self.service.store.let_go(chunks)
        self.service._lost(chunks)

    def drop(self, *places):
        self.service.store.delete([self.key(*place) for place in places])

    def chunk(self, group, chunk):
        """Its record, whatever state it is in; None: it is not here."""
        return next(iter(self.service.store.index.of(self.key(group, chunk))), None)

    def here(self):
        """The (group, chunk) that are sealed in memory."""
        return self._where(lambda chunk: chunk.state is State.SEALED)

    def leased(self):
        """The (group, chunk) that somebody holds."""
        return self._where(lambda chunk: chunk.leases)

    def _where(self, is_so):
        places = itertools.product(range(len(self.groups)), range(self.count))
        return [place for place in places if (found := self.chunk(*place)) is not None and is_so(found)]

    def slots(self, places):
        return [self.chunk(*place).slot for place in places]

    def below(self):
        """A tier below memory, from now on."""
        tier = SizedBelow(self.service.copies, self.sizes)
        self.service.tiers.below.append([tier])
        return tier

    def turn(self):
        """One turn of the control loop: the answers that came."""
        self.service.turn()
        return [answer for session, _, answer in self.service.admissions.late_answers() if session is self.engine]

    def settle(self, tier):
        """Turns, and jobs of the tier, until nothing happens any more: the answers that came."""
        answers = self.turn() + self.turn()
        while tier.jobs:
            tier.end()
            answers += self.turn() + self.turn()
        return answers

    def release(self, answer):
        assert isinstance(answer, Admitted)
        if answer.lease:
            self.service.store.release(answer.lease, self.engine.number)

    def assert_idle(self):
        """Nobody holds anything, and nothing is under way."""
        store = self.service.store
        assert (store.num_leases, len(self.service.copies), len(self.service.admissions._waiting)) == (0, 0, 0)
        assert set(store.index.census()[0]) <= {"sealed"}
        assert not self.leased()
        store.delete(self.keys)
        assert store.free_bytes == store.total_bytes


def _sizes(group):
    return {"nbytes": group.nbytes, "layers": group.layers, "tail_nbytes": group.tail_nbytes}


@contextmanager
def prompt_of(place, clock, groups, count, *, has_tail=False, hello=None, **config):
    """The stage of one prompt; at the end nothing may be held. `hello`: what its engine tells of itself."""
    with serving(place, clock, **config) as service:
        stage = GroupsStage(service, groups, count, has_tail=has_tail, hello=hello)
        yield stage
        stage.assert_idle()


@pytest.fixture
def prompt(place, clock):
    """Six chunks of a model with full attention, a window of two chunks, and a state."""
    with prompt_of(place, clock, HYBRID, 6) as made:
        yield made


@contextmanager
def filled(prompt, granules_left):
    """Somebody holds all of the arena but so many granules."""
    other = prompt.engine
    nbytes = (CHUNKS - granules_left) * G
    answer = prompt.service.handle(
        other, Admit([b"somebody else's!"], nbytes=nbytes, layers=1, part="writes", lease_s=0.0)
    )
    assert answer.granted == [0]
    yield
    prompt.give_back(answer.granted_slots)
