"""The chunks that may be evicted, least recently used first."""

from __future__ import annotations

from collections import OrderedDict

from pdx.memory import round_up
from pdx.store.chunk import Chunk


class Shelf:
    """Sealed chunks that nobody leases or pins. `put` and `take` are idempotent; `nbytes` is the room they hold."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()  # by offset
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def put(self, chunk: Chunk) -> None:
        """Evictable from now on, as the most recently used."""
        if chunk.slot.offset not in self._chunks:
            self._chunks[chunk.slot.offset] = chunk
            self.nbytes += round_up(chunk.slot.nbytes)

    def take(self, chunk: Chunk) -> None:
        """Not evictable from now on."""
        if self._chunks.pop(chunk.slot.offset, None) is not None:
            self.nbytes -= round_up(chunk.slot.nbytes)

    def touch(self, chunk: Chunk) -> None:
        """Used just now, if it is on the shelf."""
        if self._chunks.get(chunk.slot.offset) is chunk:
            self._chunks.move_to_end(chunk.slot.offset)

    def touch_before(self, chunk: Chunk) -> None:
        """What led up to `chunk` counts as used just now, its end first, so that it goes after `chunk`."""
        before = chunk.before
        while before is not None:
            self.touch(before)
            before = before.before

    def oldest(self) -> Chunk:
        """The least recently used chunk; the shelf must not be empty."""
        return next(iter(self._chunks.values()))
