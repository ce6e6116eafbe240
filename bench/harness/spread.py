"""How measured times spread: the middle and the worst that is usual."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `count` samples, in milliseconds. With less than a hundred, `p99_ms` is close to the worst of them."""

    p50_ms: float
    p99_ms: float
    count: int


def spread_ms(samples: Sequence[float]) -> Spread:
    """The spread of `samples`, which are milliseconds.

    :raises ValueError: there are none.
    """
    if not samples:
        raise ValueError("no samples")
    p99 = statistics.quantiles(samples, n=100, method="inclusive")[98] if len(samples) > 1 else samples[0]
    return Spread(round(statistics.median(samples), 4), round(p99, 4), len(samples))


def spread(samples_s: Sequence[float]) -> Spread:
    """The spread of `samples_s`, which are seconds."""
    return spread_ms([sample * 1e3 for sample in samples_s])
