"""The verdict: yes, no, it depends, and impossible, each for the case that deserves it, with the reason."""

import msgspec
import pytest
from plan_cases import case, engine

from pdx.bench.plan.model import (
    CHUNKS,
    judge,
    make,
    smallest_mixed,
    smallest_split,
)

LINKS = [4e9, 8e9, 16e9]


def plan(chosen, **more):
    return make(chosen, hardware="a machine", links=LINKS, **more)


def big(**change):
    return msgspec.structs.replace(case(**change), engine=engine("llama-3.1-70b", "h100", 4))


def test_long_prompts_and_a_strict_itl_want_disaggregation():
    found = plan(big(ttft_s=2.0, itl_s=0.04))
    assert found.verdict.helps == "yes"
    assert found.split.gpus < found.mixed.gpus
    assert f"{found.split.gpus} GPUs keep the SLO instead of {found.mixed.gpus}" in found.verdict.headline
    assert found.split.is_kept
    assert found.mixed.is_kept


def test_short_prompts_do_not():
    found = plan(case(rate=2, tokens=200))
    assert found.verdict.helps == "no"
    assert any("prompts are short" in reason for reason in found.verdict.reasons)


def test_an_impossible_slo_says_what_limits_it():
    found = plan(case(ttft_s=0.1, itl_s=0.005))
    assert found.verdict.helps == "impossible"
    assert (found.split, found.mixed) == (None, None)
    ttft, itl = found.verdict.reasons
    assert ttft == "TTFT: p95 is 273 ms, more than 100 ms"
    assert itl.startswith("ITL: p95 is ")


def test_a_load_for_more_engines_than_are_tried_says_so():
    found = plan(case(rate=100_000))
    assert found.verdict.helps == "impossible"
    assert found.verdict.reasons == ["1,024 engines of a kind are too few for 100000 requests per second"]


def test_when_only_one_kind_keeps_it():
    chosen = case()
    split = smallest_split(chosen)
    found = judge(chosen, split, None, split, None)
    assert found.helps == "yes"
    assert "mixed engines do not, whatever their number" in found.headline
    slow = plan(case(itl_s=0.03, output=4))
    assert slow.split is None
    assert slow.verdict.helps == "no"
    assert slow.verdict.reasons[0].startswith("ITL: p95 is ")


def test_a_given_deployment_is_judged():
    found = plan(case(rate=30), prefillers=2, decoders=1)
    assert found.verdict.helps == "no"
    assert "2 prefill and 1 decode engines do not keep the SLO" in found.verdict.headline
    assert "prompts come faster" in found.verdict.reasons[0]


@pytest.mark.parametrize("rate", [10, 18, 27])
def test_the_smallest_is_the_smallest(rate):
    chosen = case(rate=rate)
    split = smallest_split(chosen)
    assert split.is_kept
    assert not chosen.split(split.prefillers - 1, split.decoders).is_kept
    assert not chosen.split(split.prefillers, split.decoders - 1).is_kept
    mixed = smallest_mixed(chosen)
    assert mixed.is_kept
    assert not any(chosen.mixed(mixed.prefillers - 1, chunk).is_kept for chunk in CHUNKS)
