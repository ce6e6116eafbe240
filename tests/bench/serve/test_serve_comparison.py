"""Ratios of two services: their direction, block by block, and what cannot be compared."""

from types import SimpleNamespace

import pytest

from pdx.bench.serve.client import Server
from pdx.bench.serve.comparison import compare, ratio, verdict
from pdx.bench.serve.run import Answer, Block, Tally

KEYS = ["mean_ttft_ms", "mean_itl_ms", "request_throughput"]


def tally(label, ttfts, *, texts="same", cut_short=False):
    """A block for each TTFT, with one answer that took so long."""
    blocks = [
        Block(1, True, [Answer(number, 0, 0.0, SimpleNamespace(success=True, ttft=ttft, generated_text=texts))], ttft)
        for number, ttft in enumerate(ttfts)
    ]
    blocks[-1].is_over = not cut_short
    return Tally(Server(label, "http://x", "m", "m", None), blocks)


def figures(tally):
    ttfts = [answer.output.ttft for answer in tally.answers]
    mean = sum(ttfts) / len(ttfts) * 1000
    return {"mean_ttft_ms": mean, "mean_itl_ms": 0.0, "request_throughput": len(ttfts) / tally.duration_s}


def test_above_one_the_first_is_better():
    found = compare(tally("a", [1.0, 2.0]), tally("b", [2.0, 8.0]), figures=figures, keys=KEYS)
    assert (found["first"], found["second"]) == ("a", "b")
    assert found["ratios"]["mean_ttft_ms"] == {"all": pytest.approx(10 / 3), "median_of_blocks": 3.0, "blocks": [2, 4]}
    assert found["ratios"]["request_throughput"]["all"] == pytest.approx(10 / 3)


def test_what_is_zero_cannot_be_compared():
    found = compare(tally("a", [1.0]), tally("b", [2.0]), figures=figures, keys=KEYS)
    assert found["ratios"]["mean_itl_ms"] == {"all": None, "median_of_blocks": None, "blocks": []}
    assert ratio("goodput", {"goodput": 1.0}, {"goodput": 0.0}) is None


def test_a_block_that_was_cut_short_is_not_compared():
    found = compare(tally("a", [1.0, 2.0]), tally("b", [2.0, 8.0], cut_short=True), figures=figures, keys=KEYS)
    assert found["ratios"]["mean_ttft_ms"] == {"all": 2, "median_of_blocks": 2, "blocks": [2]}
    found = compare(tally("a", [1.0, 2.0]), tally("b", [2.0]), figures=figures, keys=KEYS)
    assert found["ratios"]["mean_ttft_ms"] == {"all": 2, "median_of_blocks": 2, "blocks": [2]}
    found = compare(tally("a", [1.0]), tally("b", [2.0], cut_short=True), figures=figures, keys=KEYS)
    assert found["ratios"]["mean_ttft_ms"] == {"all": None, "median_of_blocks": None, "blocks": []}


def test_other_answers_are_noticed():
    one, other = tally("a", [1.0, 2.0]), tally("b", [1.0, 2.0])
    other.blocks[1].answers[0].output.generated_text = "something else"
    found = compare(one, other, figures=figures, keys=KEYS)
    assert found["answers"] == {"both_answered": 2, "same": 1}
    assert verdict(found) == [
        "the same text in 1 of 2 answers",
        "mean TTFT, times lower, block by block: 1.00 x (1.00 to 1.00)",
    ]
