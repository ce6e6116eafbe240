"""Where a request's time went: each instant belongs to one part, and what ran beside something else cost nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.breakdown.parts import Clock, of_moments, of_transfer, queued_ms
from pdx.bench.breakdown.records import Engines
from pdx.telemetry.timeline import Event, Moment
from pdx.telemetry.trace import TraceSpan

MS = 1_000_000
NAMES = ("queue", "prefill", "gather", "wire", "scatter", "first_decode", "rest")
ORDER = (
    Event.RECEIVED,
    Event.PREFILL_SENT,
    Event.ADMITTED,
    Event.PREFILL_END,
    Event.LOAD_START,
    Event.LOAD_END,
    Event.RUNNABLE,
    Event.DECODE_FIRST,
)


def clock(*at_ms):
    """The moments that parts are made of, in their order."""
    return Clock([Moment(event, round(at * MS)) for event, at in zip(ORDER, at_ms, strict=True)])


def span(lane, start_ms, end_ms, nbytes=0, layer=0):
    return TraceSpan(lane, "t", layer, 1, round(start_ms * MS), round(end_ms * MS), nbytes, "engine/0")


def exposed(found):
    return {name: getattr(found, name).exposed_ms for name in NAMES if getattr(found, name).exposed_ms}


# received 0, leg at 2, admitted 10, prefill ends 110, load 120 to 145, may run 147, first token 180.
USUAL = (0, 2, 10, 110, 120, 145, 147, 180)


def test_one_node_on_a_cpu():
    spans = [span("prefill", 10, 40), span("gather", 40, 44), span("prefill", 44, 106), span("gather", 106, 110)]
    found = of_transfer(clock(*USUAL), spans, queued_ms=3, first_step_ms=30, is_gather_beside=False)
    assert exposed(found) == {
        "queue": 3 + 2,  # before prefill, and from the end of loading until the decode engine's next step
        "prefill": 92,
        "gather": 8,
        "scatter": 25,
        "first_decode": 30,
        "rest": 7 + 10 + 3,
    }
    assert found.gather.hidden_ms == 0


def test_what_is_copied_beside_the_forward_pass_costs_only_what_is_behind_it():
    spans = [span("gather", 40, 60), span("gather", 55, 70), span("gather", 100, 113)]
    found = of_transfer(clock(*USUAL), spans, queued_ms=0, first_step_ms=30, is_gather_beside=True)
    assert (found.gather.total_ms, found.gather.exposed_ms) == (30 + 13, 3)
    assert found.prefill.exposed_ms == 100


def test_a_wire_is_hidden_until_prefill_ends_and_while_something_else_is_waited_for():
    spans = [span("wire", 50, 90), span("wire", 80, 100), span("wire", 108, 113), span("wire", 119, 125)]
    found = of_transfer(clock(*USUAL), spans, queued_ms=0, first_step_ms=30, is_gather_beside=False)
    assert found.wire.total_ms == 50 + 5 + 6
    assert found.wire.exposed_ms == 3 + 1
    assert found.scatter.exposed_ms == 25


def test_what_all_of_a_batch_take_to_the_engine_is_no_queue():
    assert queued_ms([10.0, 110.0, 210.0], 100.0) == [0.0, 100.0, 200.0]
    assert queued_ms([5.0], 9.0) == [5.0]


def test_the_last_shard_decides_and_the_first_one_begins():
    moments = [Moment(event, at * MS) for event, at in zip(ORDER, USUAL, strict=True)]
    moments += [
        Moment(Event.PREFILL_END, 112 * MS),
        Moment(Event.LOAD_START, 118 * MS),
        Moment(Event.LOAD_END, 140 * MS),
    ]
    found = of_transfer(Clock(moments), [], queued_ms=0, first_step_ms=33, is_gather_beside=False)
    assert found.prefill.exposed_ms == 102
    assert found.scatter.exposed_ms == 145 - 118


@st.composite
def spans_anywhere(draw):
    lane = draw(st.sampled_from(["prefill", "gather", "wire", "scatter"]))
    start = draw(st.integers(0, 1000))
    return TraceSpan(lane, "t", 0, 1, start, start + draw(st.integers(0, 1000)), draw(st.integers(0, 99)), "e/0")


@given(
    at=st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    spans=st.lists(spans_anywhere(), max_size=20),
    queued=st.floats(0, 1e-3),
    first=st.floats(0, 1e-3),
    beside=st.booleans(),
)
def test_exposed_parts_add_up_whatever_is_told(at, spans, queued, first, beside):
    seen = Clock([Moment(event, moment) for event, moment in zip(ORDER, at, strict=True)])
    found = of_transfer(seen, spans, queued_ms=queued, first_step_ms=first, is_gather_beside=beside)
    whole_ms = max(0, at[-1] - at[0]) / 1e6
    assert sum(getattr(found, name).exposed_ms for name in NAMES) == pytest.approx(whole_ms, abs=1e-9)
    for name in NAMES:
        part = getattr(found, name)
        assert 0 <= part.exposed_ms <= part.total_ms
        assert part.hidden_ms >= 0


def engines(**changed):
    told = {
        "prefill_queue_ms": 5,
        "prefill_ms": 100,
        "decode_queue_ms": 40,
        "decode_first_ms": 30,
        "computed_tokens": 1,
    }
    return Engines(**told | changed)


def moments(**changed):
    return {
        "received": 0,
        "prefill_sent": 1,
        "prefill_answered": 110,
        "decode_sent": 111,
        "decode_first": 187,
    } | changed


def test_another_system_one_leg_after_the_other():
    found = of_moments([moments()], engines())
    assert exposed(found) == {"queue": 5, "prefill": 100, "wire": 40, "first_decode": 30, "rest": 12}
    assert not found.is_mean


@given(
    ends=st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=4),
    told=st.tuples(*[st.floats(0, 1e3)] * 4),
)
def test_other_systems_parts_add_up_whatever_is_told(ends, told):
    batch = [moments(prefill_answered=answered, decode_first=first) for answered, first in ends]
    found = of_moments(batch, Engines(*told, computed_tokens=0))
    assert sum(getattr(found, name).exposed_ms for name in NAMES) == pytest.approx(
        sum(first for _, first in ends) / len(ends)
    )
    assert all(getattr(found, name).exposed_ms >= 0 for name in NAMES)
