"""How fast an engine computes, as its worker measures it."""

import pytest

from pdx.engine.pace import HALF_TOKENS, MIN_TOKENS, Pace

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
