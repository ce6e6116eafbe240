"""Waiting lines in closed form: requests come at random (Poisson), services are equal. Seconds; pure.

Names as in textbooks: `rate` is λ, `service_s` is E[S], `servers` is c, load is λ·E[S]. From full load on, waiting is
`inf`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable

import msgspec

INF = float("inf")


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
    """One line before `servers` equal servers with equal services: M/D/c by Lee and Longton; exact for one server
    (Pollaczek-Khinchine)."""

    rate: float
    service_s: float
    servers: int = 1

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
        return self.waits * self.service_s / (self.servers - self.rate * self.service_s) / 2

    def response_s(self, share: float) -> float:
        """Wait and service together are no longer than this for `share` of the requests.

        The wait of those that wait is taken as exponential with the right mean: exact for M/M/c, an upper bound in
        practice for services that vary less.
        """
        if self.utilisation >= 1:
            return INF
        late = self.waits / (1 - share)  # above 1: so many times more wait than may
        return self.service_s + (self.wait_s / self.waits * math.log(late) if late > 1 else 0.0)


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
