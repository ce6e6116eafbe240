"""Whether a hit is loaded beside requests that run: the request misses a step, computing makes that step longer."""

from __future__ import annotations

from typing import Any

import pytest
from test_toy_engine import at_rest, tokens
from toy_engine import CHUNK, Request

from pdx.engine.plan import WorkerNews
from pdx.engine.scheduler import MIN_TOKENS
from pdx.testing.waiting import wait_until

DECODE = {"do_remote_prefill": True, "transfer_id": "t" * 20}
STEP_S = 0.03


@pytest.mark.parametrize(
    ("num_tokens", "chunk_ms", "load_ms", "waiting", "params", "settings", "pays"),
    [
        (16, 0, 0, 1, None, {}, False),  # nothing was measured: what is smaller than a prompt is not loaded
        (MIN_TOKENS, 0, 0, 1, None, {}, True),
        (16, 5, 1, 1, None, {}, False),  # a step of 30 ms against 5
        (16, 31, 1, 1, None, {}, True),
        (112, 5, 1, 1, None, {}, True),
        (112, 5, 6, 1, None, {}, False),  # a load that takes longer than its step, and than computing
        (16, 5, 1, 7, None, {}, True),  # seven wait for the step that is longer by 5 ms
        (16, 5, 1, 1, DECODE, {}, True),  # it was computed for this engine
        (16, 5, 1, 1, None, {"load": "always"}, True),
    ],
)
def test_a_load_that_comes_later_than_computing_is_not_made(
    engines: Any, num_tokens: int, chunk_ms: float, load_ms: float, waiting: int, params: Any, settings: Any, pays: bool
) -> None:
    half = engines(**{"load": "auto", **settings}).scheduler
    half._running.add("another")
    half._news = WorkerNews(load_s=load_ms / 1000, chunk_s=chunk_ms / 1000)
    half._times.step(1.0, 1, goes_on=False)
    half._times.step(1.0 + STEP_S, 1, goes_on=True)
    for number in range(waiting):
        half.arrived(Request(f"{number}", [number], params))
    assert half._pays(half._requests["0"], num_tokens) is pays
    half._running.clear()
    assert half._pays(half._requests["0"], num_tokens), "nobody runs whose step it would miss"


def test_what_is_not_worth_its_load_is_computed_and_counted_and_holds_nothing(engines: Any) -> None:
    engine, prompt = engines(load="auto"), tokens(801, CHUNK + 4)
    first = Request("first", prompt)
    engine.admit(first)
    engine.step((first, len(prompt)))
    engine.finish(first)
    wait_until(lambda: engines.node.status().chunks == {"sealed": 2}, what="it is there, with its end")
    half = engine.scheduler
    half._running.add("another")
    again = Request("again", [*prompt, *range(CHUNK)])
    assert engine.match(again) == 0
    engine.allocate(again, 0)
    wait_until(lambda: engines.node.status().leases == 0, what="its lease is given back at once")
    engine.step((again, again.num_tokens))
    engine.check_cache(again, again.num_tokens)
    engine.finish(again)
    half._running.clear()
    wait_until(lambda: at_rest(engines), what="nothing is left of it")
    wait_until(lambda: engines.node.status().counters.get("degraded_load_not_worth") == 1, what="counted")


def test_the_scheduler_half_hears_how_fast_prompts_are_computed_though_nothing_is_loaded(engines: Any) -> None:
    engine = engines()
    request = Request("first", tokens(802, 6 * CHUNK))
    engine.admit(request)
    engine.step((request, 6 * CHUNK))
    assert engine.scheduler._news.chunk_s > 0
    engine.finish(request)
