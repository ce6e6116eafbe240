"""How fast an engine computes, as its worker measures it, and how long its steps take, as its scheduler does."""

from __future__ import annotations

from typing import Any

import pytest
from toy_engine import CHUNK, Engines, Request, tokens

from pdx.engine.pace import HALF_TOKENS, MIN_TOKENS, Pace, StepTimes
from pdx.engine.plan import WorkerNews
from pdx.testing.waiting import wait_until

MS = 1_000_000
STEP_S = 0.03
CHUNK_TOKENS = 256


@pytest.mark.parametrize(
    ("steps", "chunk_s"),
    [
        ([], 0.0),
        ([(MIN_TOKENS - 1, 0, 100)], 0.0),  # what only decodes says nothing
        ([(1000, 0, 500)], 0.128),
        ([(1000, 0, 500), (1000, 10, 1000)], 0.128),  # begun while the last one ran: it counts from its end
        ([(1000, 0, 500), (8, 500, 900), (1000, 800, 1400)], 0.128),  # time of decoding between prompts does not count
        ([(HALF_TOKENS, 0, 8192), *((HALF_TOKENS, n * 8192, n * 8192 + 4096) for n in range(1, 20))], 0.128),  # later
    ],
)
def test_a_chunk_takes_its_tokens_share_of_the_steps(steps: Any, chunk_s: float) -> None:
    pace = Pace(CHUNK_TOKENS)
    for tokens_, start_ms, end_ms in steps:
        pace.step(tokens_, start_ms * MS, end_ms * MS)
    assert pace.chunk_s == pytest.approx(chunk_s, rel=1e-3)


def stepped(*steps: Any) -> StepTimes:
    """Step times after (seconds until it begins, tokens, whether requests of the last one run on)."""
    times, now = StepTimes(CHUNK_TOKENS), 1000.0
    for after_s, num_tokens, goes_on in steps:
        now += after_s
        times.step(now, num_tokens, goes_on=goes_on)
    return times


def test_the_time_between_requests_is_no_step_s_time():
    assert stepped((1.0, 4, False), (60.0, 4, False)).step_s == 0.0
    assert stepped((1.0, 4, False), (0.03, 4, True), (60.0, 4, False), (0.03, 4, True)).step_s == pytest.approx(0.03)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_step_with_a_prompt_is_not_taken_for_one_that_decodes_however_far_ahead_the_engine_plans(lag):
    took = [0.03] * 60
    for at in range(0, 50, 10):
        took[at + 1 + lag] = 0.5
    steps = [(took[at], 500 if at % 10 == 0 and at < 50 else 4, True) for at in range(60)]
    assert stepped(*steps).step_s == pytest.approx(0.03)


def test_an_engine_that_never_only_decodes_has_a_step_time_all_the_same():
    assert stepped(*[(0.08, 500, True)] * 20).step_s == pytest.approx(0.08)


def test_a_token_takes_what_it_adds_to_a_step_that_others_run_in():
    times = stepped(*[(0.02, 4, True)] * 20, (0.02, 200, True))
    pace_s = (0.02 + 200 * 0.0001) / 200
    assert times.token_s(pace_s) == pytest.approx(0.0001)
    assert stepped(*[(0.02, 4, True)] * 20).token_s(pace_s) == pace_s, "no prompt was seen"
    assert times.token_s(0.00005) == 0.0


def test_where_every_step_has_a_prompt_its_tokens_are_not_taken_for_the_step_s_own_time():
    """They would seem to cost nothing, and no load would pay."""
    assert stepped(*[(0.08, 500, True)] * 20).token_s(0.00016) == 0.00016


# ---- whether a hit is loaded beside requests that run ----------------------------------------


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


def test_what_is_not_worth_its_load_is_computed_and_counted_and_holds_nothing(engines: Engines) -> None:
    engine, node, prompt = engines(load="auto"), engines.node, tokens(801, CHUNK + 4)
    engine.run(prompt)
    node.wait_sealed(2)  # with its end
    beside = Request("beside", [1])
    engine.admit(beside)
    again = Request("again", [*prompt, *range(CHUNK)])
    assert engine.match(again) == 0
    engine.allocate(again, 0)
    wait_until(lambda: node.status().leases == 0, what="its lease is given back at once")
    engine.step((again, again.num_tokens))
    engine.check_cache(again, again.num_tokens)
    engine.finish(again)
    engine.finish(beside)
    assert engine.load(prompt) > 0, "nobody runs whose step it would miss"
    node.wait_at_rest()
    wait_until(lambda: node.degraded("load_not_worth") == 1, what="counted")


def test_the_scheduler_half_hears_how_fast_prompts_are_computed_though_nothing_is_loaded(engines: Engines) -> None:
    engine = engines()
    engine.finish(engine.save(tokens(802, 6 * CHUNK)))
    assert engine.scheduler._times.news.chunk_s > 0
