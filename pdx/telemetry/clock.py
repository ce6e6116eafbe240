"""A clock that stands still while this process does."""

from __future__ import annotations

from collections.abc import Callable


class WakingClock:
    """Seconds in which this process ran: what passes between two looks counts for `longest_s` at most.

    For judging silence. While its machine stood still a process heard nobody, and what was said meanwhile is still
    unread when it goes on; by an ordinary clock everybody would be silent then. Somebody must look regularly.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float]) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._looked_at = clock()
        self._passed_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._passed_s += min(now - self._looked_at, self._longest_s)
        self._looked_at = now
        return self._passed_s
