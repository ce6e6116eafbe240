"""Deadlines of leases, reservations, transfers and the like."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Generic, TypeVar

What = TypeVar("What")

_SPARE = 64  # stale times that the heap may hold, beyond one per time in use, before it is rebuilt


class Deadlines(Generic[What]):
    """Deadlines of hashable members. The cost of a call depends on what it adds or takes, not on how many there are."""

    def __init__(self) -> None:
        self._due: dict[float, dict[What, None]] = {}  # deadline -> members
        self._times: list[float] = []  # a heap: all keys of `_due`, and some stale ones

    def add(self, what: Iterable[What], deadline: float) -> None:
        """Give all of `what` this deadline; no-op for infinity."""
        if deadline == math.inf:
            return
        group = self._due.get(deadline)
        if group is None:
            group = self._due[deadline] = {}
            heapq.heappush(self._times, deadline)
        group.update(dict.fromkeys(what))

    def discard(self, what: What, deadline: float) -> None:
        """Remove this deadline of `what`. Idempotent."""
        group = self._due.get(deadline)
        if group is None:
            return
        group.pop(what, None)
        if not group:
            del self._due[deadline]
            if len(self._times) > 2 * len(self._due) + _SPARE:
                self._times = list(self._due)
                heapq.heapify(self._times)

    @property
    def first(self) -> float:
        """A lower bound of all deadlines; infinity if there are none."""
        return self._times[0] if self._times else math.inf

    def take(self, now: float) -> list[What]:
        """Remove and return all members whose deadline has passed, earliest first."""
        late: list[What] = []
        while self._times and self._times[0] <= now:
            late.extend(self._due.pop(heapq.heappop(self._times), ()))
        return late
