"""One copy: its life cycle, which slices are readable, which were given to its tier, and its next job. Also the queue
of one tier's copies.

    QUEUED ──grant──► RUNNING
       │                 │ all given, give up
       │ give up         ▼
       └────────────► DRAINING ──drained──► OVER

A copy in DRAINING may have jobs in flight, which still read or write the arena.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from enum import IntEnum, StrEnum
from functools import partial
from operator import attrgetter

import msgspec

from pdx.errors import ProtocolError
from pdx.memory.slot import Slot
from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.lifecycle import FINDABLE
from pdx.store.tier import Grant, Job, Part, Tier
from pdx.telemetry.trace import Lane, Tracer

LANES = {
    "peer_stored": Lane.WIRE,
    "disk_stored": Lane.DISK_STORE,
    "disk_loaded": Lane.DISK_LOAD,
    "remote_stored": Lane.REMOTE_STORE,
    "remote_loaded": Lane.REMOTE_LOAD,
    "arenas_stored": Lane.ARENAS,
}
_NBYTES, _LAYERS = attrgetter("slot.nbytes"), attrgetter("reservation.layers")
OVERTAKEN = 4  # a load is overtaken by at most so many times its own bytes
AHEAD_S = 0.05  # a tier is given as many loads as it completes in this time, at least `Tier.loads_at_once`
MAX_SLICES = 1024  # per job: the notification of a write to a peer has room for so many digests


class Priority(IntEnum):
    HANDOFF = 0  # a decoder waits for chunks that a prefill engine fills
    AWAITED = 1  # a request waits for chunks that a tier has
    PREFETCH = 2
    STORE = 3
    REBALANCE = 4


class CopyState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DRAINING = "draining"
    OVER = "over"


class CopyStep(StrEnum):
    GRANT = "grant"
    ALL_GIVEN = "all given"
    GIVE_UP = "give up"  # cancelled, aborted or too late; refused by the tier, or the tier is gone
    DRAINED = "drained"


COPY: dict[tuple[CopyState, CopyStep], CopyState] = {
    (CopyState.QUEUED, CopyStep.GRANT): CopyState.RUNNING,
    (CopyState.QUEUED, CopyStep.GIVE_UP): CopyState.DRAINING,
    (CopyState.RUNNING, CopyStep.ALL_GIVEN): CopyState.DRAINING,
    (CopyState.RUNNING, CopyStep.GIVE_UP): CopyState.DRAINING,
    (CopyState.DRAINING, CopyStep.DRAINED): CopyState.OVER,
}


class Item(msgspec.Struct, eq=False):
    """One chunk of one shard, the `index`-th of its copy. `remote`: its slot in a tier that has slots."""

    copy: Copy
    index: int
    chunk: Chunk
    remote: Slot | None
    ready: int = 0  # bit l: slice l is readable and counted by the copy
    sent: int = 0  # bit l: slice l was given to the tier

    @property
    def slice_bytes(self) -> int:
        """Bytes per slice; the minimum if slices differ in size."""
        return max(1, self.chunk.slot.nbytes // self.chunk.reservation.layers)

    @property
    def is_dead(self) -> bool:
        """Whether the chunk will never be whole, because its writer gave up."""
        chunk = self.chunk
        return chunk.state not in FINDABLE and not chunk.is_complete

    def nbytes(self, bits: int) -> int:
        slice_bytes = self.slice_bytes
        if slice_bytes * self.chunk.reservation.layers == self.chunk.slot.nbytes:
            return slice_bytes * bits.bit_count()
        return sum(self.chunk.span(first, count)[1] for first, count in _runs(bits))


class Copy(msgspec.Struct, eq=False):
    """One copy. Its `chunks` lie in an arena of this node and are held, or filled, from its start to its end; `items`
    are those for which room was granted. Counters are kept incrementally, so that only the grant and the end look at
    all chunks.
    """

    number: int
    tier: Tier
    keys: Sequence[bytes]
    shards: int
    chunks: list[Chunk]  # key-major, `shards` each
    priority: Priority
    deadline: float
    is_load: bool = False
    transfer: str | None = None
    layout: bytes = b""
    want: int = 0  # the number of the peer's request that this copy answers; 0: none
    arenas: Sequence[int] = ()  # per shard, the destination, if the tier is that of this node's arenas
    begun_ns: int = 0
    held_bytes: int = 0
    size_class: int = 0  # see `size_class`; 0: it goes first, because enough loads have overtaken it
    items: list[Item] = []
    state: CopyState = CopyState.QUEUED
    is_asked: bool = False  # whether the tier was asked for room
    under_way: int = 0  # jobs in flight
    given_bytes: int = 0  # counted for loads only
    copied_bytes: int = 0
    unfilled_bytes: int = 0  # still to be computed
    is_given_up: bool = False
    is_lost: bool = False  # the tier is gone and need not be notified
    ready: list[int] = []  # a heap: indices of items with slices that are ready and not given …
    ready_bytes: int = 0  # … the bytes of these slices …
    ready_slices: int = 0  # … and their number
    ungiven: int = 0  # slices not given yet, ready or not; 0: nothing is left to give
    uncopied: int = -1  # slices not copied yet; negative: not granted

    def __post_init__(self) -> None:
        self.held_bytes = sum(map(_NBYTES, self.chunks))
        self.size_class = size_class(self.held_bytes)

    def __repr__(self) -> str:
        way = "from" if self.is_load else "to"
        return f"<Copy {self.number} {way} {self.tier.name} {self.state} {self.copied_bytes} bytes>"

    @property
    def is_complete(self) -> bool:
        """Whether all granted slices are copied."""
        return not self.uncopied

    def step(self, step: CopyStep) -> None:
        self.state = COPY[self.state, step]

    def grant(self, grant: Grant) -> None:
        """Take a grant of room.

        :raises ProtocolError: the grant does not match the request; nothing has changed.
        """
        self.items = self._items(grant)
        self.chunks = [item.chunk for item in self.items]
        self.held_bytes = self.unfilled_bytes = sum(map(_NBYTES, self.chunks))
        slices = sum(map(_LAYERS, self.chunks))
        self.ungiven = self.uncopied = slices
        for item in self.items:
            self.note(item)

    def _items(self, grant: Grant) -> list[Item]:
        shards = self.shards
        slots: Sequence[Slot | None] = grant.slots if grant.slots is not None else [None] * (len(grant.keys) * shards)
        if len(slots) != len(grant.keys) * shards or len(set(grant.keys)) != len(grant.keys):
            raise ProtocolError(f"{len(slots)} slots for {len(grant.keys)} chunks of {shards} shards")
        items: list[Item] = []
        for number, index in enumerate(grant.keys):
            if index >= len(self.keys):
                raise ProtocolError(f"chunk {index} of {len(self.keys)} granted")
            chunks = self.chunks[index * shards : (index + 1) * shards]
            for chunk, slot in zip(chunks, slots[number * shards : (number + 1) * shards], strict=True):
                if slot is not None and slot.nbytes != chunk.slot.nbytes:
                    raise ProtocolError(f"{slot} granted for a chunk of {chunk.slot.nbytes} bytes")
                items.append(Item(self, len(items), chunk, slot))
        return items

    # ---- jobs -------------------------------------------------------------------------------

    def note(self, item: Item) -> bool:
        """Count the slices of an item that became readable since the last call; return whether there are any."""
        chunk = item.chunk
        whole = (1 << chunk.reservation.layers) - 1
        readable = whole if self.is_load else chunk.filled
        new = readable & ~item.ready
        if not new or (self.tier.is_whole and readable != whole):
            return False
        if item.ready == item.sent:
            heapq.heappush(self.ready, item.index)
        item.ready |= new
        nbytes = chunk.slot.nbytes if new == whole else item.nbytes(new)
        self.unfilled_bytes -= nbytes
        self.ready_bytes += nbytes
        self.ready_slices += new.bit_count()
        return True

    def is_due(self, group_bytes: int) -> bool:
        """Whether a job is due: of `group_bytes`, of the maximum size, or the last one."""
        most = min(group_bytes, self.tier.max_job_bytes)
        is_full = self.ready_bytes >= most or self.ready_slices >= MAX_SLICES
        return bool(self.ready) and (is_full or self.tier.is_whole or not self.unfilled_bytes)

    def next_job(self) -> Job:
        """The next job: ready slices of the first chunks that have some. The copy must be due."""
        limit = self.tier.max_job_bytes
        parts: list[Part] = []
        nbytes = count = 0
        while self.ready:
            item = self.items[self.ready[0]]
            chunk = item.chunk
            slices = chunk.reservation.layers
            is_whole = not item.sent and item.ready == (1 << slices) - 1
            first, layers = (0, slices) if is_whole else _first_run(item.ready & ~item.sent)
            fitting = layers
            if not self.tier.is_whole and (count + layers > MAX_SLICES or nbytes + layers * item.slice_bytes > limit):
                fitting = min(MAX_SLICES - count, (limit - nbytes) // item.slice_bytes)
            if fitting <= 0:
                if parts:
                    break
                fitting = 1  # a slice that is larger than a job goes alone
            form, lead = chunk.hints.form, self._lead(item) if self.tier.is_whole else b""
            where = chunk.slot, item.remote
            parts.append(Part(chunk.key, chunk.shard, slices, first, fitting, *where, form, lead, chunk.is_passed))
            item.sent |= ((1 << fitting) - 1) << first
            if item.sent == item.ready:
                heapq.heappop(self.ready)
            nbytes += chunk.slot.nbytes if fitting == slices else chunk.span(first, fitting)[1]
            count += fitting
            if fitting < layers or self.tier.is_whole:
                break
        self.ready_bytes -= nbytes
        self.ready_slices -= count
        self.ungiven -= count
        return Job(self.number, parts, nbytes, transfer=self.transfer)

    def _lead(self, item: Item) -> bytes:
        before = self.items[item.index - self.shards].chunk.key if item.index >= self.shards else b""
        return before if before == item.chunk.parent else b""

    def copied(self, job: Job) -> None:
        self.copied_bytes += job.nbytes
        self.uncopied -= sum(part.count for part in job.parts)

    def record(self, job: Job, counters: Counter[str], tracer: Tracer | None) -> None:
        """Record a job's bytes and time in counters and its spans in the trace, for every kind of tier."""
        what = f"{self.tier.kind}_{'loaded' if self.is_load else 'stored'}"
        counters[f"{what}_bytes"] += job.nbytes
        counters[f"{what}_ns"] += job.end_ns - job.start_ns
        lane = LANES.get(what)
        if tracer is None or lane is None or not job.end_ns or not tracer.is_on:
            return
        if lane is Lane.WIRE and job.transfer is None:
            return  # the span could not be attributed to a transfer
        nbytes: Counter[tuple[int, int]] = Counter()
        for part in job.parts:
            nbytes[part.first_layer, part.count] += part.span[1]
        for (first, layers), moved in nbytes.items():  # one span per range of layers, for all its chunks
            tracer.span(lane, job.transfer or "", first, layers, job.start_ns, job.end_ns, moved)


