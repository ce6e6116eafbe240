"""A stage for the parts of a push without sockets and threads: a real store, and stand-ins for everything around it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, NamedTuple

from kept import kept

from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES, Arena, round_up
from pdx.memory.slot import Slot
from pdx.node.peers.inbound_pushes import InboundPushes
from pdx.node.peers.peer_tiers import admit
from pdx.node.peers.send_thread import piece, slices, spans
from pdx.store.chunk import Chunk, Claim
from pdx.store.copies import Copies
from pdx.store.copy import Copy, Priority
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.tier import Grant, Held, Job, Tier
from pdx.store.tiers import Tiers
from pdx.store.transfers import Transfers
from pdx.telemetry.env import Env
from pdx.transports.channel import Listener, Notification, RemoteRegion
from pdx.wire.messages import Admit, Admitted, Done, Refused, Release, Slices

MIB = 1 << 20
WRITER = 1  # the session that fills chunks on the sender's stage
FAR = 1e9


class Offer(NamedTuple):
    """An `Admit` of a peer and its number."""

    push: int
    ask: Admit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ask, name)


class Granted(NamedTuple):
    """An `Admitted` and the number of what it answers."""

    push: int
    granted: list[int]
    slots: list[Slot]


class Stop(NamedTuple):
    """A `Refused` and the number of what it answers."""

    push: int
    text: str = ""


def key(number: int) -> bytes:
    """The number-th key of a chain."""
    return hashlib.blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


class StoreStage:
    """A store over a real arena, with a clock that stands still."""

    def __init__(self, folder: Path, granules: int, *, other_granules: int = 0) -> None:
        """`other_granules`: of a second arena; without any there is one arena."""
        self.now = 100.0
        self.arena = Arena.create(folder / "arena", granules * GRANULE_BYTES)
        sizes = [other_granules * GRANULE_BYTES] if other_granules else []
        self.more = [Arena.create(folder / "arena-1", size) for size in sizes]
        self.env = Env(lambda: self.now)
        self.store = Store(self.arena, self.env, more=self.more)
        self.counters = self.env.counters

    def reserve(self, numbers: list[int], nbytes: int, *, layers: int = 1, shards: int = 1, **claim: Any) -> list[Slot]:
        """Slots for `WRITER` to fill."""
        keys = [key(number) for number in numbers]
        writers = [WRITER] * shards
        granted, slots, _ = self.store.reserve(
            Claim(keys=keys, nbytes=nbytes, layers=layers, owner=WRITER, writers=writers, **claim)
        )
        assert len(granted) == len(numbers)
        return slots

    def holds(self) -> int:
        """Readers of all chunks."""
        return sum(chunk.leases for chunk in self.store.index.slots[0].values())

    def free_what_is_sealed(self) -> None:
        """Everything must be free then."""
        self.store.delete([chunk.key for chunk in self.store.index.slots[0].values()])
        assert self.store.index.census() == ({}, {}, 0)
        assert self.store.free_bytes == self.store.total_bytes

    def close(self) -> None:
        for arena in [self.arena, *self.more]:
            arena.close()


class Write:
    """A job as the peer's channel gets it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.push, self.nbytes, self.transfer = job.number, job.nbytes, job.transfer
        self.pieces = [piece(part) for part in job.parts]
        self.slices = [slices(part) for part in job.parts]
        self.spans = [spans(part) for part in job.parts]


class FakePeerTier(Tier):
    """A peer: remembers what it is told."""

    kind = "peer"

    def __init__(self, name: str = "b", over: Any = None) -> None:
        self.name = name
        self.is_usable = True
        self.sent: list[Offer | Release] = []
        self.jobs: list[Write] = []  # not over
        self.aborted: list[int] = []
        self.told_over = over

    @property
    def is_ready(self) -> bool:
        return self.is_usable

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        return []

    def admit(self, copy: Copy) -> None:
        self.sent.append(Offer(copy.number, admit(copy, 5.0)))

    def store(self, job: Job) -> None:
        assert self.is_usable
        self.jobs.append(Write(job))

    def load(self, job: Job) -> None:
        raise AssertionError("a peer is not read from")

    def cancel(self, copy: Copy) -> None:
        self.aborted.append(copy.number)

    def copy_ended(self, copy: Copy) -> None:
        if copy.is_asked and not copy.is_lost:
            self.sent.append(Release(copy.number, copy.is_complete))
        if self.told_over is not None:
            self.told_over(copy.number, copy.is_complete)

    def evict(self, keys: Sequence[bytes], shards: int = 0) -> int:
        return 0

    def close(self) -> None:
        pass

    @property
    def offers(self) -> list[Offer]:
        """In the order they were made."""
        return [body for body in self.sent if isinstance(body, Offer)]

    @property
    def farewells(self) -> list[Release]:
        """In the order they were said."""
        return [body for body in self.sent if isinstance(body, Release)]


