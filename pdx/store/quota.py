"""How much of an arena the chunks of one cache salt may keep against others."""

from __future__ import annotations

import itertools
from collections import Counter

from sortedcontainers import SortedKeyList

from pdx.store.chunk import Chunk


class Quota:
    """Of each cache salt, the chunks that were used last and together take no more than `most_bytes`.

    The others are over the quota: they go first (`pdx.store.eviction`), but stay as long as nobody wants their room.
    Chunks without a salt are not counted. Each call costs what it returns, and searches in sorted lists. Owned by the
    control loop.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._numbers = itertools.count(1)
        self._ranks: dict[Chunk, tuple[int, int]] = {}  # of those within the quota; less is over it sooner
        self._within: dict[bytes, SortedKeyList[Chunk, tuple[int, int]]] = {}  # by salt
        self._nbytes: Counter[bytes] = Counter()

    @classmethod
    def of(cls, total_bytes: int, share: float) -> Quota | None:
        """Of so many bytes this share; None: all of them, and nothing is to be counted."""
        return cls(int(total_bytes * share)) if share < 1.0 else None

    def use(self, chunk: Chunk, before: Chunk | None) -> list[Chunk]:
        """The chunk was just used, or is new; those of its salt that are over the quota from now on, but were not.

        `before`: one that leads up to it and was used with it, which is over the quota later.
        """
        salt = chunk.hints.salt
        if not salt:
            return []
        self.remove(chunk)
        if before is not None and before.is_over:  # nothing finds the one without the other
            return [chunk]
        number, depth = self._ranks[before] if before in self._ranks else (next(self._numbers), 1)
        self._ranks[chunk] = number, depth - 1
        if salt not in self._within:
            self._within[salt] = SortedKeyList(key=self._ranks.__getitem__)
        within = self._within[salt]
        within.add(chunk)
        self._nbytes[salt] += chunk.room_bytes
        over: list[Chunk] = []
        while self._nbytes[salt] > self._most_bytes:
            over.append(within[0])
            self.remove(over[-1])
        return over

    def remove(self, chunk: Chunk) -> None:
        """The chunk is gone, or over the quota. Idempotent."""
        if chunk not in self._ranks:
            return
        salt = chunk.hints.salt
        within = self._within[salt]
        within.remove(chunk)
        del self._ranks[chunk]
        self._nbytes[salt] -= chunk.room_bytes
        if not within:
            del self._within[salt], self._nbytes[salt]
