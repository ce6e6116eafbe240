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


@given(st.floats(0.01, 0.98), st.integers(1, 40), st.floats(1e-3, 10))
def test_more_load_waits_longer(load, servers, service_s):
    rate = load * servers / service_s
    line = Line(rate, [service_s], servers)
    assert line.wait_s <= Line(rate * 1.01, [service_s], servers).wait_s
    assert Line(rate, [service_s], servers + 1).wait_s <= line.wait_s
    assert service_s <= line.response_s(0.5) * 1.000001 <= line.response_s(0.99) * 1.00001


@given(st.floats(100, 20_000), st.floats(0.05, 1.5))
def test_lengths_keep_their_mean_and_vary(mean, variation):
    lengths = spread(mean, variation)
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.01, abs=1)
    assert list(lengths) == sorted(lengths)
    assert spread(mean, 0) == (round(mean),)


@given(st.floats(0.01, 50), st.floats(0, 0.95))
def test_where_a_system_settles(start, slope):
    expected = start / (1 - slope)
    assert steady(lambda x: start + slope * x, 1e6) == pytest.approx(expected, rel=1e-6)
    assert steady(lambda x: start + slope * x, expected * 0.99) is None
