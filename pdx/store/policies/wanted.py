"""What requests in the queue will use: the last of them loses its chunks first.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention", ATC 2024,
section 3.3.2 (scheduler-aware eviction).
"""

from __future__ import annotations

from collections.abc import Mapping

from pdx.store.chunk import Chunk
from pdx.store.policies.ranks import Ranked


class Wanted(Ranked):
    """Chunks that the queue wants; first goes what the last request wants, from the end of its prompt."""

    def __init__(self, places: Mapping[bytes, Mapping[int, int]]) -> None:
        """`places`: by key, where in its prompt each request that wants it has it, the first in the queue first."""
        self._places = places
        super().__init__()

    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        """See `EvictionPolicy.insert`. A chunk whose place changes is held and inserted again."""
        number, index = next(iter(self._places[chunk.key].items()))
        chunk.rank = -number, -index, 0
        self._ranks.add(chunk)
