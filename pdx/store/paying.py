"""When a load is sooner than computing, by what was measured of both (invariant 10). Pure functions.

docs/adr/0047-loads-that-pay.md says why these numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pdx.telemetry.rate import Rate

PROBE_S = 10.0  # after so long, a source that does not pay is looked at again
MARGIN = 1.1  # a load that takes by so much less than computing is worth it …
LOAD_S = 0.005  # … and so much more, for what comes with any load
LATE = 2.0  # times the time of computing, and a load is given up …
MIN_LOAD_S = 0.25  # … but not sooner than that


class Computing(NamedTuple):
    """What an engine takes that computes: for one chunk (infinity: not known), and before it comes to the first."""

    chunk_s: float
    backlog_s: float = 0.0

    def seconds(self, count: int) -> float:
        return self.backlog_s + count * self.chunk_s

    @property
    def is_known(self) -> bool:
        return self.chunk_s < math.inf


UNKNOWN = Computing(math.inf)


def takes_s(rate: Rate, nbytes: int) -> float:
    """Seconds until so many bytes are loaded, on the safe side; 0: nothing is known of the source."""
    return rate.seconds(nbytes) * MARGIN + LOAD_S if rate.is_known else 0.0


def patience_s(computing_s: float, most_s: float) -> float:
    """For how long a load is waited for that replaces so much computing."""
    return min(most_s, max(MIN_LOAD_S, LATE * computing_s))
