"""Whether a load is faster than computing, by measured rates of both (invariant 10). Pure functions.

docs/adr/0047-loads-that-pay.md explains the numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pdx.telemetry.rate import Rate

PROBE_S = 10.0  # how often a source that does not pay is probed
MARGIN = 1.1  # safety factor on the estimated time of a load …
LOAD_S = 0.005  # … and the fixed cost of any load, added to it
LATE = 2.0  # a load is given up after so many times the time of computing …
MIN_LOAD_S = 0.25  # … but not before this


class Computing(NamedTuple):
    """How long an engine computes: seconds per chunk (infinity: not known), and before it begins the first."""

    chunk_s: float
    backlog_s: float = 0.0

    def seconds(self, count: int) -> float:
        return self.backlog_s + count * self.chunk_s

    @property
    def is_known(self) -> bool:
        return self.chunk_s < math.inf


UNKNOWN = Computing(math.inf)


def takes_s(rate: Rate, nbytes: int) -> float:
    """Conservative estimate of the seconds for a load of so many bytes; 0 if the source's rate is not known."""
    return rate.seconds(nbytes) * MARGIN + LOAD_S if rate.is_known else 0.0


def patience_s(computing_s: float, most_s: float) -> float:
    """How long to wait for a load that replaces so much computing."""
    return min(most_s, max(MIN_LOAD_S, LATE * computing_s))
