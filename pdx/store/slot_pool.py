"""The slots of one arena: grants them to new chunks, and evicts others for that."""

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

LOOKS = 1024  # chunks that a search may look at in excess of its minimum
BARS = 64  # times that chunks of higher levels bar the way before a search leaves a level


class SlotPool:
    """Grants slots, evicts chunks for them, and takes slots back. Nothing else changes the arena's tables.

    `order` has the chunks that may be evicted; callers insert and hold chunks there as these become evictable or not.
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
        """`number`: the arena's number in its node; `nbytes`: how much of it, from its beginning, is for chunks."""
        self.total_bytes = nbytes
        self._number = number
        self._generations = arena.generations
        self._filled = arena.filled
        self._allocator = Allocator(nbytes)
        self._index = index
        self._history = history
        self._counters = env.counters
        self._clock = env.clock
        self._stopped_at: dict[int, Chunk] = {}  # size of a search that gave up -> where the next one continues
        self.order = order

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated."""
        return self._allocator.free_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that would be free if everything evictable were evicted."""
        return self._allocator.free_bytes + self.order.nbytes

    def grant(self, sizes: Sequence[int], shards: int, *, partial: bool, who: str) -> list[Slot]:
        """Grant slots for chunks of these sizes, in order, one per shard each.

        Grants all or none; with `partial`, as many leading ones as fit. Evicts as needed; without `partial`, only if
        everything fits then. `who` names the requester in the history.
        """
        runs = [(nbytes, len(list(run)) * shards) for nbytes, run in itertools.groupby(sizes)]
        taken = [self._allocator.allocate_many(nbytes, count) for nbytes, count in runs]
        short = [at for at, (_, count) in enumerate(runs) if len(taken[at]) < count]
        if short:
            missing = len(sizes) * shards - sum(map(len, taken))
            for at in short:  # they may fit elsewhere once there is more room
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
        """Evict so that `count` more slots of `nbytes` fit, or with `partial` some of them; else evict nothing."""
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
        """Make a sealed chunk unfindable now, and free its room as soon as it has no reader."""
        self._history.note((chunk.key,), why, self._clock())
        if chunk.leases:  # its last reader frees it
            self._index.step([chunk], Step.DELETE)
        else:
            self.free([chunk], Step.EVICT)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Take back granted slots that never held a chunk."""
        self._allocator.free_many([slot.offset for slot in slots])

    def free(self, chunks: Sequence[Chunk], step: Step) -> None:
        """Free these chunks, which have no reader or writer, by `step`, and their room."""
        self._index.step(chunks, step)
        for chunk in chunks:
            self.order.remove(chunk)
            chunk.before = None
            # Raise it before the room is granted again: stale readers and writers check it.
            self._next_generation(chunk.slot.offset)
        self._allocator.free_many([chunk.slot.offset for chunk in chunks])

    def tell_filled(self, chunk: Chunk) -> None:
        """Tell readers, through the arena's table, how many leading slices of the chunk are filled."""
        self._filled[chunk.slot.offset // GRANULE_BYTES] = (~chunk.filled & (chunk.filled + 1)).bit_length() - 1

    def tell_never(self, chunk: Chunk) -> None:
        """Tell readers that the chunk will never be whole, so that they do not wait for the rest."""
        self._filled[chunk.slot.offset // GRANULE_BYTES] = NEVER

    def _next_generation(self, offset: int) -> int:
        granule = offset // GRANULE_BYTES
        self._filled[granule] = 0
        generation = (self._generations[granule] + 1) & LAST_GENERATION
        self._generations[granule] = generation
        return generation


class Window(msgspec.Struct):
    """Contiguous room that would be free if `chunks` were evicted, with adjacent free or cleared room."""

    start: int
    end: int
    chunks: list[Chunk]
    cleared: list[int]  # starts of windows cleared earlier that are parts of this one
    slots: int = 0  # that already fit into those and into the holes within it


class Clearing:
    """A search for chunks to evict so that `wanted` more slots of `size` bytes fit, before anything is evicted.

    It begins at the first chunk in the order of eviction. If that chunk's room, joined with adjacent holes, holds one
    more slot, it goes alone; with slots of a single size this is always so. Otherwise its neighbors go with it, first
    those before it (the end of a prompt lies behind its beginning, and goes first), then those behind it, until one
    more slot fits, or chunks that must stay bar both ways; then none of them goes. Chunks of a higher level bar the
    way, too: otherwise the end of a prompt, which is nearly always smaller than a chunk, would take any neighbor with
    it, recently used or not. After `BARS` such bars the search passes to the next level, or it would never get past the
    ends of prompts. So neighbors of the same level or below go before their turn, even if chunks whose turn it is lie
    together elsewhere.

    The cost is bounded by what it finds, and by `LOOKS` chunks if it finds nothing.
    """

    def __init__(self, allocator: Allocator, index: Index, arena: int, size: int, wanted: int) -> None:
        self._allocator = allocator
        self._index = index
        self._arena = arena
        self._size = size
        self._wanted = wanted
        self._looks = LOOKS + 8 * wanted + size // GRANULE_BYTES
        self._bars = 0  # met in this level's search, by chunks of higher levels
        self._ends: dict[int, int] = {}  # start of a cleared window -> its end
        self._starts: dict[int, int] = {}  # end -> start
        self.victims: dict[Chunk, None] = {}  # in order of eviction
        self.slots = 0  # that would fit into the cleared windows
        self.stopped_at: Chunk | None = None  # where the search gave up, if it has not looked at all chunks

    @property
    def is_enough(self) -> bool:
        return self.slots >= self._wanted

    def search(self, levels: Iterable[Iterable[Chunk]]) -> None:
        """Choose victims until all slots fit, level by level in their order. Nothing may change meanwhile."""
        for first_to_go in levels:
            self._bars = 0
            for chunk in first_to_go:
                if self._looks <= 0 or self._bars >= BARS:
                    self.stopped_at = self.stopped_at or chunk
                    break
                self._looks -= 1
                if chunk not in self.victims:
                    self._take(chunk)
                if self.is_enough:  # before the next one is drawn, because drawing may change a policy's state
                    self.stopped_at = None
                    return
            if self._looks <= 0:
                break
        self._join_all()

    def _take(self, chunk: Chunk) -> None:
        """Choose this chunk, with its neighbors if one more slot needs them; or leave it, if no slot can be gained."""
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
        """Join cleared windows with adjacent room: across their borders more slots may fit."""
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
        """The number of slots that fit only thanks to this window."""
        return (window.end - window.start) // self._size - window.slots

    def _grow(self, window: Window) -> bool:
        """Extend the window before it, then behind it, until one more slot fits; return whether it does."""
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
        """Choose a chunk of exactly the wanted size, without a look at its neighbors: the most common case."""
        start, end = chunk.slot.offset, chunk.slot.offset + self._size
        self.slots += 1
        self._ends[start] = end
        self._starts[end] = start
        self.victims[chunk] = None

    def _clear_other_shards(self, chunks: list[Chunk]) -> None:
        """Choose the other shards of these chunks in this arena, too: a chunk that lacks a shard is useless."""
        for chunk in chunks:
            for other in self._index.of(chunk.key):
                if other.slot.arena != self._arena or other in self.victims or not other.is_evictable:
                    continue
                if other.room_bytes == self._size:
                    self._clear_alone(other)
                else:
                    self._clear(self._window(other))
