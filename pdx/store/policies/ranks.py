"""Chunks in the order of their ranks: what the policies are made of that know a chunk again after it was held."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import attrgetter

from sortedcontainers import SortedKeyList

from pdx.store.chunk import Chunk, Rank
from pdx.store.policies.policy import EvictionPolicy


class Ranks:
    """Chunks that may be evicted now, by `chunk.rank`; each call costs a search in a sorted list."""

    def __init__(self) -> None:
        self._sorted: SortedKeyList[Chunk, Rank] = SortedKeyList(key=attrgetter("rank"))
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sorted)

    def new(self, before: Chunk | None = None, first: int = 0) -> Rank:
        """The rank of who comes now: behind all others whose rank begins with `first` or less, but just before `before`
        where that has such a rank."""
        if before is not None and before.rank is not None and before.rank[0] == first:
            return first, before.rank[1], before.rank[2] - 1
        return first, next(self._numbers), 0

    def add(self, chunk: Chunk) -> None:
        """It has a rank and may be evicted."""
        self._sorted.add(chunk)

    def discard(self, chunk: Chunk) -> None:
        """It may not be evicted any more."""
        self._sorted.remove(chunk)

    def behind(self, rank: Rank | None) -> Chunk | None:
        """The first one behind this rank (of all by default)."""
        at = 0 if rank is None else self._sorted.bisect_key_right(rank)
        return self._sorted[at] if at < len(self._sorted) else None

    def between(self, above: Rank | None, most: Rank | None) -> Iterator[Chunk]:
        """All of them with a rank above the one and not above the other. Nothing may change meanwhile."""
        found: Iterator[Chunk] = self._sorted.irange_key(above, most, inclusive=(False, True))
        return found

    def within(self, start: Chunk | None) -> Iterator[Chunk]:
        """All of them, from `start` on where it has a rank. Nothing may change meanwhile."""
        least = start.rank if start is not None else None
        return iter(self._sorted) if least is None else self._sorted.irange_key(least)


class Ranked(EvictionPolicy):
    """A policy whose order is that of the ranks which its `insert` gives."""

    def __init__(self) -> None:
        self._ranks = Ranks()

    def hold(self, chunk: Chunk) -> None:
        self._ranks.discard(chunk)

    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        return self._ranks.within(start)
