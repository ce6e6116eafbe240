"""Which timelines are kept, and moments of other hosts by this host's clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import calls_run

from pdx.proxy import timelines as module
from pdx.proxy.engines import MAX_NODES, Engines
from pdx.proxy.health import Health
from pdx.proxy.plan import Mode
from pdx.proxy.routes import Route
from pdx.proxy.timelines import WINDOW_NS, Clocks, Timeline, Timelines
from pdx.telemetry.env import Env, WakingClock
from pdx.telemetry.histogram import Timings
from pdx.telemetry.timeline import breakdown
from pdx.wire.messages import VERSION, Mark
from pdx.wire.proxy import NodeReport

MS, S = 10**6, 10**9


def report(sent_ns, host="there", node="n", epoch=1):
    return NodeReport(VERSION, node, epoch, 0, 0, [], [], host=host, sent_ns=sent_ns)


def test_a_node_on_this_host_needs_no_conversion():
    clocks = Clocks("here")
    assert clocks.offset_ns(report(5, host="here"), 1000) == 0
    assert clocks.offset_ns(report(5, host=""), 1000) == 0  # it does not say


@given(offset_ns=st.integers(-(10**15), 10**15), delays_ns=st.lists(st.integers(0, 50 * MS), min_size=1, max_size=25))
def test_the_error_is_at_most_the_fastest_reports_time_under_way(offset_ns, delays_ns):
    clocks = Clocks("here")
    start_ns = 10**15
    for count, delay_ns in enumerate(delays_ns, start=1):
        sent_ns = start_ns + count * S
        found = clocks.offset_ns(report(sent_ns), sent_ns + offset_ns + delay_ns)
        assert found == offset_ns + min(delays_ns[:count])


def test_lives_and_nodes_have_clocks_of_their_own():
    clocks = Clocks("here")
    assert clocks.offset_ns(report(1000), 5000) == 4000
    assert clocks.offset_ns(report(1000, epoch=2), 9000) == 8000
    assert clocks.offset_ns(report(1000, node="m"), 7000) == 6000
    assert clocks.offset_ns(report(2000), 9000) == 4000


def test_drift_does_not_add_up():
    """A clock that gains 100 ppm for a day: the error stays what two windows make of it."""
    clocks = Clocks("here")
    for second in range(0, 86_400, 1):
        true_ns = second * S
        theirs_ns = second * (S - 100_000)
        error_ns = clocks.offset_ns(report(theirs_ns), true_ns + MS) - (true_ns - theirs_ns)
        assert -(2 * WINDOW_NS + 2 * S) // 10_000 <= error_ns - MS <= 0


def test_what_was_seen_long_ago_is_forgotten():
    clocks = Clocks("here")
    clocks.offset_ns(report(0), 1000)
    assert clocks.offset_ns(report(10 * WINDOW_NS), 10 * WINDOW_NS + 9000) == 9000


def test_nodes_are_bounded_and_the_silent_go_first():
    clocks = Clocks("here")
    for number in range(MAX_NODES + 10):
        clocks.offset_ns(report(0, node=f"n{number}"), 1000)
        assert clocks.offset_ns(report(0, node="always"), 1000 + number) == 1000
    assert clocks.offset_ns(report(0, node="n0"), 9000) == 9000, "it was forgotten"


def test_nobody_was_silent_while_the_proxy_itself_stood_still():
    """Its machine was stopped for a minute; the reports of that time are still to be read."""
    now = 100.0
    clock = WakingClock(1.0, lambda: now)
    env = Env(clock)
    engines = Engines(env, Health(env, silence_s=60.0), prefill=(), decode=(), heartbeat_timeout_s=3.0)
    engines.report(report(0, node="n"))
    now += 60.0
    assert not engines.expire()
    assert engines.nodes() == 1
    for _ in range(7):  # now it runs, and really hears nothing
        now += 0.5
        engines.expire()
    assert engines.nodes() == 0


def timeline(transfer):
    return Timeline(transfer=transfer, route=Route.CHAT, mode=Mode.SAMPLED, why="chat", moments=[])


def mark(transfer, at_ns, event="sealed"):
    return Mark(transfer=transfer, event=event, at_ns=at_ns, nbytes=7, tokens=1, engine="e")


def test_ledger_keeps_the_youngest_and_merges_marks(monkeypatch):
    monkeypatch.setattr(module, "MAX_MOMENTS", 3)
    kept = Timelines(2)
    for name in ("one", "two", "three"):
        kept.open(timeline(name))
    assert [each["transfer_id"] for each in kept.view()] == ["two", "three"]
    kept.merge([mark("two", 5), mark("two", 3), mark("one", 1), mark("unheard of", 1)])
    found = kept.find("two")
    assert [moment.at_ns for moment in found["moments"]] == [3, 5]
    assert found["breakdown"].moved_bytes == 14
    kept.merge([mark("two", at) for at in range(100)])
    assert len(kept.find("two")["moments"]) == 3
    assert kept.find("one") is None


def test_a_handoff_counts_once_when_both_its_ends_are_told():
    timings = Timings()
    kept = Timelines(2, timings)
    kept.open(timeline("one"))
    kept.merge([mark("one", 5 * 10**8, "runnable")])
    handoffs = timings[("pdx_proxy_handoff_seconds",)]
    assert sum(handoffs.counts) == 0
    with calls_run() as calls:
        kept.merge([mark("one", 2 * 10**8, "prefill_end"), mark("one", 10**8, "prefill_end")])
        kept.merge([mark("one", 10**8, event) for event in ("prefill_end", "runnable")] * 100)
    assert (sum(handoffs.counts), handoffs.sum) == (1, pytest.approx(0.3))
    summed = [count for (_, name), count in calls.items() if name == breakdown.__qualname__]
    assert summed == [1], "what nodes say costs the same, however much it is"
