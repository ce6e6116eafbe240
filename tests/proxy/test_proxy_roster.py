"""Which engines and nodes are believed in, and which timelines are kept."""

import msgspec
import pytest

from pdx.address import base_url
from pdx.errors import ConfigError
from pdx.messages import VERSION, EngineReport, MarkReport, NodeReport, PeerEntry
from pdx.proxy import ledger as ledger_module
from pdx.proxy.ledger import Ledger, Timeline
from pdx.proxy.plan import Mode, Route
from pdx.proxy.roster import MAX_NODES, Roster


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def roster(clock, prefill=(), decode=()):
    return Roster(prefill=prefill, decode=decode, heartbeat_timeout_s=3.0, suspect_s=2.0, clock=clock)


def report(*engines, node="n", epoch=1):
    listed = [EngineReport(engine=name, role=role, url=url, running=2) for name, role, url in engines]
    return NodeReport(version=VERSION, node=node, epoch=epoch, arena_bytes=0, free_bytes=0, engines=listed, marks=[])


A, B = ("a", "prefill", "http://a:1"), ("b", "both", "http://b:1/")


def urls(found):
    return sorted(engine.url for engine in found.engines())


def test_engines_come_and_go_with_reports():
    clock = Clock()
    found = roster(clock)
    assert found.report(report(A, B)) == frozenset()
    assert urls(found) == ["http://a:1", "http://b:1"]
    assert [(each.prefills, each.decodes, each.running) for each in found.engines()] == [
        (True, False, 2),
        (True, True, 2),
    ]
    assert found.report(report(B)) == {"http://a:1"}
    clock.now += 2.9
    assert found.expire() == frozenset()
    assert found.nodes() == 1
    clock.now += 0.2
    assert urls(found) == []  # also before anybody called expire
    assert found.nodes() == 0
    assert found.expire() == {"http://b:1"}


def test_a_restarted_node_does_not_lose_its_engines_while_they_attach_again():
    clock = Clock()
    found = roster(clock)
    found.report(report(A, epoch=1))
    assert found.report(report(epoch=2)) == frozenset()
    clock.now += 2
    assert found.report(report(A, epoch=2)) == frozenset()
    clock.now += 2
    assert found.expire() == frozenset()
    assert urls(found) == ["http://a:1"]


def test_named_engines_stay_but_a_node_may_say_they_are_gone():
    clock = Clock()
    found = roster(clock, prefill=["http://a:1/"], decode=["http://a:1", "http://c:1"])
    assert urls(found) == ["http://a:1", "http://c:1"]
    found.report(report(A))
    first = found.engines()[0]
    assert (first.name, first.prefills, first.decodes, first.named) == ("a", True, True, True)
    assert found.report(report()) == {"http://a:1"}
    assert urls(found) == ["http://a:1", "http://c:1"]
    found.report(report(A))
    clock.now += 10
    assert found.expire() == frozenset()  # a silent node says nothing about an engine the user vouches for


def test_suspicion_passes():
    clock = Clock()
    found = roster(clock)
    found.suspect("http://a:1")
    assert found.is_suspect("http://a:1")
    clock.now += 2.1
    assert not found.is_suspect("http://a:1")


def test_odd_urls():
    for odd in (
        "",
        "a:1",
        "ftp://a",
        "http://",
        "http://user:secret@a:1",
        "http://a:1?x=1",
        "http://a:x",
        "http://[::1",
    ):
        with pytest.raises(ConfigError) as caught:
            base_url(odd)
        assert "secret" not in str(caught.value)
    found = roster(Clock())
    odd = report(("x", "decode", "http://user:secret@a:1"), ("y", "decode", ""), ("z", "decode", "http://0.0.0.0:1"))
    believed, refusals = found.screen(odd)
    found.report(believed)
    assert urls(found) == []
    assert [refusal.reason for refusal in refusals] == ["unroutable"] * 3
    assert "secret" not in str(refusals)


