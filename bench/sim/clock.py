"""Virtual time: a queue of scheduled calls. One thread; the same calls give the same order, bit for bit."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """Seconds since a simulation began. Calls that are due at the same moment run in the order they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def call_at(self, when: float, what: Callable[[], None]) -> None:
        """Schedule a call; one in the past is due at once."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), what))

    @property
    def next_at(self) -> float:
        """When the next call is due; infinity if none is scheduled."""
        return self._due[0][0] if self._due else math.inf

    def step(self) -> bool:
        """Run the next call; return whether there was one."""
        if not self._due:
            return False
        self.now, _, what = heapq.heappop(self._due)
        what()
        return True
