"""The goals of the breakdown: each is found, each can be missed, and what was not measured is named."""

import msgspec
import pytest
from breakdown_samples import everything, overhead, parts, request, result, trace

from pdx.bench.breakdown.figures import figures, missing
from pdx.bench.breakdown.records import Copy, Engines
from pdx.bench.breakdown.tables import parts_table

GOALS = {
    "handoff, nixl / pdx, client's first token": 20.0,
    "handoff, nixl / pdx, decoder may run": 200 / 35,
    "pdx: prefill's end until the decoder may run, by its timeline": 35.0,
    "TTFT, pdx / prefill alone": 1.0,
    "pdx: share of bytes moved when prefill ended": 1.0,
    "mean TTFT, nixl / pdx": 4001.5 / 2001.5,
    "mean ITL, nixl / pdx": 40 / 30,
    "answers equal to plain vLLM's": 1.0,
    "time with tracing / without": 1.001,
    "tracing's share of a request, counted": 0.0001,
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


def test_prompts_that_the_decoder_had_to_compute_are_the_handoffs_fault():
    late = request("pdx", engines=Engines(4.0, 1000.0, 35.0, 500.0, 2000.0), decode_first_ms=1004.0 + 35.0 + 500.0)
    found = values(result([late, request("pdx", 1)]))
    assert found["4,000 tokens: pdx: handoff until the decoder may run"] == pytest.approx((535.0 + 35.0) / 2)
    assert found["4,000 tokens: pdx: prompt tokens that the decoder computed"] == (2000 + 1) / 2


def test_tokens_that_came_together_count_one_by_one():
    assert request("pdx", itl_ms=[90.0], output_tokens=4).mean_itl_ms == 30.0
    assert request("pdx", itl_ms=[], output_tokens=1).mean_itl_ms is None
    merged = changed(everything(), "pdx", itl_ms=lambda each: [60.0])
    assert goals(figures(result(merged)))["mean ITL, nixl / pdx"].value == pytest.approx(40 / 30, rel=1e-3)


def test_only_pdx_against_nixl_has_goals():
    requests = everything()
    requests += [msgspec.structs.replace(each, system="pdx-tcp") for each in requests if each.system == "pdx"]
    requests += [msgspec.structs.replace(each, system="mooncake") for each in requests if each.system == "nixl"]
    found = figures(result(requests))
    assert goals(found).keys() == GOALS.keys()
    names = {figure.name for figure in found}
    assert "4,000 tokens: handoff, mooncake / pdx, decoder may run" in names
    assert "4,000 tokens: handoff, nixl / pdx-tcp, decoder may run" in names


def test_what_was_not_measured_is_named():
    short = "prompts of 8,000 tokens were not measured"
    assert missing(result(everything())) == [short]
    alone = [each for each in everything() if each.concurrency == 1]
    assert missing(result(alone)) == ["4,000 tokens were not measured with 4 at once", short]
    both = everything() + [msgspec.structs.replace(each, prompt_tokens=8000) for each in everything()]
    more = {"traces": [trace(), trace(tokens=8000)], "copies": [Copy(0, tokens << 16, 20.0) for tokens in (4000, 8000)]}
    assert missing(result(both, **more)) == []
    assert missing(result([*everything(), request("pdx", tokens=8000)], **more)) == [
        "8,000 tokens were not measured with 4 at once",
        "8,000 tokens: handoff, nixl / pdx, client's first token: not known of any round",
        "8,000 tokens: handoff, nixl / pdx, decoder may run: not known of any round",
        "8,000 tokens: TTFT, pdx / prefill alone: not known of any round",
    ]
    without = [each for each in both if (each.system, each.prompt_tokens) != ("nixl", 8000)]
    assert [line.partition(": not known")[0] for line in missing(result(without, **more))] == [
        "8,000 tokens: handoff, nixl / pdx, client's first token",
        "8,000 tokens: handoff, nixl / pdx, decoder may run",
        "8,000 tokens, 4 at once: mean TTFT, nixl / pdx",
        "8,000 tokens, 4 at once: mean ITL, nixl / pdx",
    ]
    polling = [each for each in both if each.system != "nixl-yield"]
    assert missing(result(polling, **more)) == [
        "how much of nixl's figures is its polling thread's: nixl-yield did not run (not asked for)"
    ]
    found = " ".join(missing(result([request("pdx")], not_run={"nixl": "no UCX"}, overhead=None)))
    for words in (
        "nixl did not run (no UCX)",
        "plain did not run (not asked for)",
        "overhead was not",
        "4,000 tokens were not measured with 4 at once",
    ):
        assert words in found


def test_nothing_measured():
    empty = result([], copies=[], traces=[], overhead=None)
    assert figures(empty) == []
    assert parts_table(empty).row_count == 0


def test_tables_have_a_row_for_each_kind_of_request():
    found = result(
        [*everything(), request("pdx", parts=None, engines=None, itl_ms=[], moved_bytes=0, hidden_share=None)]
    )
    assert parts_table(found).row_count == 8


@pytest.mark.parametrize(("found_ms", "runnable_ms", "are_met"), [(970.0, 1022.9, True), (960.0, 1023.1, False)])
def test_loads_that_begin_before_prefill_ends_have_goals_of_their_own(found_ms, runnable_ms, are_met):
    """0.4 copies of 20 ms and 15 ms; and blocks are held for 30 ms of a load of 20, or for 40."""
    early = trace("pdx-together", handoff_ms=runnable_ms - 1000.0)
    marks = early.marks | {"found": found_ms, "load_start": 981.0, "load_end": 1001.0}
    requests = [request("pdx-together")]
    found = goals(figures(result(requests, traces=[msgspec.structs.replace(early, marks=marks)])))
    names = (
        "prefill's end until the decoder may run, by its timeline",
        "blocks held before prefill ends, in times of the load",
    )
    assert [found[f"pdx-together: {name}"].is_met for name in names] == [are_met, are_met]
