"""First in, first out."""

from __future__ import annotations

from collections.abc import Iterator

from pdx.store.chunk import Chunk
from pdx.store.policies.policy import EvictionPolicy
from pdx.store.policies.ranks import Ranks


class Fifo(EvictionPolicy):
    """What was sealed first goes first, the end of a prompt before its beginning; use changes nothing."""

    def __init__(self) -> None:
        self._ranks = Ranks()

    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        """See `EvictionPolicy.insert`."""
        if chunk.rank is None:
            chunk.rank = self._ranks.new(before)
        self._ranks.add(chunk)

    def hold(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.hold`."""
        self._ranks.discard(chunk)

    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        """See `EvictionPolicy.victims`."""
        return self._ranks.within(start)
