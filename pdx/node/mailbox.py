"""How threads of a node hand results to its control loop."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable


class Mailbox:
    """Calls that any thread posts and the control loop makes. Its descriptor is readable when there are some."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()

    def post(self, call: Callable[[], None]) -> None:
        """Have the control loop call this. Nothing once the mailbox is closed."""
        self._calls.append(call)
        with contextlib.suppress(OSError):  # closed meanwhile: nobody reads any more
            os.eventfd_write(self.fd, 1)

    def deliver(self) -> None:
        """Make the calls posted so far; for the control loop."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """Drop what is left. Idempotent."""
        self._calls.clear()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
