"""What ends when: leases, reservations, transfers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Generic, TypeVar

What = TypeVar("What")

_SPARE = 64  # times in the heap of which nothing is left are tolerated up to so many, and as many again as are in use


class Deadlines(Generic[What]):
    """Deadlines of whatever can be a key of a dict. Each call costs what it adds or takes, never how much waits."""

    def __init__(self) -> None:
        self._due: dict[float, dict[What, None]] = {}  # deadline -> what ends then
        self._times: list[float] = []  # a heap: all keys of `_due`, and some of which nothing is left

    def add(self, what: Iterable[What], deadline: float) -> None:
        """All of `what` ends at `deadline`; what never ends (infinity) is not remembered."""
        if deadline == math.inf:
            return
        group = self._due.get(deadline)
        if group is None:
            group = self._due[deadline] = {}
            heapq.heappush(self._times, deadline)
        group.update(dict.fromkeys(what))

    def discard(self, what: What, deadline: float) -> None:
        """It does not end then any more. Idempotent."""
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
        """Nothing ends before this; infinity if nothing is remembered."""
        return self._times[0] if self._times else math.inf

    def take(self, now: float) -> list[What]:
        """What has ended by now, earliest first; it is forgotten here."""
        late: list[What] = []
        while self._times and self._times[0] <= now:
            late.extend(self._due.pop(heapq.heappop(self._times), ()))
        return late
