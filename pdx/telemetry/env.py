"""What the parts of one process share: clock, counters, what contains faults, and the way back to its loop."""

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
    """One per loop, made by whoever runs it and handed to every part of it; tests make one on virtual time.

    `clock` and `mailbox.post` may be called from any thread; the others belong to the loop.
    """

    __slots__ = ("clock", "counters", "faults", "mailbox", "news", "timings")

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, log: logging.Logger = _LOG) -> None:
        """`clock`: seconds, monotonic. `log`: where faults of this loop are logged."""
        self.clock = clock
        self.counters: Counter[str] = Counter()
        self.timings = Timings()
        self.faults = Faults(self.counters, clock, log=log)
        self.mailbox = Mailbox(self.faults)
        # In a node: that of which more is known than before. A key: a tier has said whether it has it; a name: of a
        # transfer; `("fetch", key)`: a peer was asked for what ends with this key, and that is over. Whoever waits for
        # one of them is told after the turn (`Admissions.late_answers`), which empties it.
        self.news: list[Hashable] = []


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