def test_nodes_are_bounded():
    found = roster(Clock())
    for number in range(MAX_NODES + 10):
        believed, _ = found.screen(report(node=str(number)))
        if believed is not None:
            found.report(believed)
    assert found.nodes() == MAX_NODES


def test_a_name_has_two_lives_at_most():
    """A node that was started again has a new one; more at a time would be somebody who fills the roster."""
    clock = Clock()
    found = roster(clock)
    for epoch in (1, 2):
        assert found.screen(report(A, epoch=epoch))[1] == []
        found.report(report(A, epoch=epoch))
    believed, refusals = found.screen(report(A, epoch=3))
    assert believed is None
    assert [refusal.reason for refusal in refusals] == ["lives"]
    assert found.screen(report(A, epoch=1))[0] is not None
    clock.now += 3.1
    assert found.screen(report(A, epoch=3)) == (report(A, epoch=3), [])
    found.report(report(A, epoch=3))
    assert found.nodes() == 1


def test_the_next_life_of_a_node_has_its_engines():
    found = roster(Clock())
    found.report(report(A, epoch=1))
    assert found.screen(report(A, epoch=2)) == (report(A, epoch=2), [])
    assert [refusal.reason for refusal in found.screen(report(A, B, node="other"))[1]] == ["owned"]
    assert found.screen(report(A, B, node="other"))[0] == report(B, node="other")


def test_an_owner_that_is_silent_owns_nothing():
    clock = Clock()
    found = roster(clock)
    found.report(report(A))
    clock.now += 3.1
    assert found.screen(report(A, node="other")) == (report(A, node="other"), [])


def test_spelling_makes_no_other_engine():
    found = roster(Clock())
    found.report(report(("a", "prefill", "http://a:80/")))
    assert [each.reason for each in found.screen(report(("a", "prefill", "HTTP://A"), node="other"))[1]] == ["owned"]


def test_nodes_that_are_one_too_many_are_said_to_be_so():
    found = roster(Clock())
    for number in range(MAX_NODES):
        found.report(report(node=str(number)))
    believed, refusals = found.screen(report(node="one more"))
    assert (believed, [refusal.reason for refusal in refusals]) == (None, ["nodes"])
    assert found.screen(report(node="7", epoch=2))[0] is not None


def test_peers_are_the_nodes_that_listen_each_with_its_latest_life():
    clock = Clock()
    found = roster(clock)
    found.report(report(A))
    assert found.peers() == {}
    listening = msgspec.structs.replace(report(A, node="a", epoch=1), listen="tcp://10.0.0.1:1", public_key="k" * 40)
    found.report(listening)
    assert found.peers() == {("a", 1): PeerEntry("a", "tcp://10.0.0.1:1", "k" * 40)}
    clock.now += 1
    found.report(msgspec.structs.replace(listening, epoch=2, listen="tcp://10.0.0.1:2"))
    found.report(listening)  # the last word of a life that is over changes nothing
    assert found.peers() == {("a", 2): PeerEntry("a", "tcp://10.0.0.1:2", "k" * 40)}
    clock.now += 3.1
    found.expire()
    assert found.peers() == {}


def timeline(transfer):
    return Timeline(transfer=transfer, route=Route.CHAT, mode=Mode.SAMPLED, why="chat", moments=[])


def mark(transfer, at_ns, event="sealed"):
    return MarkReport(transfer=transfer, event=event, at_ns=at_ns, nbytes=7, tokens=1, engine="e")


def test_ledger_keeps_the_youngest_and_merges_marks(monkeypatch):
    monkeypatch.setattr(ledger_module, "MAX_MOMENTS", 3)
    kept = Ledger(keep=2)
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


def test_ledger_keeps_moments_of_other_hosts_by_this_hosts_clock():
    kept = Ledger(keep=2)
    kept.open(timeline("one"))
    kept.merge([mark("one", 100)], -150)
    kept.merge([mark("one", 100)])
    assert [moment.at_ns for moment in kept.find("one")["moments"]] == [-50, 100]
