"""The slots of one arena: for chunks that come, taken from chunks that may go."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from pdx.memory.arena import GRANULE_BYTES, LAST_GENERATION, NEVER, Arena, round_up
from pdx.memory.slot import Slot
from pdx.store.allocator import Allocator
from pdx.store.chunk import Chunk
from pdx.store.eviction import EvictionOrder
from pdx.store.history import Cause, History
from pdx.store.index import Index
from pdx.store.lifecycle import Step
from pdx.telemetry.env import Env

LOOKS = 1024  # chunks looked at in one search beyond those that it must look at
BARS = 64  # by chunks of higher levels, before a search leaves a level


class SlotPool:
    """Grants slots, evicts chunks for them, and takes slots back. It alone changes the arena's tables.

    What may be evicted is in `order`; who makes a chunk evictable, or not, inserts it there and holds it.
    """

    def __init__(
        self,
        number: int,
        arena: Arena,
        nbytes: int,
        index: Index,
        order: EvictionOrder[Chunk],
        history: History,
        env: Env,
    ) -> None:
        """`number`: of the arena in its node; `nbytes`: how much of it, from its beginning, is for chunks."""
        self.total_bytes = nbytes
        self._number = number
        self._generations = arena.generations
        self._filled = arena.filled
        self._allocator = Allocator(nbytes)
        self._index = index
        self._history = history
        self._counters = env.counters
        self._clock = env.clock
        self._stopped_at: dict[int, Chunk] = {}  # size that was not found -> where the next search for it goes on
        self.order = order

    @property
    def free_bytes(self) -> int:
        """Bytes that are nobody's."""
        return self._allocator.free_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that would be nobody's if everything were evicted that may be."""
        return self._allocator.free_bytes + self.order.nbytes

    def grant(self, sizes: Sequence[int], shards: int, *, partial: bool, who: str) -> list[Slot]:
        """New slots for chunks of these sizes, in order: for each one per shard.

        For all of them or for none; with `partial` for as many leading ones as fit. Evicts what it must, and without
        `partial` nothing unless everything fits then. `who` wants them.
        """
        runs = [(nbytes, len(list(run)) * shards) for nbytes, run in itertools.groupby(sizes)]
        taken = [self._allocator.allocate_many(nbytes, count) for nbytes, count in runs]
        short = [at for at, (_, count) in enumerate(runs) if len(taken[at]) < count]
        if short:
            missing = len(sizes) * shards - sum(map(len, taken))
            for at in short:  # the slots may fit elsewhere once there is more room
                self._allocator.free_many(taken[at])
            self._make_room(max(runs[at][0] for at in short), missing, partial=partial, who=who)
            for at in short:
                taken[at] = self._allocator.allocate_many(*runs[at])
        leading: list[int] = []
        for (_, count), got in zip(runs, taken, strict=True):
            leading += got
            if len(got) < count:
                break
        whole = len(leading) // shards if partial or len(leading) == len(sizes) * shards else 0
        self._allocator.free_many([offset for got in taken for offset in got][whole * shards :])
        return [
            Slot(offset, sizes[at // shards], self._next_generation(offset), self._number)
            for at, offset in enumerate(leading[: whole * shards])
        ]

    def _make_room(self, nbytes: int, count: int, *, partial: bool, who: str) -> None:
        """Evict, so that `count` slots of `nbytes` more fit, with `partial` some of them; nothing if they would not."""
        size = round_up(nbytes)
        clearing = Clearing(self._allocator, self._index, self._number, size, count)
        clearing.search(self.order.levels(self._stopped_at.get(size)))
        self._stopped_at = {size: clearing.stopped_at} if clearing.stopped_at is not None else {}
        victims = list(clearing.victims) if partial or clearing.is_enough else []
        self._counters["evicted"] += len(victims)
        unstored = sum(not (chunk.is_stored or chunk.tail) for chunk in victims)
        if unstored:
            self._counters["evicted_unstored"] += unstored
        self._note(victims, who)
        self.free(victims, Step.EVICT)

    def _note(self, victims: Sequence[Chunk], who: str) -> None:
        alike: dict[tuple[bool, bool], list[bytes]] = {}
        for chunk in victims:
            alike.setdefault((chunk.is_over, chunk.is_stored), []).append(chunk.key)
        for (is_over, is_stored), keys in alike.items():
            why = Cause.OVER_QUOTA if is_over else Cause.EVICTED
            self._history.note(keys, why, self._clock(), detail=who, is_stored=is_stored)

    def drop(self, chunk: Chunk, why: Cause) -> None:
        """Have a sealed chunk forgotten now, and its room free as soon as nobody reads it."""
        self._history.note((chunk.key,), why, self._clock())
        if chunk.leases:  # the last of those who read it frees it
            self._index.step([chunk], Step.DELETE)
        else:
            self.free([chunk], Step.EVICT)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """These slots were granted and are not used: they never held a chunk."""
        self._allocator.free_many([slot.offset for slot in slots])

    def free(self, chunks: Sequence[Chunk], step: Step) -> None:
        """Forget these chunks, which nobody reads or writes, and give their room back."""
        self._index.step(chunks, step)
        for chunk in chunks:
            self.order.remove(chunk)
            chunk.before = None
            # Before anybody else can get the room: stale readers and writers see it.
            self._next_generation(chunk.slot.offset)
        self._allocator.free_many([chunk.slot.offset for chunk in chunks])

    def tell_filled(self, chunk: Chunk) -> None:
        """More of its slices are filled: readers see how many leading ones."""
        self._filled[chunk.slot.offset // GRANULE_BYTES] = (~chunk.filled & (chunk.filled + 1)).bit_length() - 1

    def tell_never(self, chunk: Chunk) -> None:
        """It will never be whole: who copies what is filled need not wait for the rest."""
        self._filled[chunk.slot.offset // GRANULE_BYTES] = NEVER

    def _next_generation(self, offset: int) -> int:
        granule = offset // GRANULE_BYTES
        self._filled[granule] = 0
        generation = (self._generations[granule] + 1) & LAST_GENERATION
        self._generations[granule] = generation
        return generation


class Window(msgspec.Struct):
    """Room without a gap: what would be free if `chunks` were evicted, with the free or cleared room beside them."""

    start: int
    end: int
    chunks: list[Chunk]
    cleared: list[int]  # starts of windows that were cleared before, and are parts of this one
    slots: int = 0  # that fit into those, and into the holes that are parts of it


class Clearing:
    """Which chunks to evict, so that `wanted` slots of `size` bytes more fit: found before anything is evicted.

    It begins at the chunk that should go first. Where that chunk's room, joined with the holes beside it, holds one
    more slot, it goes alone: with slots of one size that is all. Otherwise the chunks beside it go with it, first those
    before it (the end of a prompt lies behind its beginning, and goes first), then those behind it, until one more slot
    fits or both ways are barred by what must stay; then nothing of that goes. What is on a higher level than it bars
    the way, too: the end of a prompt, which nearly always is too short for a chunk, would take any chunk with it, just
    used or not. Where such bars are met again and again, the turn passes to the next level: else a search among the
    ends would never come to the chunks. So neighbours of its level, or below, go out of their turn, though chunks whose
    turn it is might lie together elsewhere.

    Its cost is bounded by what it finds, and by `LOOKS` chunks where it finds nothing.
    """

    def __init__(self, allocator: Allocator, index: Index, arena: int, size: int, wanted: int) -> None:
        self._allocator = allocator
        self._index = index
        self._arena = arena
        self._size = size
        self._wanted = wanted
        self._looks = LOOKS + 8 * wanted + size // GRANULE_BYTES
        self._bars = 0  # met on this level, by what is on a higher one
        self._ends: dict[int, int] = {}  # start of a cleared window -> its end
        self._starts: dict[int, int] = {}  # end -> start
        self.victims: dict[Chunk, None] = {}  # in the order in which they go
        self.slots = 0  # that would fit into what is cleared
        self.stopped_at: Chunk | None = None  # where the search gave up before it had looked at all

    @property
    def is_enough(self) -> bool:
        return self.slots >= self._wanted

    def search(self, levels: Iterable[Iterable[Chunk]]) -> None:
        """Choose victims until all slots fit: of each level those that go first. Nothing may change meanwhile."""
        for first_to_go in levels:
            self._bars = 0
            for chunk in first_to_go:
                if self._looks <= 0 or self._bars >= BARS:
                    self.stopped_at = self.stopped_at or chunk
                    break
                self._looks -= 1
                if chunk not in self.victims:
                    self._take(chunk)
                if self.is_enough:  # before the next one is asked for: a policy moves on by what was asked
                    self.stopped_at = None
                    return
            if self._looks <= 0:
                break
        self._join_all()

    def _take(self, chunk: Chunk) -> None:
        """This chunk goes, with what lies beside it where that is needed for one slot more; or it stays."""
        if chunk.room_bytes == self._size:
            self._clear_alone(chunk)
            self._clear_other_shards([chunk])
            return
        window = self._window(chunk)
        if self._grow(window):
            self._clear(window)
            self._clear_other_shards(window.chunks)

    def _window(self, chunk: Chunk) -> Window:
        start = chunk.slot.offset
        window = Window(start, start + chunk.room_bytes, [chunk], [])
        self._join_before(window)
        self._join_behind(window)
        return window

    def _join_before(self, window: Window) -> None:
        while True:
            start = self._starts.get(window.start)
            if start is not None:
                self._absorb(window, start, window.start)
            else:
                start = self._allocator.before(window.start)
                hole_bytes = self._allocator.hole_bytes(start) if start is not None else 0
                if start is None or not hole_bytes:
                    return
                window.slots += hole_bytes // self._size
            window.start = start

    def _join_behind(self, window: Window) -> None:
        while True:
            end = self._ends.get(window.end)
            if end is not None:
                self._absorb(window, window.end, end)
            else:
                hole_bytes = self._allocator.hole_bytes(window.end)
                if not hole_bytes:
                    return
                window.slots += hole_bytes // self._size
                end = window.end + hole_bytes
            window.end = end

    def _join_all(self) -> None:
        """Join what was cleared with what lies beside it: across them more slots may fit."""
        for start in list(self._ends):
            end = self._ends.get(start)
            if end is not None:
                window = Window(start, end, [], [])
                self._absorb(window, start, end)
                self._join_before(window)
                self._join_behind(window)
                self._clear(window)

    def _absorb(self, window: Window, start: int, end: int) -> None:
        window.cleared.append(start)
        window.slots += (end - start) // self._size

    def _gain(self, window: Window) -> int:
        """How many slots more would fit than without this window."""
        return (window.end - window.start) // self._size - window.slots

    def _grow(self, window: Window) -> bool:
        """Take in what lies before it, then what lies behind it, until one slot more fits; whether it does."""
        slots = self._index.slots[self._arena]
        level = window.chunks[0].level
        is_barred = False  # before it
        while not self._gain(window):
            if self._looks <= 0:
                return False
            self._looks -= 1
            offset = window.end if is_barred else self._allocator.before(window.start)
            chunk = slots.get(offset) if offset is not None else None
            if chunk is not None and not (chunk.is_evictable and chunk.level <= level):
                self._bars += chunk.is_evictable
                chunk = None
            if chunk is None:
                if is_barred:
                    return False
                is_barred = True
                continue
            window.chunks.append(chunk)
            if is_barred:
                window.end += chunk.room_bytes
                self._join_behind(window)
            else:
                window.start = chunk.slot.offset
                self._join_before(window)
        return True

    def _clear(self, window: Window) -> None:
        self.slots += self._gain(window)
        for start in window.cleared:
            del self._starts[self._ends.pop(start)]
        self._ends[window.start] = window.end
        self._starts[window.end] = window.start
        self.victims.update(dict.fromkeys(window.chunks))

    def _clear_alone(self, chunk: Chunk) -> None:
        """A slot of the very size that is wanted goes. What lies beside it is not looked at: most searches end so."""
        start, end = chunk.slot.offset, chunk.slot.offset + self._size
        self.slots += 1
        self._ends[start] = end
        self._starts[end] = start
        self.victims[chunk] = None

    def _clear_other_shards(self, chunks: list[Chunk]) -> None:
        """The other shards of these in this arena go with them: a chunk that lacks one is worth nothing."""
        for chunk in chunks:
            for other in self._index.of(chunk.key):
                if other.slot.arena != self._arena or other in self.victims or not other.is_evictable:
                    continue
                if other.room_bytes == self._size:
                    self._clear_alone(other)
                else:
                    self._clear(self._window(other))
