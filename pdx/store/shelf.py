"""The chunks that may be evicted, least recently used first."""

from __future__ import annotations

from collections.abc import Iterator

from pdx.memory.slot import Slot
from pdx.store.chunk import Chunk


class Shelf:
    """Sealed chunks that nobody leases or pins. `put` and `take` are idempotent; `nbytes` is the room they hold.

    A ring through the chunks themselves, closed by one that is nobody's: every call takes the same few steps.
    """

    def __init__(self) -> None:
        self._end = Chunk(b"", 0, Slot(0, 0, 0), 1)  # older than the oldest, newer than the newest
        self._end.older = self._end.newer = self._end
        self._count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, chunk: Chunk | None) -> bool:
        return chunk is not None and chunk.newer is not None

    def put(self, chunk: Chunk, newer: Chunk | None = None) -> None:
        """Evictable from now on: goes just before `newer` where that is on the shelf, else as the most recently used.

        So a chunk that is sealed step by step goes before what leads up to it. Nothing else moves: a prompt counts as
        used when the first of its chunks on the shelf was, until it is read.
        """
        if chunk.newer is None:
            self._link(chunk, newer if newer is not None and newer.newer is not None else self._end)
            self._count += 1
            self.nbytes += chunk.room_bytes

    def take(self, chunk: Chunk) -> None:
        """Not evictable from now on."""
        if chunk.newer is not None:
            self._unlink(chunk)
            self._count -= 1
            self.nbytes -= chunk.room_bytes

    def touch(self, chunk: Chunk) -> None:
        """Used just now, if it is on the shelf."""
        if chunk.newer is not None:
            self._unlink(chunk)
            self._link(chunk, self._end)

    def since(self, chunk: Chunk | None) -> Iterator[Chunk]:
        """From `chunk`, or from the least recently used where that is not on the shelf, to the most recently used."""
        at = chunk if chunk is not None and chunk in self else self._end.newer
        while at is not None and at is not self._end:
            yield at
            at = at.newer

    def _link(self, chunk: Chunk, newer: Chunk) -> None:
        older = newer.older
        assert older is not None
        chunk.older, chunk.newer = older, newer
        older.newer = newer.older = chunk

    def _unlink(self, chunk: Chunk) -> None:
        older, newer = chunk.older, chunk.newer
        assert older is not None
        assert newer is not None
        older.newer, newer.older = newer, older
        chunk.older = chunk.newer = None
