"""Virtual time: what happens next, and when. One thread; the same calls give the same order, bit for bit."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """Seconds since a simulation began. What is due at the same moment happens in the order in which it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Call this then, or as soon as it can be where that is past."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), what))

    @property
    def next_at(self) -> float:
        """When something happens next; infinity: nothing does."""
        return self._due[0][0] if self._due else math.inf

    def step(self) -> bool:
        """Have the next thing happen; whether there was one."""
        if not self._due:
            return False
        self.now, _, what = heapq.heappop(self._due)
        what()
        return True
