"""Waiting lines in closed form: requests come at random (Poisson), services are as they are. Seconds; pure.

Names as in textbooks: `rate` is λ, `service_s` is E[S], `servers` is c, load is λ·E[S]. From full load on, waiting is
`inf`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

INF = float("inf")
POINTS = 15  # lengths that stand for all


@functools.cache
def erlang_c(servers: int, load: float) -> float:
    """The probability that an arrival waits, in M/M/c; `load` in Erlang. By the recursion of Erlang's B formula."""
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - (load / servers) * (1 - blocked))


class Line(msgspec.Struct, frozen=True):
    """One line before `servers` equal servers: M/G/c by Lee and Longton; exact for one server (Pollaczek-Khinchine)."""

    rate: float
    services_s: Sequence[float]  # equally likely; one: M/D/c
    servers: int = 1

    @property
    def service_s(self) -> float:
        return statistics.fmean(self.services_s)

    @property
    def variation(self) -> float:
        """Squared coefficient of variation of the service."""
        mean = self.service_s
        return statistics.pvariance(self.services_s, mean) / mean**2 if mean > 0 else 0.0

    @property
    def utilisation(self) -> float:
        """Below 1, or the line grows for ever."""
        return self.rate * self.service_s / self.servers

    @property
    def waits(self) -> float:
        """The share of requests that wait at all."""
        return erlang_c(self.servers, self.rate * self.service_s)

    @property
    def wait_s(self) -> float:
        """Mean over all requests."""
        if self.utilisation >= 1:
            return INF
        free = self.servers - self.rate * self.service_s
        return self.waits * self.service_s / free * (1 + self.variation) / 2

    def response_s(self, share: float) -> float:
        """Wait and service together are no longer than this for `share` of the requests.

        The wait of those that wait is taken as exponential with the right mean: exact for M/M/c, an upper bound in
        practice for services that vary less.
        """
        if self.utilisation >= 1:
            return INF
        waits, wait_s = self.waits, self.wait_s

        def done_within(limit_s: float) -> float:
            total = 0.0
            for service_s in self.services_s:
                if (left_s := limit_s - service_s) >= 0:
                    total += 1 - (waits * math.exp(-waits * left_s / wait_s) if wait_s > 0 else 0.0)
            return total / len(self.services_s)

        low, high = 0.0, max(self.services_s)
        while done_within(high) < share:
            high *= 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if done_within(middle) < share else (low, middle)
        return high


def steady(following: Callable[[float], float], most: float) -> float | None:
    """The smallest x up to `most` with following(x) ≤ x, where what starts empty settles; None: it grows on."""
    low, high = 0.0, 1e-3
    while following(high) > high:
        if high >= most:
            return None
        low, high = high, min(most, high * 1.2)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if following(middle) > middle else (low, middle)
    return high


def poisson_high(mean: float, share: float) -> float:
    """What a Poisson count stays below for `share` of the time, by the normal approximation; never below the mean."""
    return mean + max(0.0, statistics.NormalDist().inv_cdf(share)) * math.sqrt(mean)


@functools.cache
def spread(mean: float, variation: float) -> tuple[int, ...]:
    """Equally likely lengths of that mean and coefficient of variation, log-normal; one length where it is 0."""
    if variation <= 0:
        return (max(1, round(mean)),)
    sigma = math.sqrt(math.log(1 + variation**2))
    normal = statistics.NormalDist()
    raw = [math.exp(sigma * normal.inv_cdf((index + 0.5) / POINTS)) for index in range(POINTS)]
    scale = mean / statistics.fmean(raw)
    return tuple(max(1, round(scale * value)) for value in raw)
