"""The measured rate at which a tier moves bytes."""

from __future__ import annotations

import msgspec

HALF_BYTES = 64 << 20  # after so many bytes an earlier measurement counts half …
HALF_NS = 10_000_000_000  # … and after so long without any, so that a few jobs outweigh an old loss


class Rate(msgspec.Struct):
    """Bytes over the time in which at least one job was moving some; recent measurements count more."""

    nbytes: float = 0.0
    ns: float = 0.0  # 0: nothing was measured
    end_ns: int = 0  # of the last job (CLOCK_MONOTONIC)

    def moved(self, nbytes: int, start_ns: int, end_ns: int) -> None:
        """Add a job that moved `nbytes` between these times. Time shared by concurrent jobs counts once."""
        keep = 0.5 ** (nbytes / HALF_BYTES + max(0, start_ns - self.end_ns) / HALF_NS)
        self.nbytes = self.nbytes * keep + nbytes
        self.ns = self.ns * keep + max(0, end_ns - max(start_ns, self.end_ns))
        self.end_ns = max(self.end_ns, end_ns)

    @property
    def is_known(self) -> bool:
        return self.ns > 0

    @property
    def gb_s(self) -> float:
        """The rate in 10⁹ bytes per second; 0: nothing was moved, or nothing is known."""
        return self.nbytes / self.ns if self.ns else 0.0

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take; 0 if nothing is known."""
        if not self.ns:
            return 0.0
        return nbytes / self.nbytes * self.ns / 1e9 if self.nbytes else float("inf")
