"""What each message costs a node by how much it holds: steps are counted, not timed.

A step is a line of the store's or the node's Python, or an element of a container of theirs that is walked through,
in Python or within one call of C.
"""

import itertools
import sys
import time
from collections import OrderedDict, defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest
from service_stage import attach, serving
from service_stage import keys as keys_of
from steps import calls_run

import pdx.node
import pdx.store
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.store.chunk import Claim
from pdx.store.store import Store
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Admit, Cancel, Fill, Release
from pdx.wire.verbs import Status

SMALL, LARGE = 600, 3_000
WRITER_CHUNKS = 200  # of the writer that dies
CROWD = 12  # one lease, reservation, transfer of others for so many chunks
SPARE = 1.1  # what the large one may cost of the small one's steps, and a few more
MORE = 30
ADMIT_CALLS = 10  # per chunk that is missing, of 64
ADMIT_FILES = 18  # of PDX, for one that is missing
SAVE_CALLS = 45  # per chunk: its fill, and the turn in which the disk is given it
MEASURED = tuple(str(Path(room.__file__).parent) for room in (pdx.store, pdx.node))
PLAIN = (dict, OrderedDict, list, set)


class Steps:
    """Counts while it is entered; containers of what it watches are replaced by such that report their walks."""

    def __init__(self) -> None:
        self.count = 0
        self._seen = {}  # id -> what was seen, and what stands for it now

    def watch(self, thing):
        """All containers that `thing` and the objects of ours in it hold."""
        if id(thing) in self._seen or not type(thing).__module__.startswith(("pdx.store", "pdx.node")):
            return
        self._seen[id(thing)] = (thing, thing)
        for name, value in list(getattr(thing, "__dict__", {}).items()):
            if type(value) in PLAIN:
                if id(value) not in self._seen:
                    self._seen[id(value)] = (value, self.reporting(value))
                setattr(thing, name, self._seen[id(value)][1])
            self.watch(value)

    def reporting(self, value):
        """The same container, but whoever walks through it is counted."""
        steps = self

        def walk(method):
            def walked(self, *arguments):
                steps.count += len(self)
                return method(self, *arguments)

            return walked

        plain = type(value)
        names = ("__iter__", "__reversed__", "keys", "values", "items", "copy", "__contains__", "index", "remove")
        if issubclass(plain, dict | set):
            names = tuple(name for name in names if name not in ("__contains__", "remove"))
        methods = {name: walk(getattr(plain, name)) for name in names if hasattr(plain, name)}
        return type(plain.__name__, (plain,), methods)(value)

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)

    def _called(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(MEASURED) else None

    def _line(self, frame, event, argument):
        self.count += 1
        return self._line


def is_flat(small, large):
    return large <= small * SPARE + MORE


def steps_of(steps, call, *arguments):
    """How many a call takes, and what it returns."""
    before = steps.count
    with steps:
        answer = call(*arguments)
    return steps.count - before, answer


class Load:
    """A node with so many sealed chunks, and others who lease, fill, wait and have given up, as many of them as there
    are chunks by the dozen. `counts`: the steps of what was measured, by its name."""

    def __init__(self, service, clock, chunks):
        self.service, self.clock, self.chunks = service, clock, chunks
        self.counts = defaultdict(int)
        self._numbers = itertools.count()
        self.client = self.attach()
        self.seal(chunks)
        other = self.attach()
        for number, key in zip(range(chunks // CROWD), list(service.store.index.whole), strict=False):
            name = f"transfer-of-another-{number}"
            self.ask(Admit([key], lease_s=1e4), other)
            self.ask(Admit(self.keys(1), GRANULE_BYTES, transfer=name, part="writes"), other)
            self.ask(Cancel(f"cancelled-{name}"), other)
        self.steps = Steps()
        for part in (service.store, service.transfers, service.sessions):
            self.steps.watch(part)

    def attach(self):
        return attach(self.service, f"session {next(self._numbers)}")

    def keys(self, count):
        """Such as nobody has named yet."""
        return keys_of(itertools.islice(self._numbers, count))

    def ask(self, body, session=None):
        return self.service.handle(session or self.client, body)

    def tick(self):
        """Deadlines, and answers to who waits."""
        self.service.tick()
        assert not list(self.service.admissions.late_answers())

    def seal(self, count):
        slots = self.ask(Admit(self.keys(count), GRANULE_BYTES)).granted_slots
        assert len(slots) == count
        self.ask(Fill(slots, layers=1, seal=True))

    def measured(self, name, call, *arguments):
        taken, answer = steps_of(self.steps, call, *arguments)
        self.counts[name] += taken
        return answer

    def round(self):
        """What is measured is each message, or what belongs together; the store holds the same before and after."""
        writer, transfer = self.attach(), f"transfer-of-a-round-{next(self._numbers)}"
        granted = self.measured("reserve 64", self.ask, Admit(self.keys(64), GRANULE_BYTES))
        self.measured("abort 64", self.ask, Abort(granted.granted_slots))
        self.ask(Admit(self.keys(WRITER_CHUNKS), GRANULE_BYTES), writer)  # from now on the store is full
        granted = self.measured("reserve 64, evicting", self.ask, Admit(self.keys(64), GRANULE_BYTES))
        self.measured("seal 64", self.ask, Fill(granted.granted_slots, layers=1, seal=True))
        prompt = self.keys(2)
        ask = Admit(prompt, GRANULE_BYTES, tail_nbytes=100, transfer=transfer, part="writes")
        granted = self.measured("partial chunk", self.ask, ask)
        self.measured("partial chunk", self.ask, Fill(granted.granted_slots, layers=1, seal=True))
        found = self.measured("partial chunk", self.ask, Admit(prompt, lease_s=30.0, transfer=transfer))
        assert found.hits == 2
        self.measured("partial chunk", self.ask, Release(found.lease))
        granted = self.ask(Admit(self.keys(8), GRANULE_BYTES, transfer=f"{transfer}-2", part="writes"))
        self.measured("cancel of 8 chunks", self.ask, Cancel(f"{transfer}-2"))
        self.ask(Abort(granted.granted_slots))
        self.measured("cancel of an unknown transfer", self.ask, Cancel(f"{transfer}-3"))
        sealed = self.measured("status", self.ask, Status()).chunks["sealed"]
        self.measured("death of a writer", self.service.end, writer)
        self.seal(self.chunks - sealed)


@pytest.fixture
def load(place, clock):
    with ExitStack() as stack:

        def make(chunks):
            nbytes = (chunks + chunks // CROWD + WRITER_CHUNKS) * GRANULE_BYTES
            return Load(stack.enter_context(serving(place, clock, arena_bytes=nbytes)), clock, chunks)

        yield make


def test_a_message_costs_the_same_however_much_the_node_holds(load):
    rounds = []
    for chunks in (SMALL, LARGE):
        made = load(chunks)
        made.round()
        made.counts.clear()
        made.round()
        rounds.append(made.counts)
    small, large = rounds
    assert len(small) == len(large) > 8
    assert min(small.values()) > 10, "nothing was counted"
    assert {name: (small[name], large[name]) for name in small if not is_flat(small[name], large[name])} == {}


def test_a_tick_costs_what_ends_however_much_waits(load):
    counts = []
    for chunks in (SMALL, LARGE):
        made = load(chunks)
        made.tick()
        idle, _ = steps_of(made.steps, made.tick)
        assert made.ask(Admit([list(made.service.store.index.whole)[-1]], lease_s=0.5)).lease
        made.clock.now += 1.0
        busy, _ = steps_of(made.steps, made.tick)
        assert made.service.store.counters["leases_expired"] == 1
        counts.append((idle, busy))
    (idle, busy), (large_idle, large_busy) = counts
    assert 0 < idle < busy
    assert is_flat(idle, large_idle)
    assert is_flat(busy, large_busy)


@pytest.fixture
def store(tmp_path):
    """A store of so many granules, and the steps that it takes."""
    arenas = []

    def make(granules):
        arenas.append(Arena.create(tmp_path / str(len(arenas)), granules * GRANULE_BYTES))
        made, steps = Store(arenas[-1], Env()), Steps()
        steps.watch(made)
        return made, steps

    yield make
    for arena in arenas:
        arena.close()


def reserve(store, first, count, granules=1):
    keys = [number.to_bytes(16, "little") for number in range(first, first + count)]
    claim = Claim(keys=keys, nbytes=granules * GRANULE_BYTES, layers=1, owner=1, writers=[1])
    return store.reserve(claim)[1]


def test_sealing_one_more_chunk_costs_the_same_however_long_the_prompt_is(store):
    counts = []
    for length in (50, 1_000):
        made, steps = store(length)
        for slot in reserve(made, 0, length):
            taken, _ = steps_of(steps, lambda made=made, slot=slot: made.seal(made.fill([slot], 0, 1, 1)))
        counts.append(taken)
    assert is_flat(*counts), counts


def test_a_search_for_room_that_is_not_there_is_bounded(store, monkeypatch):
    monkeypatch.setattr("pdx.store.slot_pool.LOOKS", 100)
    counts = []
    for granules in (1_000, 8_000):
        made, steps = store(granules)
        slots = reserve(made, 0, granules)
        made.seal(made.fill(slots, 0, 1, 1))
        made.lease([made.at(slot) for slot in slots[::2]], 1, 1e6)
        taken, granted = steps_of(steps, reserve, made, granules, 1, 2)
        assert granted == []
        assert made.counters["evicted"] == 0
        counts.append(taken)
    assert is_flat(*counts), counts


def test_what_is_missing_costs_few_calls_and_passes_few_files(place, clock):
    with serving(place, clock) as service:
        scheduler = attach(service, "e", "scheduler", engine="e")
        attach(service, "e", "worker", engine="e")

        def calls_for(keys):
            ask = Admit(keys, nbytes=GRANULE_BYTES, layers=4, wait_s=1.0, lease_s=30.0, request="r", partial=True)
            with calls_run() as calls:
                answer = service.handle(scheduler, ask)
            assert len(answer.granted) == len(keys)
            return calls

        calls_for(keys_of([0]))
        assert len({file for file, _ in calls_for(keys_of([1]))}) <= ADMIT_FILES
        assert calls_for(keys_of(range(100, 164))).total() <= 64 * ADMIT_CALLS


def test_a_saved_chunk_costs_few_calls(place):
    with serving(place, time.monotonic, disks=[f"{place}/disk"], disk_limit_bytes=1 << 26) as service:
        service.open_tiers()
        disk, deliver = service.tiers.below[0][0], service.env.mailbox.deliver
        wait_until(lambda: deliver() or disk.is_counted, what="the disk is counted")
        session = attach(service, "x")
        slots = service.handle(session, Admit(keys_of(range(64)), nbytes=GRANULE_BYTES)).granted_slots
        with calls_run() as calls:
            service.handle(session, Fill(slots, 0, 1, True))
            service.turn()
        wait_until(lambda: deliver() or service.turn() or disk.tally.stores == 64, what="all is stored")
        assert calls.total() <= 64 * SAVE_CALLS
