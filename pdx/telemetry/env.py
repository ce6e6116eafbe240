"""What the parts of one process share: clock, counters, what contains faults, and the way back to its loop."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from pdx.telemetry.faults import Faults
from pdx.telemetry.mailbox import Mailbox

_LOG = logging.getLogger("pdx")


class Env:
    """One per loop, made by whoever runs it and handed to every part of it; tests make one on virtual time.

    `clock` and `mailbox.post` may be called from any thread, `counters` and `faults` belong to the loop.
    """

    __slots__ = ("clock", "counters", "faults", "mailbox")

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, log: logging.Logger = _LOG) -> None:
        """`clock`: seconds, monotonic. `log`: where faults of this loop are logged."""
        self.clock = clock
        self.counters: Counter[str] = Counter()
        self.faults = Faults(self.counters, clock, log=log)
        self.mailbox = Mailbox(self.faults)
