"""How fast an engine computes, as its worker measures it, and how long its steps take, as its scheduler does."""

import pytest

from pdx.engine.pace import HALF_TOKENS, MIN_TOKENS, Pace, StepTimes

MS = 1_000_000


class Layout:
    chunk_tokens = 256


def test_nothing_is_known_before_a_prompt_was_computed():
    pace = Pace(Layout)
    assert pace.chunk_s == 0.0
    pace.step(MIN_TOKENS - 1, 0, 100 * MS)
    assert pace.chunk_s == 0.0, "a step that only decodes says nothing"


def test_a_chunk_takes_its_tokens_share_of_the_steps():
    pace = Pace(Layout)
    pace.step(1000, 0, 500 * MS)
    assert pace.chunk_s == pytest.approx(0.128)


def test_a_step_that_was_begun_while_the_last_one_ran_counts_from_its_end():
    pace = Pace(Layout)
    pace.step(1000, 0, 500 * MS)
    pace.step(1000, 10 * MS, 1000 * MS)
    assert pace.chunk_s == pytest.approx(0.128)


def test_time_of_decoding_between_prompts_does_not_count():
    pace = Pace(Layout)
    pace.step(1000, 0, 500 * MS)
    pace.step(8, 500 * MS, 900 * MS)
    pace.step(1000, 800 * MS, 1400 * MS)
    assert pace.chunk_s == pytest.approx(0.128)


def test_later_steps_count_more():
    pace = Pace(Layout)
    pace.step(HALF_TOKENS, 0, 8192 * MS)
    for number in range(1, 20):
        pace.step(HALF_TOKENS, number * 8192 * MS, (number * 8192 + 4096) * MS)
    assert pace.chunk_s == pytest.approx(0.128, rel=1e-3)


def stepped(*steps):
    """Step times after (seconds until it begins, tokens, whether requests of the last one run on)."""
    times, now = StepTimes(Layout.chunk_tokens), 1000.0
    for after_s, tokens, goes_on in steps:
        now += after_s
        times.step(now, tokens, goes_on=goes_on)
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
