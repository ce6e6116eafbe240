"""Least recently used first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdx.store.policies.policy import E, Evictable, EvictionPolicy


class Lru(EvictionPolicy[E]):
    """Least recently used first, the end of a prompt before its beginning.

    A ring through the chunks themselves, closed by one that is nobody's: every call takes the same few steps. A chunk
    counts as used when its last reader is done.
    """

    def __init__(self) -> None:
        self._end = Evictable(key=b"", room_bytes=0)  # older than the oldest, newer than the newest
        self._end.older = self._end.newer = self._end

    def insert(self, chunk: E, before: E | None = None) -> None:
        """The chunk goes just before `before` where that may be evicted, too, else as the most recently used.

        So a chunk that is sealed step by step goes before what leads up to it. Nothing else moves: a prompt counts as
        used when the first of its chunks was, until it is read.
        """
        newer: Evictable = before if before is not None and before.newer is not None else self._end
        older = newer.older
        assert older is not None
        chunk.older, chunk.newer = older, newer
        older.newer = newer.older = chunk

    def hold(self, chunk: E) -> None:
        older, newer = chunk.older, chunk.newer
        assert older is not None
        assert newer is not None
        older.newer, newer.older = newer, older
        chunk.older = chunk.newer = None

    def victims(self, start: E | None) -> Iterator[E]:
        at: Any = start if start is not None and start.newer is not None else self._end.newer
        while at is not None and at is not self._end:
            yield at
            at = at.newer
