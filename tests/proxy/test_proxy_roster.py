"""Which engines are believed in, which one is chosen, and which timelines are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import ConfigError
from pdx.messages import VERSION, EngineReport, MarkReport, NodeReport
from pdx.proxy import ledger as ledger_module
from pdx.proxy.ledger import Ledger, Timeline
from pdx.proxy.plan import Mode, Route
from pdx.proxy.roster import MAX_NODES, Engine, Roster, base_url
from pdx.proxy.router import Candidate, decoder, prefiller


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
    found.report(report(("x", "decode", "http://user:secret@a:1"), ("y", "decode", "")))
    assert urls(found) == []


def test_nodes_are_bounded():
    found = roster(Clock())
    for number in range(MAX_NODES + 10):
        found.report(report(node=str(number)))
    assert found.nodes() == MAX_NODES


def engine(url, prefills=False, decodes=False, named=False, running=0):
    return Engine(url=url, name=url, prefills=prefills, decodes=decodes, named=named, running=running)


P, Q = engine("p", prefills=True), engine("q", prefills=True)
D, E = engine("d", decodes=True), engine("e", decodes=True)
BOTH = engine("both", prefills=True, decodes=True)


def test_least_outstanding():
    assert prefiller([Candidate(P, 2), Candidate(Q, 1), Candidate(D)]) == Q
    assert prefiller([Candidate(P, last_used=2), Candidate(Q, last_used=1)]) == Q
    assert prefiller([Candidate(P, suspect=True), Candidate(Q, 5)]) == Q
    assert prefiller([Candidate(P, suspect=True), Candidate(D)]) is None
    assert decoder([Candidate(D, 2), Candidate(E, 1), Candidate(P)]) == E
    assert decoder([Candidate(D), Candidate(engine("f", decodes=True, running=1))]) == D


def test_decoders_of_last_resort():
    assert decoder([Candidate(D), Candidate(P)], tried=["d"]) == P
    assert decoder([Candidate(D, suspect=True), Candidate(P)]) == P
    assert decoder([Candidate(D, suspect=True), Candidate(P, suspect=True)]) == D
    assert decoder([Candidate(D)], tried=["d"]) is None
    assert decoder([]) is None


def test_engines_with_both_roles():
    assert prefiller([Candidate(BOTH)]) is None  # twice the same work
    named = engine("both", prefills=True, decodes=True, named=True)
    assert prefiller([Candidate(named)]) == named
    assert prefiller([Candidate(BOTH), Candidate(P, 9)]) == P  # the only decoder is left alone
    assert prefiller([Candidate(BOTH), Candidate(D)]) == BOTH
    assert decoder([Candidate(BOTH), Candidate(D, 9)], prefilled_by="both") == D


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3), st.booleans()), max_size=6))
def test_choices_are_always_able(flags):
    candidates = [
        Candidate(engine(str(index), prefills=p, decodes=d), in_flight=load, suspect=suspect)
        for index, (p, d, load, suspect) in enumerate(flags)
    ]
    chosen = prefiller(candidates)
    assert chosen is None or chosen.prefills
    last = decoder(candidates, prefilled_by=chosen.url if chosen else "")
    assert (last is None) == (not candidates)
    healthy = [each for each in candidates if each.engine.decodes and not each.suspect]
    if healthy:
        assert last.decodes
        if chosen is not None:
            assert last.url != chosen.url


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
