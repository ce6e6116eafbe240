"""Which chunks to evict, so that slots of one size fit: found before anything is evicted.

It begins at the chunk that should go first. Where that chunk's room, joined with the holes beside it, holds one more
slot, it goes alone: with slots of one size that is all. Otherwise the chunks beside it go with it, first those before
it (the end of a prompt lies behind its beginning, and goes first), then those behind it, until one more slot fits or
both ways are barred by what must stay; then nothing of that goes. What is on a higher level than it bars the way, too:
the end of a prompt, which nearly always is too short for a chunk, would take any chunk with it, just used or not. When
that one's turn comes, it may take the end with it. Where such bars are met again and again, the turn passes to the next
level: else a search among the ends would never come to the chunks.

Given up: neighbours of its level, or below, go out of their turn, though chunks whose turn it is might lie together
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdx.memory.arena import GRANULE_BYTES
from pdx.store.allocator import Allocator
from pdx.store.chunk import Chunk
from pdx.store.index import Index

LOOKS = 1024  # chunks looked at in one search beyond those that it must look at
BARS = 64  # by chunks of higher levels, before a search leaves a level


class Window(msgspec.Struct):
    """Room without a gap: what would be free if `chunks` were evicted, with the free or cleared room beside them."""

    start: int
    end: int
    chunks: list[Chunk]
    cleared: list[int]  # starts of windows that were cleared before, and are parts of this one
    slots: int = 0  # that fit into those, and into the holes that are parts of it


class Clearing:
    """A search for `wanted` slots of `size` bytes more than fit into the holes.

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
        """Whether everything that is wanted would fit."""
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
        """A chunk with the free and cleared room beside it."""
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
        """What is in it goes."""
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
