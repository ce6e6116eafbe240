"""Waiting lines against simulated ones (seeded), Little's law, and lengths that keep their mean."""

import heapq
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.plan.queue import Line, spread, steady

ARRIVALS = 120_000


def simulated(rate, services_s, servers, seed=1):
    """Responses of a line with Poisson arrivals, first come first served."""
    draw = random.Random(seed)
    free, now, waits, responses = [0.0] * servers, 0.0, [], []
    for _ in range(ARRIVALS):
        now += draw.expovariate(rate)
        start = max(now, heapq.heappop(free))
        service_s = draw.choice(services_s)
        heapq.heappush(free, start + service_s)
        waits.append(start - now)
        responses.append(start - now + service_s)
    return statistics.fmean(waits), statistics.quantiles(responses, n=20)[-1]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
def test_one_server_with_equal_services(load):
    line = Line(load, [1.0])
    wait_s, high_s = simulated(load, [1.0], 1)
    assert line.wait_s == pytest.approx(load / (2 * (1 - load)))
    assert line.wait_s == pytest.approx(wait_s, rel=0.06)
    assert high_s * 0.97 <= line.response_s(0.95) <= high_s * 1.25


@pytest.mark.parametrize(("servers", "load"), [(2, 0.7), (4, 0.8), (8, 0.9)])
def test_many_servers_with_unequal_services(servers, load):
    services = list(spread(1000, 0.8))
    mean = statistics.fmean(services)
    rate = load * servers / mean
    line = Line(rate, services, servers)
    wait_s, high_s = simulated(rate, services, servers)
    assert line.utilisation == pytest.approx(load)
    assert line.wait_s == pytest.approx(wait_s, rel=0.12)
    assert line.response_s(0.95) == pytest.approx(high_s, rel=0.12)


@given(st.floats(0.01, 50), st.floats(0, 0.95))
def test_where_a_system_settles(start, slope):
    expected = start / (1 - slope)
    assert steady(lambda x: start + slope * x, 1e6) == pytest.approx(expected, rel=1e-6)
    assert steady(lambda x: start + slope * x, expected * 0.99) is None
