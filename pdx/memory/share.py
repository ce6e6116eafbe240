"""Which shards of a chunk a rank has. A shard is a part of the heads; each shard has its own slot, and file in a tier.

The layout sets the number of shards, not the number of ranks that write them. So engines with different tensor parallel
sizes can read each other's chunks if they use the same number: a rank has several shards, or several ranks have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdx.errors import LayoutError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Share:
    """Shards [first, first + count): equal parts of the rank's heads, in order. `writes`: of the ranks with the same
    heads, one writes them, and all read them."""

    first: int
    count: int
    writes: bool = True

    @classmethod
    def of(cls, rank: int, ranks: int, shards: int) -> Share:
        """The share of a rank. :raises LayoutError: neither number divides the other."""
        if shards % ranks == 0:
            count = shards // ranks
            return cls(rank * count, count)
        if ranks % shards == 0:
            return cls(rank * shards // ranks, 1, rank * shards % ranks == 0)
        raise LayoutError(f"{shards} shards of {ranks} ranks: one number has to divide the other")

    def among(self, shards: Sequence[_T]) -> Sequence[_T]:
        """The rank's part of a sequence with an element per shard of a chunk."""
        return shards[self.first : self.first + self.count]
