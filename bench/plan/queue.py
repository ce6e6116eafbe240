"""Queues in closed form, with Poisson arrivals and equal service times. Seconds; pure.

In terms of textbooks, `rate` is λ, `service_s` is E[S], `servers` is c, and load is λ·E[S]. At full load and above,
waiting times are `inf`.
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
    """Probability that an arrival waits in M/M/c, by the recursion of Erlang's B formula; `load` is in Erlang."""
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - (load / servers) * (1 - blocked))


class Queue(msgspec.Struct, frozen=True):
    """A queue in front of `servers` equal servers with equal service times: M/D/c by Lee and Longton; exact for one
    server (Pollaczek-Khinchine)."""

    rate: float
    service_s: float
    servers: int = 1

    @property
    def utilisation(self) -> float:
        """Load per server; from 1 on, the queue grows without bound."""
        return self.rate * self.service_s / self.servers

    @property
    def wait_probability(self) -> float:
        """The share of requests that wait at all."""
        return erlang_c(self.servers, self.rate * self.service_s)

    @property
    def wait_s(self) -> float:
        """Mean wait over all requests."""
        if self.utilisation >= 1:
            return INF
        return self.wait_probability * self.service_s / (self.servers - self.rate * self.service_s) / 2

    def response_s(self, share: float) -> float:
        """Wait and service together take at most this long for `share` of the requests.

        The wait of requests that have to wait is assumed to be exponential with the right mean: exact for M/M/c, and in
        practice an upper bound for service times that vary less.
        """
        if self.utilisation >= 1:
            return INF
        late = self.wait_probability / (1 - share)  # above 1: this many times more requests wait than may be late
        return self.service_s + (self.wait_s / self.wait_probability * math.log(late) if late > 1 else 0.0)


def fixed_point(following: Callable[[float], float], most: float) -> float | None:
    """The smallest x up to `most` with following(x) ≤ x, where an empty system settles; None: it grows beyond."""
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
    """The `share` quantile of a Poisson count, by the normal approximation; never below the mean."""
    return mean + max(0.0, statistics.NormalDist().inv_cdf(share)) * math.sqrt(mean)
