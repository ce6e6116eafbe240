"""Gone after a time: counted from when a chunk came (`Age`), or from its last use (`Idle`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.policies.policy import EvictionPolicy
from pdx.store.policies.ranks import Ranks


class Age(EvictionPolicy):
    """A chunk goes `seconds` after it was sealed, whether there is room or not; for room the oldest goes first.

    Use does not lengthen its life. What is leased then is not found any more and goes with its last lease; what is
    pinned goes when it is unpinned.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._ranks = Ranks()
        self._ends: Deadlines[Chunk] = Deadlines()

    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        """See `EvictionPolicy.insert`."""
        if chunk.rank is None:
            chunk.rank = self._ranks.new(before)
            if not chunk.keep.expires_at:
                chunk.keep = replace(chunk.keep, expires_at=self._clock() + self._seconds)
        self._ends.add((chunk,), chunk.keep.expires_at)
        self._ranks.add(chunk)

    def hold(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.hold`."""
        self._ranks.discard(chunk)

    def remove(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.remove`."""
        self._ends.discard(chunk, chunk.keep.expires_at)
        super().remove(chunk)

    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        """See `EvictionPolicy.victims`."""
        return self._ranks.within(start)

    def overdue(self) -> list[Chunk]:
        """See `EvictionPolicy.overdue`."""
        return [chunk for chunk in self._ends.take(self._clock()) if not chunk.keep.pins]


class Idle(Age):
    """A chunk goes when nobody has used it for `seconds`; for room the one that was used longest ago goes first.

    It is the time to live of CachedAttention (Gao et al., ATC 2024, section 4.3). A chunk counts as used until its last
    lease or pin ends.
    """

    def hold(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.hold`."""
        super().hold(chunk)
        self.remove(chunk)
        chunk.keep = replace(chunk.keep, expires_at=0.0)