class SendingStage(StoreStage):
    """The sending side: `Copies` to one peer, whose memory begins at `REMOTE`."""

    REMOTE = 1 << 30

    def __init__(
        self,
        folder: Path,
        *,
        granules: int = 8192,
        group_bytes: int = MIB,
        window_bytes: int = 32 * MIB,
        other_granules: int = 0,
    ) -> None:
        super().__init__(folder, granules, other_granules=other_granules)
        self.over: list[tuple[int, bool]] = []
        self.group_bytes = group_bytes
        self.window_bytes = window_bytes
        self.way = FakePeerTier(over=lambda number, is_complete: self.over.append((number, is_complete)))
        self.way.max_inflight_bytes = window_bytes
        self.copies = Copies(self.store, self.env, group_bytes=group_bytes)
        self.idle = self.kept()

    def start(
        self,
        numbers: list[int],
        *,
        shards: int = 1,
        transfer: str | None = None,
        way: FakePeerTier | None = None,
        want: int = 0,
    ) -> int:
        """Push these chunks; how many there are."""
        copies = self.copies.store(
            way or self.way,
            [key(number) for number in numbers],
            shards,
            priority=Priority.HANDOFF,
            deadline=self.now + 60.0,
            transfer=transfer,
            want=want,
        )
        return sum(len(copy.keys) for copy in copies)

    def grants(self, offer: Offer, indices: list[int] | None = None, *, at: int = REMOTE) -> Granted:
        """Room at the peer, slot behind slot, as it would say so."""
        granted = list(range(len(offer.keys))) if indices is None else indices
        slots = []
        for index in granted:
            is_tail = offer.tail_nbytes and index == len(offer.keys) - 1
            for _ in range(offer.shards):
                slots.append(Slot(at, offer.tail_nbytes if is_tail else offer.nbytes, 7))
                at += round_up(slots[-1].nbytes)
        return Granted(offer.push, granted, slots)

    def grant(self, offer: Offer, indices: list[int] | None = None) -> None:
        """The peer has room."""
        self.granted(self.way, self.grants(offer, indices))
        self.copies.pump()

    def granted(self, way: FakePeerTier, granted: Granted) -> None:
        """A peer answers."""
        self.copies.granted(way, granted.push, Grant(granted.granted, granted.slots))

    def fill(self, slots: list[Slot], first_layer: int = 0, layers: int = 1, *, seal: bool = False) -> None:
        """What a worker's `Fill` does."""
        chunks = self.store.fill(slots, first_layer, layers, WRITER)
        if seal:
            self.store.seal(chunks)
        self.copies.changed(chunks)
        self.copies.pump()

    def lose(self, slots: list[Slot]) -> None:
        """The writer lets go of chunks that are not whole."""
        chunks = [self.store.at(slot) for slot in slots]
        self.store.let_go(chunks)
        self.copies.changed(chunks)
        self.copies.pump()

    @property
    def has_room(self) -> bool:
        """Whether the window to the peer is not full."""
        return self.copies.queue(self.way).in_flight < self.window_bytes

    def finish(self, job: Write | None = None, error: Any = None) -> Write:
        """A write (the oldest) is over."""
        job = job or self.way.jobs[0]
        self.way.jobs.remove(job)
        self.copies.done(self.way, job.job, error)
        self.copies.pump()
        return job

    def finish_all(self, error: Any = None) -> list[Write]:
        """All writes, also those that come of it."""
        done = []
        while self.way.jobs:
            done.append(self.finish(error=error))
        return done

    def assert_idle(self) -> None:
        """No push is left, and none has left anything behind."""
        assert len(self.copies) == 0
        assert not self.way.jobs
        assert self.holds() == 0
        assert self.kept() == self.idle

    def kept(self) -> Counter[str]:
        """What the copies keep in memory."""
        self.copies.pump()
        return kept(self.copies, self.store, self.env.counters, self.env.timings, self.copies.landed)


