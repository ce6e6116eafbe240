"""Waiting lines against simulated ones (seeded), and where a system settles."""

import heapq
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.plan.queue import Queue, fixed_point

ARRIVALS = 120_000


def simulated(load, servers, seed=1):
    """Waits and responses of a queue with Poisson arrivals and services of a second, first come first served."""
    draw = random.Random(seed)
    free, now, waits, responses = [0.0] * servers, 0.0, [], []
    for _ in range(ARRIVALS):
        now += draw.expovariate(load * servers)
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + 1.0)
        waits.append(start - now)
        responses.append(start - now + 1.0)
    return statistics.fmean(waits), statistics.quantiles(responses, n=20)[-1]


@pytest.mark.parametrize(("servers", "load"), [(1, 0.3), (1, 0.85), (4, 0.8), (8, 0.9)])
def test_a_queue_is_as_long_as_a_simulated_one(servers, load):
    queue = Queue(load * servers, 1.0, servers)
    wait_s, high_s = simulated(load, servers)
    if servers == 1:
        assert queue.wait_s == pytest.approx(load / (2 * (1 - load)))
    assert queue.utilisation == pytest.approx(load)
    assert queue.wait_s == pytest.approx(wait_s, rel=0.12)
    assert high_s * 0.95 <= queue.response_s(0.95) <= high_s * 1.25
    assert Queue(1.01 * servers, 1.0, servers).response_s(0.5) == float("inf")


def test_where_few_wait_those_decide_what_a_late_request_takes():
    queue = Queue(0.08, 1.0)  # 8 % wait, and 5 % may take longer
    assert queue.response_s(0.95) == pytest.approx(1 + queue.wait_s / 0.08 * math.log(0.08 / 0.05))
    assert Queue(0.04, 1.0).response_s(0.95) == 1.0


@given(st.floats(0.01, 50), st.floats(0, 0.95))
def test_where_a_system_settles(start, slope):
    expected = start / (1 - slope)
    assert fixed_point(lambda x: start + slope * x, 1e6) == pytest.approx(expected, rel=1e-6)
    assert fixed_point(lambda x: start + slope * x, expected * 0.99) is None
