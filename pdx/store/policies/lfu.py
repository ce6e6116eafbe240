"""Least frequently used first."""

from __future__ import annotations

from collections.abc import Iterator

from pdx.store.chunk import Chunk
from pdx.store.policies.policy import EvictionPolicy
from pdx.store.policies.ranks import Ranks


class Lfu(EvictionPolicy):
    """What the fewest requests have found goes first, of those the one that was found or sealed longest ago.

    Counts do not age: what was wanted often once stays until the arena has no room for anything else.
    """

    def __init__(self) -> None:
        self._ranks = Ranks()

    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        """See `EvictionPolicy.insert`."""
        if chunk.rank is None:
            chunk.rank = self._ranks.new(before, first=chunk.uses)
        self._ranks.add(chunk)

    def hold(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.hold`."""
        self._ranks.discard(chunk)

    def access(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.access`."""
        chunk.uses += 1
        chunk.rank = self._ranks.new(first=chunk.uses)

    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        """See `EvictionPolicy.victims`."""
        return self._ranks.within(start)
