"""The LRU policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdx.store.policies.policy import E, Evictable, EvictionPolicy


class Lru(EvictionPolicy[E]):
    """Least recently used first, the end of a prompt before its beginning.

    A ring linked through the chunks themselves, closed by a sentinel; every call takes constant time. A chunk counts as
    used when its last reader is done.
    """

    def __init__(self) -> None:
        self._end = Evictable(key=b"", room_bytes=0)  # older than the oldest, newer than the newest
        self._end.older = self._end.newer = self._end

    def insert(self, chunk: E, before: E | None = None) -> None:
        """Insert the chunk just before `before` if that is evictable, too, else as the most recently used.

        So a chunk of a prompt that is sealed step by step is evicted before its predecessors. Nothing else moves: until
        it is read, a prompt counts as used when its first chunk was inserted.
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
