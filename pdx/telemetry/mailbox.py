"""How threads hand results to the loop of their process."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable

from pdx.telemetry.faults import Faults
from pdx.wire.burst import burst


class Mailbox:
    """A queue of calls that any thread posts and the loop makes. Its descriptor is readable if there are any."""

    def __init__(self, faults: Faults) -> None:
        self._fd = -1
        self._faults = faults
        self._calls: deque[Callable[[], None]] = deque()

    @property
    def fd(self) -> int:
        """The descriptor to poll; opened on first access, so that a mailbox that is not polled needs none."""
        if self._fd < 0:
            self._fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable: calls may be waiting already
        return self._fd

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop call this. Thread-safe; once the mailbox is closed, the call is not made."""
        self._calls.append(call)
        self._ring()

    def deliver(self) -> None:
        """Make the calls posted so far, as many as fit into a burst; for the loop.

        Calls that are left keep the descriptor readable. An exception in a call is contained, and the next are made.
        """
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        posted = len(self._calls)
        for number, _ in enumerate(burst(self._faults.clock)):
            if number >= posted or not self._calls:
                break
            call = self._calls.popleft()
            with self._faults.contain("a result of a thread"):
                call()
        if self._calls:
            self._ring()

    def _ring(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # closed meanwhile
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Drop remaining calls. Idempotent."""
        self._calls.clear()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
