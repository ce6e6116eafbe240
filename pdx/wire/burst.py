"""How much of one kind of work the control loop does before the other kinds get their turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

BURST = 256
BURST_S = 0.02


def burst(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Yield for each step: at least one, at most 256, and no further one after 20 ms."""
    deadline = clock() + BURST_S
    for _ in range(BURST):
        yield
        if clock() >= deadline:
            return
