"""The goals of the breakdown: each is found, each can be missed, and what was not measured is named."""

import msgspec
import pytest
from breakdown_samples import everything, overhead, request, result, trace

from pdx.bench.breakdown_figures import figures, missing
from pdx.bench.breakdown_tables import client_table, parts_table
from pdx.bench.records import Copy

GOALS = {
    "handoff, nixl / pdx, client's first token": 20.0,
    "handoff, nixl / pdx, decoder may run": 200 / 35,
    "pdx: prefill's end until the decoder may run, by its timeline": 35.0,
    "TTFT, pdx / prefill alone": 1.0,
    "mean TTFT, nixl / pdx": 4001.5 / 2001.5,
    "mean ITL, nixl / pdx": 40 / 30,
    "answers equal to plain vLLM's": 1.0,
    "time with tracing / without": 1.001,
    "tracing's share of a request, counted": 0.0001,
}


def goals(found):
    """Those figures that have one."""
    return {figure.name.rpartition("tokens: ")[2].rpartition("at once: ")[2]: figure for figure in found if figure.goal}


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
    "mean TTFT, nixl / pdx": ("nixl", {"ttft_ms": lambda each: 2990.0}),
    "mean ITL, nixl / pdx": ("pdx", {"itl_ms": lambda each: [30.0, 51.0]}),
    "answers equal to plain vLLM's": ("nixl", {"is_same": lambda each: each.round != 1}),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_goal_that_requests_miss(name):
    system, fields = SLOW[name]
    found = goals(figures(result(changed(everything(), system, **fields))))
    assert not found[name].is_met


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("pdx: prefill's end until the decoder may run, by its timeline", {"traces": [trace(handoff_ms=41.1)]}),
        ("time with tracing / without", {"overhead": overhead(e2e_ratio=1.011)}),
        ("tracing's share of a request, counted", {"overhead": overhead(span_share=0.011)}),
    ],
)
def test_a_goal_that_the_run_misses(name, fields):
    assert not goals(figures(result(everything(), **fields)))[name].is_met


def test_ratios_are_of_requests_of_the_same_round():
    requests = [
        request("pdx", 0),
        request("pdx", 1, ttft_ms=2000.0),
        request("plain", 0),
        request("plain", 1, ttft_ms=2000.0),
    ]
    found = {figure.name: figure.value for figure in figures(result(requests))}
    assert found["4,000 tokens: TTFT, pdx / prefill alone"] == 1.0


def test_a_handoff_that_vanishes_keeps_ratios_finite():
    requests = [request("pdx", to_client=-3.0), request("nixl", to_client=200.0)]
    assert goals(figures(result(requests)))["handoff, nixl / pdx, client's first token"].value == 2000.0


def test_only_pdx_against_nixl_has_goals():
    requests = everything()
    requests += [msgspec.structs.replace(each, system="pdx-tcp") for each in requests if each.system == "pdx"]
    requests += [msgspec.structs.replace(each, system="mooncake") for each in requests if each.system == "nixl"]
    found = figures(result(requests))
    assert goals(found).keys() == GOALS.keys()
    names = {figure.name for figure in found}
    assert "4,000 tokens: handoff, mooncake / pdx, decoder may run" in names
    assert "4,000 tokens: handoff, nixl / pdx-tcp, decoder may run" in names


def test_copies_of_other_lengths_do_not_count():
    copies = [Copy(0, 4000 << 16, 20.0), Copy(0, 1000 << 16, 5.0)]
    found = {figure.name: figure.value for figure in figures(result(everything(), copies=copies))}
    assert found["4,000 tokens: one memcpy of its KV"] == 20.0


def test_what_was_not_measured_is_named():
    assert missing(result(everything())) == []
    found = " ".join(missing(result([request("pdx")], not_run={"nixl": "no UCX"}, overhead=None)))
    for words in (
        "nixl did not run (no UCX)",
        "plain did not run (not asked for)",
        "overhead was not",
        "with 4 requests",
    ):
        assert words in found


def test_nothing_measured():
    empty = result([], copies=[], traces=[], overhead=None)
    assert figures(empty) == []
    assert client_table(empty).row_count == parts_table(empty).row_count == 0


def test_tables_have_a_row_for_each_kind_of_request():
    found = result(
        [*everything(), request("pdx", parts=None, engines=None, itl_ms=[], moved_bytes=0, hidden_share=None)]
    )
    assert client_table(found).row_count == parts_table(found).row_count == 6
