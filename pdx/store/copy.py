"""One copy: its life, what of it can be read, what was given to its tier, and the job that goes next; and the copies of
one tier in their order.

    QUEUED ──grant──► RUNNING
       │                 │ all given, give up
       │ give up         ▼
       └────────────► DRAINING ──drained──► OVER

A copy in DRAINING has jobs under way, which still read or write the arena.
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
OVERTAKEN = 4  # times its own bytes may overtake a load
AHEAD_S = 0.05  # of loads a tier is given what it loads in this time, or `Tier.loads_at_once` if that is more
MAX_SLICES = 1024  # in one job: the notification of a write to a peer has room for their digests


class Priority(IntEnum):
    HANDOFF = 0  # a decoder waits for what a prefill engine fills
    AWAITED = 1  # a request waits for what a tier has
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
    GIVE_UP = "give up"  # this node: cancelled, aborted, too late; or the tier, or it is gone
    DRAINED = "drained"


COPY: dict[tuple[CopyState, CopyStep], CopyState] = {
    (CopyState.QUEUED, CopyStep.GRANT): CopyState.RUNNING,
    (CopyState.QUEUED, CopyStep.GIVE_UP): CopyState.DRAINING,
    (CopyState.RUNNING, CopyStep.ALL_GIVEN): CopyState.DRAINING,
    (CopyState.RUNNING, CopyStep.GIVE_UP): CopyState.DRAINING,
    (CopyState.DRAINING, CopyStep.DRAINED): CopyState.OVER,
}


class Item(msgspec.Struct, eq=False):
    """One chunk of one shard on its way; the `index`-th of its copy. `remote`: its slot in a tier that has slots."""

    copy: Copy
    index: int
    chunk: Chunk
    remote: Slot | None
    ready: int = 0  # bit l: slice l can be read, and its copy knows
    sent: int = 0  # bit l: slice l was given to the tier

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice; where they are not equal, the least of them."""
        return max(1, self.chunk.slot.nbytes // self.chunk.reservation.layers)

    @property
    def is_dead(self) -> bool:
        """Whether it will never be whole: its writer gave up."""
        chunk = self.chunk
        return chunk.state not in FINDABLE and not chunk.is_complete

    def nbytes(self, bits: int) -> int:
        slice_bytes = self.slice_bytes
        if slice_bytes * self.chunk.reservation.layers == self.chunk.slot.nbytes:
            return slice_bytes * bits.bit_count()
        return sum(self.chunk.span(first, count)[1] for first, count in _runs(bits))


class Copy(msgspec.Struct, eq=False):
    """One copy. `chunks` lie in an arena of this node and are held, or filled, from its start to its end; `items` are
    those that it was granted room for. It counts what changes, so that nothing here looks at all of its chunks but its
    grant and its end.
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
    want: int = 0  # the question of a peer that this copy answers; 0: of none
    arenas: Sequence[int] = ()  # where shard 0, 1, … goes, if the tier is that of this node's arenas
    begun_ns: int = 0
    held_bytes: int = 0
    size_class: int = 0  # of the bytes of all its chunks; 0: it goes first, for it was overtaken by enough
    items: list[Item] = []
    state: CopyState = CopyState.QUEUED
    is_asked: bool = False  # whether the tier was asked for room
    under_way: int = 0  # jobs given and not over
    given_bytes: int = 0  # of a load
    copied_bytes: int = 0
    unfilled_bytes: int = 0  # that are still to be computed
    is_given_up: bool = False
    is_lost: bool = False  # the tier is gone: there is nobody to tell
    ready: list[int] = []  # a heap: the items with slices that are ready and not given …
    ready_bytes: int = 0  # … of so many bytes …
    ready_slices: int = 0  # … and so many slices
    ungiven: int = 0  # slices, now or later; 0: nothing is left to give
    uncopied: int = -1  # slices; less than 0: it is not granted

    def __post_init__(self) -> None:
        self.held_bytes = sum(map(_NBYTES, self.chunks))
        self.size_class = size_class(self.held_bytes)

    def __repr__(self) -> str:
        way = "from" if self.is_load else "to"
        return f"<Copy {self.number} {way} {self.tier.name} {self.state} {self.copied_bytes} bytes>"

    @property
    def is_complete(self) -> bool:
        """Whether all that it was granted room for is copied."""
        return not self.uncopied

    def step(self, step: CopyStep) -> None:
        self.state = COPY[self.state, step]

    def grant(self, grant: Grant) -> None:
        """There is room for these.

        :raises ProtocolError: it does not fit what was asked for; nothing has changed.
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
        """Count what can be read of it since the last look; whether that is anything."""
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
        """Whether there is a job to give: of `group_bytes`, or as large as a job may be, or the last."""
        most = min(group_bytes, self.tier.max_job_bytes)
        is_full = self.ready_bytes >= most or self.ready_slices >= MAX_SLICES
        return bool(self.ready) and (is_full or self.tier.is_whole or not self.unfilled_bytes)

    def next_job(self) -> Job:
        """The slices that go next, of the first chunks that have some. It must be due."""
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
        """Bytes, time and spans of what a job has moved, for tiers of every kind alike."""
        what = f"{self.tier.kind}_{'loaded' if self.is_load else 'stored'}"
        counters[f"{what}_bytes"] += job.nbytes
        counters[f"{what}_ns"] += job.end_ns - job.start_ns
        lane = LANES.get(what)
        if tracer is None or lane is None or not job.end_ns or not tracer.is_on:
            return
        if lane is Lane.WIRE and job.transfer is None:
            return  # nobody could tell what was pushed
        nbytes: Counter[tuple[int, int]] = Counter()
        for part in job.parts:
            nbytes[part.first_layer, part.count] += part.span[1]
        for (first, layers), moved in nbytes.items():  # one span for all chunks of which the job carried these layers
            tracer.span(lane, job.transfer or "", first, layers, job.start_ns, job.end_ns, moved)


class CopyQueue(msgspec.Struct):
    """The copies of one tier by number, and the ranks of those with a job to give, in their order."""

    copies: dict[int, Copy] = {}
    ranks: dict[int, tuple[int, int, int]] = {}  # by number, of the copies in these two
    due: list[tuple[int, int, int]] = []  # of copies to the tier: sorted (priority, bytes to be filled, number) …
    due_loads: list[tuple[int, int, int]] = []  # … and of loads: sorted (priority, `Copy.size_class`, number)
    in_flight: int = 0  # bytes given and not over
    loads: int = 0  # of these, jobs that load …
    load_bytes: int = 0  # … and their bytes
    loaded_ns: int = 0  # when the last bytes came from there
    wants: int = 0  # copies that a peer asked for …
    wanted_bytes: int = 0  # … and what they hold
    stored_bytes: int = 0  # held by copies that nobody waits for
    # bytes of loads not given yet, by priority and size class
    to_load: Counter[tuple[int, int]] = msgspec.field(default_factory=Counter)
    submitted: Counter[int] = msgspec.field(default_factory=Counter)  # bytes of all loads so far, by priority …
    # … and at how many of these a load is overtaken no more
    turns: defaultdict[int, Deadlines[int]] = msgspec.field(default_factory=partial(defaultdict, Deadlines))

    def add(self, copy: Copy) -> list[Copy]:
        """A copy more; of loads those that go first from now on, because enough has overtaken them."""
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
        """A copy holds so many bytes more, or fewer."""
        if copy.want:
            self.wanted_bytes += nbytes
        elif copy.priority >= Priority.STORE:
            self.stored_bytes += nbytes

    def bytes_before(self, nbytes: int) -> int:
        """Bytes of the loads that come before a load of `nbytes` that a request waits for."""
        own = Priority.AWAITED, size_class(nbytes)
        return self.load_bytes + sum(left for turn, left in self.to_load.items() if turn <= own)

    def has_room(self, copy: Copy) -> bool:
        """Whether the tier of this copy, which goes next, may be given another job."""
        tier, limit = copy.tier, copy.tier.max_inflight_bytes
        if copy.priority >= Priority.STORE:
            limit = max(1, limit // 2)  # the other half is for what somebody waits for
        if copy.is_load and self.loads >= tier.loads_at_once:
            limit = min(limit, self.in_flight - self.load_bytes + int(AHEAD_S * 1e9 * tier.load_rate.gb_s))
        return tier.is_ready and self.in_flight < limit

    def rank(self, copy: Copy, group_bytes: int) -> bool:
        """Put a copy where it belongs among those that have a job to give; whether it has one."""
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
    """Runs of chunks that one copy can name: of one size, layer count and form, but for the size of a tail at the
    end."""
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
    """By which loads take turns: those of fewer bytes first, and of those between two powers of two the older one."""
    return nbytes.bit_length()


def _first_run(bits: int) -> tuple[int, int]:
    """The lowest run of ones in `bits`, which are not 0, as (first, length)."""
    first = (bits & -bits).bit_length() - 1
    rest = bits >> first
    return first, (~rest & (rest + 1)).bit_length() - 1


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    while bits:
        first, length = _first_run(bits)
        yield first, length
        bits &= ~(((1 << length) - 1) << first)
