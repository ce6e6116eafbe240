"""What this node asks peers for: once, until it is answered, over or late, and not again at once."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from kept import kept
from steps import lines_run

from pdx.errors import PeerUnknown
from pdx.node.peers.connection import ConnectionState
from pdx.node.peers.fetches import KEPT_S, Fetches
from pdx.store import paying
from pdx.store.paying import Computing
from pdx.telemetry.env import Env
from pdx.wire.messages import Admit, Push

TRANSFER = "transfer-0123456789"
KEYS = [bytes([number]) * 16 for number in range(4)]
ASK = Admit(KEYS, source="b")
FETCH_S = 5.0


@dataclass
class FakePeer:
    """A connection that is ready when the test says so."""

    name: str = "b"
    state: ConnectionState = ConnectionState.READY
    sent: list = field(default_factory=list)

    def send(self, body, about=0):
        self.sent.append((about, body))


@pytest.fixture
def link():
    return FakePeer()


@pytest.fixture
def dialled():
    return []


@pytest.fixture
def env():
    return Env()


@pytest.fixture
def counters(env):
    return env.counters


@pytest.fixture
def fetches(link, dialled, env):
    def dial(name):
        if name != link.name:
            raise PeerUnknown(name)
        dialled.append(name)
        return link

    return Fetches(SimpleNamespace(dial=dial), FETCH_S, env)


def remembered(fetches, env):
    return kept(fetches, env.counters, env.news)


def test_a_peer_is_asked_once_for_what_is_missing(fetches, link, dialled):
    assert fetches.is_waiting(ASK, 1, 0.0)
    assert fetches.is_waiting(ASK, 1, 0.1)
    assert fetches.is_waiting(ASK, 2, 4.9), "others that ask meanwhile wait for the same answer"
    assert link.sent == [(1, Push(KEYS[1:], within_s=FETCH_S))]
    assert dialled == ["b"]
    assert len(fetches) == 1


def test_another_peer_or_another_end_is_another_question(fetches, link):
    fetches.is_waiting(ASK, 0, 0.0)
    fetches.is_waiting(Admit(KEYS[:2], source="b", shards=2, transfer=TRANSFER), 0, 0.0)
    assert link.sent == [(1, Push(KEYS, within_s=FETCH_S)), (2, Push(KEYS[:2], "", 2, TRANSFER))]
    with pytest.raises(PeerUnknown):
        fetches.is_waiting(Admit(KEYS, source="nobody"), 0, 0.0)
    assert len(fetches) == 2


def test_nobody_waits_longer_than_the_deadline(fetches, link):
    assert fetches.is_waiting(ASK, 0, 0.0)
    assert not fetches.is_waiting(ASK, 0, FETCH_S)
    assert fetches.tick(FETCH_S) == 1
    assert fetches.tick(FETCH_S + 0.1) == 0, "it is late once"
    assert len(fetches) == 0


def test_what_a_peer_does_not_have_is_not_asked_again_at_every_step(fetches, link):
    fetches.is_waiting(ASK, 0, 0.0)
    fetches.answered(link, 2, 0, 0.1)
    fetches.answered(FakePeer("c"), 1, 0, 0.1)
    fetches.answered(link, 1, 4, 0.2)
    assert fetches.is_waiting(ASK, 0, 0.2), "those were answers to nothing, and a promise"
    fetches.answered(link, 1, 0, 1.0)
    assert not fetches.is_waiting(ASK, 0, 1.0), "which was taken back"
    fetches.tick(1.0 + KEPT_S - 0.1)
    assert not fetches.is_waiting(ASK, 0, 1.0 + KEPT_S - 0.1)
    assert len(link.sent) == 1
    assert fetches.tick(1.0 + KEPT_S) == 0
    assert fetches.is_waiting(ASK, 0, 1.0 + KEPT_S)
    assert len(link.sent) == 2


def test_what_comes_is_waited_for_until_its_push_ends(fetches, link):
    ask = Admit(KEYS, source="b", transfer=TRANSFER)
    fetches.is_waiting(ask, 0, 0.0)
    fetches.answered(link, 1, 3, 0.1)
    assert fetches.is_waiting(ask, 0, 0.2)
    fetches.over("c", 1, TRANSFER, 0.3)
    fetches.over("b", 2, None, 0.3)
    assert fetches.is_waiting(ask, 0, 0.3), "those were other peers' and other pushes"
    fetches.over("b", 1, TRANSFER, 0.4)
    assert not fetches.is_waiting(ask, 0, 0.4)
    assert len(link.sent) == 1


def test_what_another_push_of_its_transfer_has_not_brought_is_asked_for_again(fetches, link, env):
    """It may have ended before the question came, or bring nothing of what it asks for."""
    nothing = remembered(fetches, env)
    ask = Admit(KEYS, source="b", transfer=TRANSFER)
    fetches.is_waiting(ask, 0, 0.0)
    fetches.answered(link, 1, 3, 0.1)
    fetches.over("b", 0, TRANSFER, 0.2)
    assert env.news == [("fetch", KEYS[-1])]
    assert len(fetches) == 0
    assert fetches.is_waiting(ask, 2, 0.2)
    assert link.sent == [(1, Push(KEYS, "", 1, TRANSFER)), (2, Push(KEYS[2:], "", 1, TRANSFER))]
    fetches.answered(link, 2, 0, 0.3)
    assert not fetches.is_waiting(ask, 2, 0.3)
    assert fetches.tick(0.3 + KEPT_S) == 0
    assert remembered(fetches, env) == nothing


def test_a_question_waits_for_its_link(fetches, link):
    link.state = ConnectionState.DIALING
    assert fetches.is_waiting(ASK, 0, 0.0)
    assert link.sent == []
    link.state = ConnectionState.READY
    fetches.ready(FakePeer("c"))
    assert link.sent == []
    fetches.ready(link)
    fetches.ready(link)
    assert link.sent == [(1, Push(KEYS, within_s=FETCH_S))]
    link.state = ConnectionState.DIALING
    fetches.is_waiting(Admit([b"x" * 16], source="b"), 0, 0.0)
    fetches.tick(FETCH_S)
    link.state = ConnectionState.READY
    fetches.ready(link)
    assert len(link.sent) == 1, "the peer would push what nobody waits for"


def test_a_lost_peer_is_not_waited_for(fetches, link):
    fetches.is_waiting(ASK, 0, 0.0)
    fetches.lost("c", 0.1)
    assert fetches.is_waiting(ASK, 0, 0.1)
    fetches.lost("b", 0.2)
    assert not fetches.is_waiting(ASK, 0, 0.2)
    assert len(fetches) == 0
    measured(fetches, 1.0)
    fetches.forget([])
    assert fetches.takes_s("b", 1) == 0.0, "nor is how fast it was known any more"


def test_what_ends_is_found_without_a_look_at_all_questions(fetches, link, env):
    """Each push that has landed asks; deadlines are looked at five times a second, and all peers that are not there
    are dialled again and again."""
    costs, nothing = [], remembered(fetches, env)
    for known in (10, 1000):
        for number in range(known):
            key = number.to_bytes(16, "little")
            fetches.is_waiting(Admit([key], source="b", transfer=f"transfer-{number:016d}"), 0, 0.0)
        with lines_run() as lines:
            fetches.over("b", known - 1, f"transfer-{known - 1:016d}", 0.1)
            fetches.answered(link, known - 2, 0, 0.1)
            assert fetches.tick(0.1) == 0
            fetches.lost("another", 0.1)
        costs.append(len(lines))
    assert 0 < costs[1] < costs[0] + 10, "a hundred times as many are known"
    for now in (FETCH_S, FETCH_S + KEPT_S):
        fetches.tick(now)
    assert remembered(fetches, env) == nothing


# ---- what a peer sends later than it is computed (invariant 10) ----------------------------------------------------

CHUNK = 100 << 20


def measured(fetches, chunk_s):
    """The peer has sent one chunk in so long."""
    fetches.landed("b", CHUNK, CHUNK, 0.0, chunk_s)


@pytest.mark.parametrize(("computing_s", "asks"), [(2.0, True), (1.2, True), (1.0, False), (0.1, False)])
def test_what_computing_is_faster_than_is_not_asked_for(fetches, link, counters, computing_s, asks):
    measured(fetches, 1.0)
    fetches.forget(["b"])
    assert fetches.is_waiting(ASK, 1, 10.0, Computing(computing_s)) is asks
    assert counters["fetches_not_worth"] == (0 if asks else 3)
    within_s = 3 * (computing_s - paying.MARGIN) - paying.LOAD_S  # of its disk
    assert [push for _, push in link.sent] == [Push(KEYS[1:], within_s=pytest.approx(within_s))] * asks


def test_a_peer_that_was_not_measured_is_asked_and_not_waited_for_much_longer_than_computing_takes(fetches, link):
    assert fetches.is_waiting(ASK, 1, 0.0, Computing(0.5))
    assert fetches.is_waiting(ASK, 1, 2.9, Computing(0.5))
    assert not fetches.is_waiting(ASK, 1, 3.1, Computing(0.5)), "twice as long"
    assert fetches.tick(3.1) == 1
    assert not fetches.is_waiting(Admit([b"x" * 16], source="b"), 0, 3.1, Computing(0.5)), "nothing came in that time"


def test_one_request_tries_now_and_then_whether_a_peer_has_become_faster(fetches, link):
    measured(fetches, 1.0)
    due = 1.0 + paying.PROBE_S
    assert not fetches.is_waiting(ASK, 0, due - 0.1, Computing(0.1))
    assert fetches.is_waiting(ASK, 0, due, Computing(0.1)), "this one waits, as long as for any"
    assert link.sent == [(1, Push(KEYS))], "its disk would be slower still"
    other = Admit([b"x" * 16], source="b")
    assert not fetches.is_waiting(other, 0, due, Computing(0.1)), "one at a time"
    assert not fetches.is_waiting(ASK, 0, due + 0.9, Computing(0.1)), "twice the time of computing is over"
    assert fetches.tick(due + 0.9) == 1
    assert not fetches.is_waiting(other, 0, due + 0.9, Computing(0.1)), "it is not that fast"
    again = due + 1.0 + paying.PROBE_S
    fetches.tick(again)
    assert fetches.is_waiting(ASK, 0, again, Computing(0.1))
    for number in range(3):
        fetches.landed("b", CHUNK, CHUNK, again + number, again + number + 0.01)
    fetches.over("b", 2, None, again + 3)
    assert fetches.is_waiting(other, 0, again + 3, Computing(0.2))
    assert len(link.sent) == 3


@pytest.mark.parametrize("why", ["it has nothing", "no room here", "it is being dialled"])
def test_a_try_that_measures_nothing_is_one_all_the_same(fetches, link, why):
    """Else every request would wait for a peer that seemed slow."""
    measured(fetches, 1.0)
    now, waited = 1.0 + paying.PROBE_S, 0
    link.state = ConnectionState.DIALING if why == "it is being dialled" else ConnectionState.READY
    for number in range(100):
        waited += fetches.is_waiting(Admit([bytes([number]) * 16], source="b"), 0, now, Computing(0.1))
        if why == "it has nothing":
            fetches.answered(link, len(link.sent), 0, now)
        now += 0.5
        fetches.tick(now, lambda name, number, now=now: now)
    assert waited == 5, "in 50 seconds"


def test_what_waits_for_room_here_says_nothing_of_its_peer(fetches, link):
    assert fetches.is_waiting(ASK, 1, 0.0, Computing(0.5))
    assert fetches.tick(3.1, lambda name, number: 3.1) == 1
    assert fetches.takes_s("b", 1) == 0.0, "nothing is known"
    assert fetches.is_waiting(Admit([b"x" * 16], source="b"), 0, 4.0, Computing(0.5))
    assert fetches.tick(5.1, lambda name, number: 5.0) == 1
    fetches.landed("b", CHUNK, CHUNK, 5.1, 6.1)
    assert 1.105 < fetches.takes_s("b", 1) < 1.1 * 1.1 + 0.005, "late counts from when there was room"


def test_what_a_transfer_brings_is_waited_for_whatever_the_rate(fetches, link):
    measured(fetches, 1.0)
    ask = Admit(KEYS, source="b", transfer=TRANSFER)
    assert fetches.is_waiting(ask, 0, 10.0, Computing(0.1))
    assert not fetches.is_waiting(ask, 0, 10.0 + FETCH_S, Computing(0.1))
    fetches.tick(10.0 + FETCH_S)
    assert fetches.takes_s("b", 1) == pytest.approx(1.105), "what is late may still be being computed"
