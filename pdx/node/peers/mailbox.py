"""How threads of a node hand results to its control loop."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable

from pdx.telemetry.faults import Faults
from pdx.wire.burst import burst


class Mailbox:
    """Calls that any thread posts and the control loop makes. Its descriptor is readable when there are some."""

    def __init__(self, faults: Faults | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._faults = faults or Faults(Counter())
        self._clock = clock
        self._calls: deque[Callable[[], None]] = deque()

    def post(self, call: Callable[[], None]) -> None:
        """Have the control loop call this. Nothing once the mailbox is closed."""
        self._calls.append(call)
        self._ring()

    def deliver(self) -> None:
        """Make the calls posted so far, as many as fit into a burst; for the control loop.

        What is left keeps the descriptor readable. An exception in one call is contained, and the next are made.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        posted = len(self._calls)
        for number, _ in enumerate(burst(self._clock)):
            if number >= posted or not self._calls:
                break
            call = self._calls.popleft()
            with self._faults.contain("a result of a thread"):
                call()
        if self._calls:
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile: nobody reads any more
            os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Drop what is left. Idempotent."""
        self._calls.clear()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
