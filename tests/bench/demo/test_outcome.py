"""The demo's last line: what its figures mean, and that none is missing or impossible."""

import json
from types import SimpleNamespace

import pytest

from pdx.bench.demo import __main__ as demo
from pdx.bench.demo.outcome import Row, Wire, complaints, summary, table
from pdx.bench.demo.workload import completion
from pdx.cli.doctor import Finding
from pdx.cli.loopback import Rate, Trial
from pdx.errors import PdxError
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
    assert table(rows, None).row_count == 2


def test_any_other_prompt_may_not():
    (found,) = complaints([alone("no_prefiller")], [1], "tcp", wire(tcp=1.25))
    assert "no_prefiller" in found


def test_a_prompt_of_which_nothing_was_pushed_is_told():
    unpushed = row(55)
    unpushed.timeline["breakdown"]["pushed_bytes"] = 0
    (found,) = complaints([unpushed], [1], "tcp", wire(tcp=1.25))
    assert "nothing of it was pushed" in found


def test_a_channel_that_was_named_has_the_rate_of_its_trial(monkeypatch):
    tried = []

    def examine_channel(scheme, nbytes, timeout_s):
        tried.append(scheme)
        return Finding(scheme, Trial("ok", provider="x", rate=Rate(best_gb_s=2.0, median_gb_s=1.5)))

    monkeypatch.setattr(demo, "examine_channel", examine_channel)
    assert demo.check_pair("tcp") == {"tcp": 1.5}
    assert demo.check_pair("auto") == {}  # the nodes measure all of them, and say so
    assert tried == ["tcp"]


def test_a_channel_that_does_not_work_is_told(monkeypatch):
    trial = Trial("unavailable", "no link", "plug it in")
    monkeypatch.setattr(demo, "examine_channel", lambda *_: Finding("tcp", trial))
    with pytest.raises(PdxError, match="tcp does not work here: no link\nplug it in"):
        demo.check_pair("tcp")


@pytest.mark.parametrize(("own", "told"), [({}, {"tcp": 1.5}), ({"tcp": 0.7, "shm": 3.0}, {"tcp": 0.7, "shm": 3.0})])
def test_what_the_nodes_measured_comes_before_the_trial(own, told):
    class Peer:
        channel, sent_bytes, landed_bytes, rates = "tcp", 5, 6, own

        def __init__(self, name):
            self.name = name

    class Running:
        @staticmethod
        def status(node):
            return SimpleNamespace(peers=[Peer("prefill"), Peer("decode")])

    assert demo.wire_of(Running, {"tcp": 1.5}).rates == told
