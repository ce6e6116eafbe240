"""Whether a hit is loaded beside requests that run: the request misses a step, computing makes that step longer."""

from __future__ import annotations

from typing import Any

import pytest
from test_toy_engine import at_rest, tokens
from toy_engine import CHUNK, Request

from pdx.engine.pace import MIN_TOKENS, StepTimes
from pdx.engine.plan import WorkerNews
from pdx.testing.waiting import wait_until

STEP_S = 0.03


@pytest.mark.parametrize(
    ("num_tokens", "chunk_ms", "load_ms", "waiting", "pays"),
    [
        (16, 0, 0, 1, False),  # nothing was measured: what is smaller than a prompt is not loaded
        (MIN_TOKENS, 0, 0, 1, True),
        (16, 5, 1, 1, False),  # a step of 30 ms against 5
        (16, 31, 1, 1, True),
        (112, 5, 1, 1, True),
        (112, 5, 6, 1, False),  # a load that takes longer than its step, and than computing
        (16, 5, 1, 7, True),  # seven wait for the step that is longer by 5 ms
    ],
)
def test_a_load_that_comes_later_than_computing_does_not_pay(
    num_tokens: int, chunk_ms: float, load_ms: float, waiting: int, pays: bool
) -> None:
    times = StepTimes(CHUNK)
    times.news = WorkerNews(load_s=load_ms / 1000, chunk_s=chunk_ms / 1000)
    times.step(1.0, 1, goes_on=False)
    times.step(1.0 + STEP_S, 1, goes_on=True)
    assert times.pays(num_tokens, waiting) is pays


def test_what_is_not_worth_its_load_is_computed_and_counted_and_holds_nothing(engines: Any) -> None:
    engine, prompt = engines(load="auto"), tokens(801, CHUNK + 4)
    first = Request("first", prompt)
    engine.admit(first)
    engine.step((first, len(prompt)))
    engine.finish(first)
    wait_until(lambda: engines.node.status().chunks == {"sealed": 2}, what="it is there, with its end")
    beside = Request("beside", [1])
    engine.admit(beside)
    again = Request("again", [*prompt, *range(CHUNK)])
    assert engine.match(again) == 0
    engine.allocate(again, 0)
    wait_until(lambda: engines.node.status().leases == 0, what="its lease is given back at once")
    engine.step((again, again.num_tokens))
    engine.check_cache(again, again.num_tokens)
    engine.finish(again)
    engine.finish(beside)
    alone = Request("alone", prompt)
    assert engine.match(alone) > 0, "nobody runs whose step it would miss"
    engine.finish(alone)
    wait_until(lambda: at_rest(engines), what="nothing is left of it")
    wait_until(lambda: engines.node.status().counters.get("degraded_load_not_worth") == 1, what="counted")


def test_the_scheduler_half_hears_how_fast_prompts_are_computed_though_nothing_is_loaded(engines: Any) -> None:
    engine = engines()
    request = Request("first", tokens(802, 6 * CHUNK))
    engine.admit(request)
    engine.step((request, 6 * CHUNK))
    assert engine.scheduler._times.news.chunk_s > 0
    engine.finish(request)
