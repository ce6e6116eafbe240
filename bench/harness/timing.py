"""The timer of all benches: several callables, interleaved, in the same process and the same minutes.

Machines are shared and their speed drifts, so absolute times of two runs cannot be compared. The ratio of two callables
within one round can; a report states it next to the medians. `Spread` has the median and the usual worst case.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one callable."""

    median_s: float
    ratio: float  # median over the rounds of (reference's time / own time): above 1 is faster than the reference

    def rate(self, amount: float) -> float:
        """`amount` per second at the median."""
        return amount / self.median_s


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    repeats: int = 9,
    warmups: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every callable once per round, for `repeats` rounds, after `warmups` rounds that do not count.

    Each round starts with another callable, so that none always benefits from the caches or turbo state left by the
    same neighbor. An error of a callable ends the measurement.

    :raises ValueError: `reference` is not among `calls`, or `repeats` is not positive.
    """
    if reference not in calls or repeats < 1:
        raise ValueError(f"reference {reference!r} must be one of {sorted(calls)}, repeats {repeats} positive")
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmups, repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            calls[name]()
            elapsed = clock() - start
            if turn >= 0:
                times[name].append(elapsed)
    return {name: _summary(times[name], times[reference]) for name in names}


def _summary(own: list[float], reference: list[float]) -> Timing:
    ratios = [theirs / mine for mine, theirs in zip(own, reference, strict=True)]
    return Timing(statistics.median(own), statistics.median(ratios))


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `count` samples, in milliseconds. With fewer than a hundred, `p99_ms` is close to the maximum."""

    p50_ms: float
    p99_ms: float
    count: int


def spread_ms(samples: Sequence[float]) -> Spread:
    """The spread of `samples` in milliseconds. :raises ValueError: there are none."""
    if not samples:
        raise ValueError("no samples")
    p99 = statistics.quantiles(samples, n=100, method="inclusive")[98] if len(samples) > 1 else samples[0]
    return Spread(round(statistics.median(samples), 4), round(p99, 4), len(samples))


_libc = ctypes.CDLL(None, use_errno=True)


class CpuClock:
    """CPU time of a process with all its threads since it started, in user and kernel mode."""

    def __init__(self, pid: int) -> None:
        """:raises OSError: there is no such process."""
        found = ctypes.c_int()
        if status := _libc.clock_getcpuclockid(pid, ctypes.byref(found)):
            raise OSError(status, f"process {pid}: {os.strerror(status)}")
        self._clock = found.value

    def seconds(self) -> float:
        """:raises OSError: the process is gone."""
        return time.clock_gettime(self._clock)
