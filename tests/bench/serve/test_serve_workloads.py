"""Workloads: lengths, who shares what with whom, arrivals, and that a seed fixes all of it."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.serve.workloads import Workload, arrivals, blocks, make_shape, plan
from pdx.errors import ConfigError

kinds = st.sampled_from(list(Workload))


@st.composite
def shapes(draw, kind=kinds):
    workload = draw(kind)
    rounds = draw(st.integers(1, 6))
    requests = rounds * draw(st.integers(1, 30)) if workload is Workload.CHAT else draw(st.integers(1, 120))
    return make_shape(
        workload,
        requests=requests,
        input_tokens=draw(st.integers(2, 5000)),
        output_tokens=draw(st.integers(1, 300)),
        rate=draw(st.floats(0.01, 1000) | st.just(math.inf)),
        seed=draw(st.integers(0, 5)),
        rounds=rounds,
        message_tokens=draw(st.integers(1, 300)),
        think_s=draw(st.floats(0, 5)),
    )


def shape(workload, **settings):
    usual = {"requests": 40, "input_tokens": 1000, "output_tokens": 20, "rate": math.inf, "seed": 0}
    return make_shape(workload, **{**usual, **settings})


@given(shapes())
def test_a_seed_fixes_everything(shape):
    assert plan(shape) == plan(shape)


def test_another_seed_is_another_plan():
    one, two = (plan(shape(Workload.SHARED_PROMPT, rate=3.0, seed=seed)) for seed in (1, 2))
    assert [session.start_s for session in one] != [session.start_s for session in two]
    assert [session.system for session in one] != [session.system for session in two]


@given(shapes())
def test_every_request_is_planned_with_the_lengths_asked_for(shape):
    sessions = plan(shape)
    assert sum(len(session.turns) for session in sessions) == shape.requests
    for session in sessions:
        first, *later = session.turns
        assert first.message.tokens + (session.system.tokens if session.system else 0) == shape.input_tokens
        assert first.think_s == 0
        assert all(turn.message.tokens == shape.message_tokens for turn in later)


@given(shapes())
def test_own_texts_are_nobody_elses_and_a_name_is_one_text(shape):
    sessions = plan(shape)
    own = [turn.message.name for session in sessions for turn in session.turns]
    shared = [session.system for session in sessions if session.system]
    assert len(set(own)) == len(own)
    assert not set(own) & {passage.name for passage in shared}
    assert len({passage.name for passage in shared}) == len(set(shared))


@given(shapes(st.just(Workload.LONG_DOCUMENT)))
def test_documents_are_asked_about_equally_often(shape):
    counts = Counter(session.system.name for session in plan(shape))
    assert len(counts) == shape.shared
    assert max(counts.values()) - min(counts.values()) <= 1


def test_questions_about_a_document_are_spread_over_the_run():
    order = [session.system.name for session in plan(shape(Workload.LONG_DOCUMENT, requests=100, shared=4))]
    assert order != sorted(order)
    assert order != [f"shared {number % 4}" for number in range(100)]


def test_every_system_prompt_has_users():
    found = {session.system.name for session in plan(shape(Workload.SHARED_PROMPT, requests=200, shared=5))}
    assert len(found) == 5


def test_random_prompts_share_nothing():
    assert not any(session.system for session in plan(shape(Workload.RANDOM)))


def test_pauses_have_the_mean_asked_for():
    sessions = plan(shape(Workload.CHAT, requests=8000, rounds=4, think_s=2.0))
    pauses = [turn.think_s for session in sessions for turn in session.turns[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.1)
    assert len(set(pauses)) == len(pauses)


@given(st.integers(1, 300), st.floats(0.01, 1000), st.integers())
def test_arrivals_rise_and_keep_the_rate(count, rate, seed):
    times = arrivals(count, rate, random.Random(seed))
    assert times == sorted(times)
    assert len(times) == count
    assert times[-1] == pytest.approx(count / rate)


def test_gaps_are_exponential():
    times = arrivals(20_000, 5.0, random.Random(1))
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.01)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(0.2, rel=0.05)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.05)


def test_without_a_rate_everything_is_sent_at_once():
    assert arrivals(3, math.inf, random.Random(0)) == [0.0, 0.0, 0.0]


def test_requests_of_conversations_have_the_rate_on_average():
    sessions = plan(shape(Workload.CHAT, requests=400, rounds=4, rate=8.0))
    assert sessions[-1].start_s == pytest.approx(400 / 8)


@given(shapes(), st.integers(1, 9))
def test_blocks_are_all_of_it_with_the_same_gaps(shape, count):
    sessions = plan(shape)
    parts = blocks(sessions, count)
    assert [session.index for part in parts for session in part] == [session.index for session in sessions]
    assert len(parts) == min(count, len(sessions))
    assert all(parts)
    end = 0.0
    for part in parts:
        for session in part:
            assert end + session.start_s == pytest.approx(sessions[session.index].start_s)
        end += part[-1].start_s


def test_the_longest_prompt_holds_all_rounds():
    sized = shape(Workload.CHAT, requests=6, rounds=3, input_tokens=100, message_tokens=10, output_tokens=5)
    assert sized.most_tokens == 100 + 5 + 10 + 5 + 10 + 5
    assert shape(Workload.RANDOM).most_tokens == 1020


@pytest.mark.parametrize(
    ("workload", "settings", "named"),
    [
        (Workload.CHAT, {"requests": 10, "rounds": 3}, "no multiple"),
        (Workload.RANDOM, {"rate": 0.0}, "--rate 0"),
        (Workload.RANDOM, {"rate": math.nan}, "--rate nan"),
        (Workload.LONG_DOCUMENT, {"shared_tokens": 1000}, "--shared-len 1000"),
        (Workload.SHARED_PROMPT, {"shared_tokens": 0}, "--shared-len 0"),
        (Workload.SHARED_PROMPT, {"shared": 41}, "--shared 41"),
        (Workload.LONG_DOCUMENT, {"shared": 0}, "--shared 0"),
        (Workload.LONG_DOCUMENT, {"input_tokens": 1}, "--shared-len"),
    ],
)
def test_what_cannot_be_made_is_refused(workload, settings, named):
    with pytest.raises(ConfigError, match=named):
        shape(workload, **settings)
