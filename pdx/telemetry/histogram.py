"""Histograms of durations that a loop fills at next to no cost, for `pdx.telemetry.metrics`."""

from __future__ import annotations

from bisect import bisect_left

from pdx.telemetry.names import METRICS


class Histogram:
    """Seconds in a few buckets. Not thread-safe: `prometheus_client`'s takes locks, and four times as long."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Timings(dict[tuple[str, ...], Histogram]):
    """Histograms by name and the labels' values, each created on first access."""

    def __missing__(self, key: tuple[str, ...]) -> Histogram:
        made = self[key] = Histogram(METRICS[key[0]].buckets)
        return made

    def copy(self) -> Timings:
        """A copy of the present state for another thread."""
        copied = Timings()
        for key, each in self.items():
            copied[key].counts, copied[key].sum = each.counts.copy(), each.sum
        return copied