class FakeSession:
    """A peer that pushes."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.source = f"peer {name}"
        self.token = bytes([number]) * 16
        self.sent: list[Any] = []
        self.abouts: list[int] = []

    def send(self, body: Admitted | Refused, about: int = 0) -> None:
        self.abouts.append(about)
        if isinstance(body, Refused):
            self.sent.append(Stop(about, body.text))
        elif isinstance(body, Done):
            self.sent.append(body)
        else:
            self.sent.append(Granted(about, body.granted, body.granted_slots))

    def answers(self, push: int) -> list[Granted | Stop]:
        """What it was told about one push."""
        return [body for body in self.sent if body.push == push]

    def granted(self, push: int) -> Granted | None:
        """The room it got."""
        return next((body for body in self.answers(push) if isinstance(body, Granted)), None)


class FakeListener(Listener):
    """Knows what is granted; what is `landing` is up to the test. `knows`: it can tell when nothing lands any more."""

    def __init__(self, *, knows: bool = True) -> None:
        self.knows = knows
        self.granted: dict[bytes, dict[int, int]] = defaultdict(dict)
        self.landing: set[tuple[bytes, int]] = set()
        self.doubtful: set[tuple[bytes, int]] = set()  # revoked, where it cannot tell
        self.expelled: set[bytes] = set()

    def invite(self, token: bytes) -> RemoteRegion:
        return RemoteRegion("sure", 4096, token, b"")

    def grant(self, token: bytes, offset: int, nbytes: int) -> None:
        assert (token, offset) not in self.landing, "granted while an earlier write may be landing"
        self.granted[token][offset] = nbytes
        self.doubtful.discard((token, offset))

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        assert self.granted[token].get(offset, nbytes) == nbytes
        if self.granted[token].pop(offset, None) and not self.knows:
            self.doubtful.add((token, offset))
        return (token, offset) not in self.landing and (token, offset) not in self.doubtful

    def take(self) -> list[Notification]:
        return []

    def expel(self, token: bytes) -> None:
        self.expelled.add(token)

    def close(self) -> None:
        pass


class ReceivingStage(StoreStage):
    """The receiving side, with a channel that checks writes ("sure") and one that does not ("blind")."""

    def __init__(self, folder: Path, *, granules: int = 16, peer_share: float = 1.0, other_granules: int = 0) -> None:
        super().__init__(folder, granules, other_granules=other_granules)
        self.transfers = Transfers(self.env)
        self.listeners = {"sure": FakeListener(), "blind": FakeListener(knows=False)}
        regions = {
            scheme: SimpleNamespace(
                scheme=scheme, checks_writes=scheme == "sure", wake=Event(), is_polled=False, crosses_wire=True
            )
            for scheme in self.listeners
        }
        self.config = NodeConfig(address=f"ipc://{folder}/node.sock", peer_share=peer_share, push_s=60.0)
        copies = Copies(self.store, self.env, group_bytes=1)
        self.tiers = Tiers(self.store, copies, self.env, store_s=1.0, load_s=1.0)
        self.inbound = InboundPushes(
            self.config,
            self.env,
            store=self.store,
            tiers=self.tiers,
            transfers=self.transfers,
            regions=SimpleNamespace(
                arena=self.arena, listeners=self.listeners, regions=regions, probe=Slot(0, 4096, 0)
            ),
        )
        self.changed, self.over = self.inbound.changed, self.inbound.over
        self.offers: Counter[int] = Counter()  # by number of the session
        self.peers: set[str] = set()
        self.idle = self.kept()

    @property
    def sealed(self) -> list[Chunk]:
        """The chunks that are whole."""
        return [chunk for chunk in self.store.index.slots[0].values() if chunk.state is State.SEALED]

    def offer(
        self, session: FakeSession, numbers: list[int], *, granules: int = 1, scheme: str = "sure", **fields: Any
    ) -> int:
        """An offer of chunks of so many granules each; its number."""
        self.offers[session.number] += 1
        self.peers.add(session.name)
        settings = {"nbytes": granules * GRANULE_BYTES, "layers": 1, "shards": 1, "wait_s": 5.0, **fields}
        number = self.offers[session.number]
        if session not in self.inbound.sessions:
            self.inbound.choose(session, scheme)
        self.inbound.admit(session, number, Admit([key(each) for each in numbers], **settings))
        return number

    def land(
        self,
        session: FakeSession,
        push: int,
        slots: list[Slot] | None = None,
        *,
        layers: tuple[int, int] = (0, 1),
        scheme: str = "sure",
    ) -> None:
        """Slices [first, first + count) of these slots (all that were granted) have come, and are right."""
        granted = session.granted(push)
        slots = slots if slots is not None else granted.slots
        good = [Slices(slot.offset, slot.generation, *layers) for slot in slots]
        nbytes = sum(slot.nbytes for slot in slots)
        self.inbound.landed(scheme, session.token, push, good, [], nbytes)

    def let_go(self, session: FakeSession, push: int, *, complete: bool = True) -> None:
        """The sender is done."""
        self.inbound.let_go(session, Release(push, complete))

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes."""
        self.now += seconds
        self.inbound.tick()
        self.transfers.expire(self.now)

    def assert_idle(self) -> None:
        """No push is left, and none has left anything behind."""
        pushes = self.inbound
        assert len(pushes) == 0
        assert not pushes.grants
        accounts = [pushes.account(name) for name in self.peers]
        assert all((one.pushes, one.keys, one.nbytes) == (0, 0, 0) for one in accounts)
        for session in pushes.sessions:
            pushes.session_over(session, is_dead=True)
        pushes.forget(())
        pushes.turn()
        assert self.kept() == self.idle
        assert not any(spans for listener in self.listeners.values() for spans in listener.granted.values())
        assert not len(self.transfers), "somebody still waits for a transfer"
        assert set(self.store.index.census()[0]) <= {"sealed"}

    def kept(self) -> Counter[str]:
        """What the pushes keep in memory."""
        pushes = self.inbound
        parts = (self.config, self.env, self.store, self.tiers, self.transfers)
        return kept(pushes, *parts, pushes.regions, pushes.changed, pushes.over)

    def close(self) -> None:
        self.inbound.close()
        super().close()
