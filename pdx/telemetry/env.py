"""What all parts of a process share: the clock, counters, fault containment, and the mailbox of its loop."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable

from pdx.telemetry.faults import Faults
from pdx.telemetry.histogram import Timings
from pdx.telemetry.mailbox import Mailbox

_LOG = logging.getLogger("pdx")


class Env:
    """The environment of one loop, made by its owner and handed to every part of it; tests make one on virtual time.

    `clock` and `mailbox.post` may be called from any thread; all else belongs to the loop.
    """

    __slots__ = ("clock", "counters", "faults", "mailbox", "news", "timings")

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, log: logging.Logger = _LOG) -> None:
        """`clock`: seconds, monotonic. `log`: where faults of this loop are logged."""
        self.clock = clock
        self.counters: Counter[str] = Counter()
        self.timings = Timings()
        self.faults = Faults(self.counters, clock, log=log)
        self.mailbox = Mailbox(self.faults)
        # In a node, topics with news. A key: a tier has said whether it has it; a name: of a transfer; `("fetch",
        # key)`: the fetch or lookup that ends with this key is over. `Admissions.late_answers` notifies the waiters
        # after the turn, and empties the list.
        self.news: list[Hashable] = []


class WakingClock:
    """A clock, in seconds, that runs only while this process does: between two calls at most `longest_s` pass.

    For judging silence. While its machine stands still a process hears nothing, and messages of that time are unread
    when it goes on; by an ordinary clock all its peers would seem silent then. It must be called regularly.
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
