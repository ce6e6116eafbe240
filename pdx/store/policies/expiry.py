"""Gone after a time: counted from when a chunk came (`age`), or from its last use (`idle`)."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.policies.ranks import Ranked


class Age(Ranked):
    """A chunk goes `seconds` after it was sealed, whether there is room or not; for room the oldest goes first.

    Use does not lengthen its life, unless it `is_idle`: then the time counts from the end of the last lease or pin, and
    for room the one that was used longest ago goes first, which is the time to live of CachedAttention (Gao et al., ATC
    2024, section 4.3). What is leased then is not found any more and goes with its last lease; what is
    pinned goes when it is unpinned.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], *, is_idle: bool = False) -> None:
        super().__init__()
        self._is_idle = is_idle
        self._seconds = seconds
        self._clock = clock
        self._ends: Deadlines[Chunk] = Deadlines()

    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        if chunk.rank is None:
            chunk.rank = self._ranks.new(before)
            if not chunk.keep.expires_at:
                chunk.keep = replace(chunk.keep, expires_at=self._clock() + self._seconds)
        self._ends.add((chunk,), chunk.keep.expires_at)
        self._ranks.add(chunk)

    def hold(self, chunk: Chunk) -> None:
        super().hold(chunk)
        if self._is_idle:
            self.remove(chunk)
            chunk.keep = replace(chunk.keep, expires_at=0.0)

    def remove(self, chunk: Chunk) -> None:
        self._ends.discard(chunk, chunk.keep.expires_at)
        super().remove(chunk)

    def overdue(self) -> list[Chunk]:
        return [chunk for chunk in self._ends.take(self._clock()) if not chunk.keep.pins]
