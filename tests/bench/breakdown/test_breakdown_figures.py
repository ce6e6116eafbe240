"""The goals of the breakdown: each is found, and each can be missed."""

import msgspec
import pytest
from breakdown_samples import everything, parts, request, result, trace

from pdx.bench.breakdown.figures import figures
from pdx.bench.breakdown.records import Engines

GOALS = {
    "handoff, nixl / pdx, client's first token": 20.0,
    "handoff, nixl / pdx, decoder may run": 200 / 35,
    "pdx: prefill's end until the decoder may run, by its timeline": 20.0,
    "TTFT, pdx / prefill alone": 1.0,
    "pdx: share of bytes moved when prefill ended": 1.0,
    "mean TTFT, nixl / pdx": 4001.5 / 2001.5,
    "mean ITL, nixl / pdx": 40 / 30,
    "answers equal to plain vLLM's": 1.0,
}


def goals(found):
    """Those figures that have one."""
    return {figure.name.rpartition("tokens: ")[2].rpartition("at once: ")[2]: figure for figure in found if figure.goal}


def values(result_):
    """Of all figures, by name."""
    return {figure.name: figure.value for figure in figures(result_)}


def changed(requests, system, **fields):
    """The same requests, but for these fields of one system's."""
    return [
        msgspec.structs.replace(each, **{name: value(each) for name, value in fields.items()})
        if each.system == system
        else each
        for each in requests
    ]


def test_every_goal_is_there_and_reached():
    found = goals(figures(result(everything())))
    assert found.keys() == GOALS.keys()
    for name, value in GOALS.items():
        assert found[name].value == pytest.approx(value, rel=1e-3), name
        assert found[name].is_met, name


SLOW = {
    "handoff, nixl / pdx, client's first token": ("pdx", {"ttft_ms": lambda each: each.ttft_ms + 11}),
    "handoff, nixl / pdx, decoder may run": ("pdx", {"decode_first_ms": lambda each: each.decode_first_ms + 46}),
    "TTFT, pdx / prefill alone": ("plain", {"ttft_ms": lambda each: each.ttft_ms * 0.95}),
    "pdx: share of bytes moved when prefill ended": ("pdx", {"hidden_share": lambda each: 0.94}),
    "mean TTFT, nixl / pdx": ("nixl", {"ttft_ms": lambda each: 2990.0}),
    "mean ITL, nixl / pdx": ("pdx", {"itl_ms": lambda each: [30.0, 51.0]}),
    "answers equal to plain vLLM's": ("nixl", {"is_same": lambda each: each.round != 1}),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_goal_that_requests_miss(name):
    system, fields = SLOW[name]
    found = goals(figures(result(changed(everything(), system, **fields))))
    assert not found[name].is_met


@pytest.mark.parametrize(("handoff_ms", "is_met"), [(22.9, True), (23.1, False)])
def test_the_goal_of_the_timeline(handoff_ms, is_met):
    """0.4 copies of 20 ms and 15 ms."""
    found = goals(figures(result(everything(), traces=[trace(handoff_ms=handoff_ms)])))
    assert is_met == found["pdx: prefill's end until the decoder may run, by its timeline"].is_met


def test_a_handoff_that_vanishes_keeps_ratios_finite():
    requests = [request("pdx", to_client=-3.0), request("nixl", to_client=200.0)]
    found = goals(figures(result(requests)))["handoff, nixl / pdx, client's first token"]
    assert (found.value, found.note) == (200.0, "median of 1; 200.00 to 200.00; 1 below 1 ms counted as that")


def test_copying_inside_prefill_is_told_apart():
    requests = [
        request("pdx", parts=parts(gather=71.0)),
        request("nixl", to_client=200.0, to_runnable=200.0),
    ]
    found = values(result(requests))
    head = "4,000 tokens:"
    assert found[f"{head} handoff, nixl / pdx, client's first token"] == pytest.approx(20.0)
    copying = "with the copying inside prefill"
    assert found[f"{head} pdx: handoff to the client's first token, {copying}"] == pytest.approx(81.0)
    assert found[f"{head} pdx: handoff until the decoder may run, {copying}"] == pytest.approx(106.0)
    assert found[f"{head} handoff, nixl / pdx, client's first token, {copying}"] == pytest.approx(200 / 81, rel=1e-3)
    assert found[f"{head} handoff, nixl / pdx, decoder may run, {copying}"] == pytest.approx(200 / 106, rel=1e-3)
    beside = values(result(requests, settings={"rounds": 3, "is_gather_beside": True}))
    assert found.keys() > beside.keys()
    assert not any(copying in name for name in beside)


def test_prefill_is_compared_with_that_of_plain_vllm():
    slow = Engines(4.0, 2000.0, 35.0, 30.0, 0.0)
    found = values(result([request("pdx"), request("nixl", engines=slow), request("plain")]))
    for system, ratio in (("nixl", 2.0), ("pdx", 1.0)):
        assert found[f"4,000 tokens: prefill by its engine's metrics, {system} / plain"] == ratio
    keeping = [request("pdx-both", engines=Engines(4.0, 1031.0, 35.0, 30.0, 0.0)), request("plain")]
    found = goals(figures(result(keeping)))
    assert found["prefill by its engine's metrics, pdx-both / plain"].is_met is False


def test_tokens_that_came_together_count_one_by_one():
    assert request("pdx", itl_ms=[90.0], output_tokens=4).mean_itl_ms == 30.0
    assert request("pdx", itl_ms=[], output_tokens=1).mean_itl_ms is None
    merged = changed(everything(), "pdx", itl_ms=lambda each: [60.0])
    assert goals(figures(result(merged)))["mean ITL, nixl / pdx"].value == pytest.approx(40 / 30, rel=1e-3)
