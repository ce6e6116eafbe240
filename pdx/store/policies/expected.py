"""What applications expect to be wanted again: what is expected last goes first (`Hints.reuse_s`)."""

from __future__ import annotations

import itertools

from pdx.store.chunk import Chunk
from pdx.store.policies.ranks import Ranked

MAX_PAST = 4096  # at one time: to move them takes 15 ms of the control loop


class Expected(Ranked):
    """Chunks of one priority by the time at which they are expected, the end of a prompt before its beginning.

    It is Belady's order, as far as applications know the future. Whose time has passed is on another level
    (`pdx.store.eviction`).
    """

    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        first = _first(chunk.keep.expected_at)
        if chunk.rank is None or chunk.rank[0] != first:
            chunk.rank = self._ranks.new(before, first)
        self._ranks.add(chunk)

    def past(self, now: float) -> list[Chunk]:
        """Those that were expected by now, or some of them."""
        past = (chunk for chunk in self._ranks.between((_first(now), -1, 0), None) if chunk.keep.expected_at <= now)
        return list(itertools.islice(past, MAX_PAST))


def _first(at: float) -> int:
    """What the rank begins with of what is expected then: milliseconds, the sooner the more."""
    return -int(at * 1000)