class CopyQueue(msgspec.Struct):
    """The copies of one tier by number, and the sorted ranks of those with a job due."""

    copies: dict[int, Copy] = {}
    ranks: dict[int, tuple[int, int, int]] = {}  # copy number -> its rank in one of these two
    due: list[tuple[int, int, int]] = []  # of copies to the tier: sorted (priority, unfilled bytes, number) …
    due_loads: list[tuple[int, int, int]] = []  # … and of loads: sorted (priority, `Copy.size_class`, number)
    in_flight: int = 0  # bytes
    loads: int = 0  # load jobs in flight …
    load_bytes: int = 0  # … and their bytes
    loaded_ns: int = 0  # when bytes last came from the tier
    wants: int = 0  # copies that a peer asked for …
    wanted_bytes: int = 0  # … and the bytes they hold
    stored_bytes: int = 0  # bytes held by copies that nothing waits for
    # bytes of loads not given yet, by priority and size class
    to_load: Counter[tuple[int, int]] = msgspec.field(default_factory=Counter)
    submitted: Counter[int] = msgspec.field(default_factory=Counter)  # bytes of all loads so far, by priority …
    # … and per priority, the value of `submitted` from which on a load is not overtaken any more
    turns: defaultdict[int, Deadlines[int]] = msgspec.field(default_factory=partial(defaultdict, Deadlines))

    def add(self, copy: Copy) -> list[Copy]:
        """Add a copy; return the older loads that go first from now on, because enough bytes have overtaken them."""
        self.copies[copy.number] = copy
        self.count(copy, copy.held_bytes)
        self.wants += bool(copy.want)
        if not copy.is_load:
            return []
        priority, nbytes = copy.priority, copy.held_bytes
        self.to_load[priority, copy.size_class] += nbytes
        self.turns[priority].add([copy.number], self.submitted[priority] + OVERTAKEN * nbytes)
        self.submitted[priority] += nbytes
        first: list[Copy] = []
        for number in self.turns[priority].take(self.submitted[priority]):
            older = self.copies.get(number)
            if older is not None and not older.is_given_up:
                left = older.held_bytes - older.given_bytes
                self.to_load[priority, older.size_class] -= left
                older.size_class = 0
                self.to_load[priority, 0] += left
                first.append(older)
        return first

    def remove(self, copy: Copy) -> None:
        del self.copies[copy.number]
        self.count(copy, -copy.held_bytes)
        self.wants -= bool(copy.want)

    def count(self, copy: Copy, nbytes: int) -> None:
        """Count that a copy holds `nbytes` more, or fewer if negative."""
        if copy.want:
            self.wanted_bytes += nbytes
        elif copy.priority >= Priority.STORE:
            self.stored_bytes += nbytes

    def bytes_before(self, nbytes: int) -> int:
        """Bytes of the loads that go before a new load of `nbytes` for which a request waits."""
        own = Priority.AWAITED, size_class(nbytes)
        return self.load_bytes + sum(left for turn, left in self.to_load.items() if turn <= own)

    def has_room(self, copy: Copy) -> bool:
        """Whether the tier may be given another job now, of this copy, which goes next."""
        tier, limit = copy.tier, copy.tier.max_inflight_bytes
        if copy.priority >= Priority.STORE:
            limit = max(1, limit // 2)  # the other half is for copies that a request waits for
        if copy.is_load and self.loads >= tier.loads_at_once:
            limit = min(limit, self.in_flight - self.load_bytes + int(AHEAD_S * 1e9 * tier.load_rate.gb_s))
        return tier.is_ready and self.in_flight < limit

    def rank(self, copy: Copy, group_bytes: int) -> bool:
        """Put a copy in its place among those with a job due; return whether it has one."""
        due = self.due_loads if copy.is_load else self.due
        if (was := self.ranks.pop(copy.number, None)) is not None:
            del due[bisect.bisect_left(due, was)]
        if copy.state is not CopyState.RUNNING or not copy.is_due(group_bytes):
            return False
        rank = (copy.priority, copy.size_class if copy.is_load else copy.unfilled_bytes, copy.number)
        bisect.insort(due, rank)
        self.ranks[copy.number] = rank
        return True


def alike(found: Sequence[tuple[bytes, list[Chunk]]]) -> Iterator[list[tuple[bytes, list[Chunk]]]]:
    """Split into runs that one copy can carry: of equal size, layer count and form, except that the last chunk may be a
    tail of another size."""
    run: list[tuple[bytes, list[Chunk]]] = []
    for key, chunks in found:
        chunk, first = chunks[0], run[0][1][0] if run else chunks[0]
        is_alike = (chunk.reservation.layers, chunk.hints.form) == (first.reservation.layers, first.hints.form)
        has_size = chunk.tail or chunk.slot.nbytes == first.slot.nbytes
        if run and (run[-1][1][0].tail or not (is_alike and has_size)):
            yield run
            run = []
        run.append((key, chunks))
    if run:
        yield run


def size_class(nbytes: int) -> int:
    """The order of loads: smaller classes first. A class spans a power of two; within it the older load goes first."""
    return nbytes.bit_length()


def _first_run(bits: int) -> tuple[int, int]:
    """The lowest run of ones in `bits`, which must not be 0, as (first, length)."""
    first = (bits & -bits).bit_length() - 1
    rest = bits >> first
    return first, (~rest & (rest + 1)).bit_length() - 1


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    while bits:
        first, length = _first_run(bits)
        yield first, length
        bits &= ~(((1 << length) - 1) << first)
