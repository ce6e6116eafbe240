"""The demo's last line: what its figures mean, and that none is missing or impossible."""

import json

from pdx.bench.demo.outcome import Row, Wire, complaints, summary, table
from pdx.bench.demo.workload import completion
from pdx.telemetry.timeline import Breakdown as Parts
from pdx.telemetry.timeline import Event, Moment, breakdown

MS = 1_000_000
REQUEST = completion("a prompt", "abc")


def row(landed_ms):
    """A request whose prefill ends after 100 ms and whose last byte lands at `landed_ms`."""
    moments = [
        Moment(Event.PREFILL_SENT, 0),
        Moment(Event.PREFILL_END, 100 * MS, nbytes=200),
        Moment(Event.ACROSS, 100 * MS, nbytes=100),
        Moment(Event.SEALED, 101 * MS, nbytes=200),
        Moment(Event.PUSHED, landed_ms * MS, nbytes=200),
        Moment(Event.LANDED, landed_ms * MS, nbytes=200),
        Moment(Event.RUNNABLE, 120 * MS),
    ]
    parts: Parts = breakdown(moments)
    timeline = {
        "mode": "forward",
        "why": "",
        "breakdown": {name: getattr(parts, name) for name in Parts.__struct_fields__},
    }
    return Row(REQUEST, True, 3, 1.0, True, timeline)


def wire(**rates):
    return Wire("tcp", 600, 600, 0, rates)


def test_no_duration_of_the_last_line_is_negative():
    ahead = summary([row(55), row(60), row(110)], wire(tcp=1.25))
    assert (ahead["push_ms_p50"], ahead["push_lead_ms_p50"]) == (0.0, 40.0)
    behind = summary([row(105), row(107), row(90)], wire(tcp=1.25))
    assert (behind["push_ms_p50"], behind["push_lead_ms_p50"]) == (5.0, 0.0)
    for found in (ahead, behind):
        assert all(value >= 0 for name, value in json.loads(json.dumps(found)).items() if "_ms" in name)


def alone(why):
    """A request that one engine served: nothing of it moved."""
    nothing = breakdown([])
    parts = {name: getattr(nothing, name) for name in Parts.__struct_fields__}
    return Row(REQUEST, True, 3, 3.0, True, {"mode": "alone", "why": why, "breakdown": parts})


def test_a_short_prompt_may_be_served_by_one_engine():
    rows = [row(55), alone("short_prompt")]
    assert complaints(rows, [1], "tcp", wire(tcp=1.25)) == []
    assert summary(rows, wire(tcp=1.25))["requests"] == 2
    assert table(rows, None, 64 << 10).row_count == 2


def test_any_other_prompt_may_not():
    (found,) = complaints([alone("no_prefiller")], [1], "tcp", wire(tcp=1.25))
    assert "no_prefiller" in found


def test_a_prompt_of_which_nothing_was_pushed_is_told():
    unpushed = row(55)
    unpushed.timeline["breakdown"]["pushed_bytes"] = 0
    (found,) = complaints([unpushed], [1], "tcp", wire(tcp=1.25))
    assert "nothing of it was pushed" in found
