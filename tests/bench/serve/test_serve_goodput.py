"""Objectives: how they are written, and which requests meet them."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.serve.goodput import Slo, goodput
from pdx.errors import ConfigError


@dataclass
class Out:
    success: bool = True
    ttft: float = 1.0
    latency: float = 3.0
    itl: list[float] = field(default_factory=lambda: [0.1] * 20)
    output_tokens: int = 21
    prompt_len: int = 100
    error: str = ""
    start_time: float = 0.0
    client_queue_time: float = 0.0
    generated_text: str = ""


def test_written_objectives():
    slo = Slo.parse(" ttft=2s, itl=50ms ,e2e=1.5s,tpot=25 ms")
    assert slo == Slo(ttft=2000, itl=50, e2e=1500, tpot=25)
    assert Slo.parse("") == Slo()
    assert slo.for_vllm() == {"ttft": 2000, "tpot": 25, "e2el": 1500}


@pytest.mark.parametrize("text", ["ttft", "ttft=2", "ttft=fast", "latency=2s", "ttft=-1s", "ttft=1s,ttft=2s", "=2s"])
def test_a_wrong_objective_is_named(text):
    with pytest.raises(ConfigError, match="slo"):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("slo", "missed"),
    [
        (Slo(), []),
        (Slo(ttft=1000), []),
        (Slo(ttft=999), ["ttft"]),
        (Slo(tpot=100), []),  # 2 s for the 20 tokens after the first
        (Slo(tpot=99), ["tpot"]),
        (Slo(e2e=3000), []),
        (Slo(e2e=2999), ["e2e"]),
        (Slo(itl=100), []),
        (Slo(itl=99), ["itl"]),
        (Slo(ttft=999, itl=99, e2e=9000), ["ttft", "itl"]),
    ],
)
def test_each_objective_can_be_missed(slo, missed):
    assert slo.missed(Out()) == missed


def test_one_gap_in_twenty_may_be_longer():
    slo = Slo(itl=150)
    assert slo.missed(Out(itl=[0.1] * 19 + [9.0])) == []
    assert slo.missed(Out(itl=[0.1] * 18 + [9.0])) == ["itl"]
    assert slo.missed(Out(itl=[0.1] * 18 + [9.0, 9.0])) == ["itl"]
    assert slo.missed(Out(itl=[])) == []


def test_one_token_has_no_time_per_further_token():
    assert Slo(tpot=0).missed(Out(output_tokens=1, itl=[], latency=1.0)) == []


def test_goodput_counts_failures_as_requests_but_not_as_good():
    outputs = [Out(), Out(ttft=5.0), Out(success=False, ttft=0.0), Out(itl=[0.9] * 20)]
    found = goodput(outputs, Slo(ttft=2000, itl=200), duration_s=2.0)
    assert (found.good, found.share, found.per_s) == (1, 0.25, 0.5)
    assert found.missed == {"ttft": 1, "itl": 1}


def test_nothing_was_sent():
    found = goodput([], Slo(ttft=1), duration_s=0.0)
    assert (found.good, found.share, found.per_s) == (0, 0.0, 0.0)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=50), st.floats(1, 10_000))
def test_at_least_19_of_20_gaps_of_a_good_request_are_short(gaps, bound_ms):
    is_good = not Slo(itl=bound_ms).missed(Out(itl=gaps))
    long = sum(gap > bound_ms / 1000 for gap in gaps)
    assert is_good == (long <= int(len(gaps) * 0.05))
