"""Which shards of a chunk a rank has. A shard is a part of the heads: that of one slot, and of one file below.

How many shards a chunk has is said by its layout, not by how many ranks write it. So engines of other tensor parallel
sizes read each other's chunks, where they cut them into as many: a rank has several of them, or several ranks one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdx.errors import LayoutError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Share:
    """Shards [first, first + count): equal parts of the rank's heads, in their order. `writes`: of the ranks that have
    the same heads one writes them, and all read them."""

    first: int
    count: int
    writes: bool = True

    @classmethod
    def of(cls, rank: int, ranks: int, shards: int) -> Share:
        """That of a rank. A LayoutError where a shard would be a part of two ranks' heads, or of the same ones."""
        if shards % ranks == 0:
            count = shards // ranks
            return cls(rank * count, count)
        if ranks % shards == 0:
            return cls(rank * shards // ranks, 1, rank * shards % ranks == 0)
        raise LayoutError(f"{shards} shards of {ranks} ranks: one number has to divide the other")

    def among(self, shards: Sequence[_T]) -> Sequence[_T]:
        """Of something that there is for each shard of a chunk, what the rank has."""
        return shards[self.first : self.first + self.count]
