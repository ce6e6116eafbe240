"""Which peer has the most of a prompt: asked once, answered in a bounded time, and believed for a moment."""

import itertools
import math
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
from kept import kept
from steps import lines_run

from pdx.memory.rules import Rule
from pdx.node.peers.connection import ConnectionState
from pdx.node.peers.lookups import KEPT_S, LONGEST_S, MAX_ASKED, MAX_KEYS, Lookups
from pdx.store import paying
from pdx.telemetry.env import Env
from pdx.wire.messages import Admit, Group, Push

KEYS = [bytes([number]) * 16 for number in range(8)]
ASK = Admit(KEYS, wait_s=0.5, lease_s=1.0)
LOOKUP_S = 0.005
FIRST = 100


class FakePeer:
    """A connection that is ready when the test says so."""

    def __init__(self, name, state=ConnectionState.READY):
        self.name, self.state, self.is_silent = name, state, False
        self.sent = []

    def send(self, body, about=0):
        self.sent.append((about, body))


class Bed:
    """Lookups among peers of these names."""

    def __init__(self, names="bcd", lookup_s=LOOKUP_S):
        self.env = Env()
        self.connections = SimpleNamespace(peers=[FakePeer(name) for name in names], of=self.of)
        self.lookups = Lookups(self.connections, lookup_s, self.env, itertools.count(FIRST))

    def of(self, name):
        return next((peer for peer in self.connections.peers if peer.name == name), None)

    def source(self, now=0.0, ask=ASK, hits=0, computing_s=math.inf):
        return self.lookups.source(ask, now, computing_s, lambda: hits)

    def answer(self, name, count, now=0.001, number=FIRST):
        self.lookups.answered(self.of(name), number, count, now)

    def kept(self):
        return kept(self.lookups, self.env, self.env.counters, self.env.news, self.connections)

    def sent(self):
        return {peer.name: [body for _, body in peer.sent] for peer in self.connections.peers}


@pytest.fixture
def bed():
    return Bed()


def test_each_peer_is_asked_once_and_the_one_that_has_most_is_the_source(bed):
    assert bed.source() is None
    assert bed.source(0.001) is None
    assert bed.sent() == {name: [Push(KEYS, dry_run=True, within_s=LONGEST_S)] for name in "bcd"}
    for name, count in (("b", 2), ("c", 5)):
        bed.answer(name, count)
        assert bed.source(0.001) is None
        assert bed.env.news == []
    bed.answer("d", 7, number=FIRST + 1)
    bed.lookups.answered(FakePeer("d"), FIRST, 7, 0.001)
    bed.answer("b", 8)
    assert bed.source(0.001) is None, "those were answers to nothing, of a stranger, and a second one"
    bed.answer("d", 4)
    assert bed.env.news == [("fetch", KEYS[-1])]
    for now in (0.001, KEPT_S):
        bed.lookups.turn(now)
        assert bed.source(now) == "c", "it holds for a moment"
    assert len(bed.lookups) == 0
    bed.lookups.turn(0.001 + KEPT_S)
    assert bed.source(3.0) is None
    bed.answer("d", 8, 3.0, FIRST + 1)
    assert bed.source(3.0) == "d", "nobody else is waited for when one has all"


def test_what_is_here_is_not_asked_for_and_is_no_gain(bed):
    bed.source(hits=3)
    assert bed.sent()["b"] == [Push(KEYS[3:], dry_run=True, within_s=LONGEST_S)]
    bed.answer("b", 0)
    bed.answer("c", 2)
    bed.answer("d", 1)
    assert bed.source(0.001, hits=3) == "c"
    assert bed.source(0.1, hits=5) == "", "by now as much is here"
    assert bed.source(0.1, hits=8) == ""


@pytest.mark.parametrize("answers", [{}, {"c": 3}])
def test_who_does_not_answer_in_time_is_not_waited_for_and_not_asked_again_until_then(bed, answers):
    bed.source()
    for name, count in answers.items():
        bed.answer(name, count)
    assert bed.lookups.due_in(0.001) == pytest.approx(LOOKUP_S - 0.001)
    bed.lookups.turn(LOOKUP_S)
    assert bed.env.news == [("fetch", KEYS[-1])]
    assert bed.source(LOOKUP_S) == ("c" if answers.get("c") else "")
    other = Admit(KEYS[:5], wait_s=0.5)
    bed.source(0.1, other)
    asked = {"c"} if answers else set()
    assert {name for name, sent in bed.sent().items() if len(sent) == 2} == asked
    bed.answer("b", 7, 0.2)
    assert bed.source(0.2) == ("c" if answers.get("c") else ""), "that is too late"
    bed.source(0.2, Admit(KEYS[:3], wait_s=0.5))
    assert {name for name, sent in bed.sent().items() if len(sent) == 2 + (name in asked)} == {"b"} | asked
    assert bed.env.counters["peer_lookups_late"] == 1


@pytest.mark.parametrize(
    ("lookup_s", "computing_s", "waits_s"),
    [
        (LOOKUP_S, math.inf, LOOKUP_S),
        (LOOKUP_S, 1.0, LOOKUP_S),
        (LOOKUP_S, paying.LOAD_S + 0.002, 0.002),
        (LOOKUP_S, paying.LOAD_S, 0.0),
        (0.0, math.inf, 0.0),
    ],
)
def test_nobody_waits_longer_than_can_be_gained(lookup_s, computing_s, waits_s):
    bed = Bed(lookup_s=lookup_s)
    assert bed.source(1.0, computing_s=computing_s) == (None if waits_s else "")
    assert len(bed.sent()["b"]) == bool(waits_s)
    if waits_s:
        assert bed.lookups.due_in(1.0) == pytest.approx(waits_s)


def test_peers_that_are_not_connected_are_neither_asked_nor_a_source(bed):
    bed.of("b").state = ConnectionState.DIALING
    bed.source()
    assert bed.sent()["b"] == []
    bed.answer("c", 4)
    bed.answer("d", 3)
    assert bed.source(0.001) == "c"
    bed.of("c").state = ConnectionState.CLOSED
    assert bed.source(0.002) == ""
    bed.connections.peers.clear()
    assert bed.source(0.003) == ""
    assert bed.source(0.003, Admit(KEYS[:2], wait_s=0.5)) == "", "there is nobody to ask"


def test_questions_are_bounded():
    bed = Bed([f"peer-{at}" for at in range(3 * MAX_ASKED)])
    many = Admit([at.to_bytes(16, "little") for at in range(3 * MAX_KEYS)], wait_s=0.5)
    bed.source(ask=many)
    asked = [body for sent in bed.sent().values() for body in sent]
    assert len(asked) == MAX_ASKED
    assert asked[0].keys == many.keys[:MAX_KEYS]
    bed.answer("peer-0", 1 << 30)
    assert bed.source(0.001, many, hits=MAX_KEYS) == "", "more than was asked is no answer"
    assert bed.source(0.001, many, hits=MAX_KEYS - 1) == "peer-0"


@pytest.mark.parametrize("count", [8, MAX_KEYS])
def test_of_several_groups_each_is_asked_for_as_much(bed, count):
    groups = [Group(nbytes=1, layers=1), Group(reach=2, nbytes=1, layers=1, tail_nbytes=0)]
    keys = [bytes([group]) * 12 + at.to_bytes(4, "little") for group in range(2) for at in range(count)]
    ask = Admit(keys, groups=groups, wait_s=0.5)
    bed.source(ask=ask, hits=3)
    (question,) = bed.sent()["b"]
    each = min(count, MAX_KEYS // 2)
    asked = [*keys[:each], *keys[count : count + each]]
    assert question == Push(asked, groups=groups, dry_run=True, within_s=LONGEST_S)
    bed.answer("b", 3)
    bed.answer("c", 6)
    bed.answer("d", 5)
    assert bed.source(0.001, ask) == "c"
    assert isinstance(groups[0], Rule)


def test_nothing_is_left_of_a_storm():
    """Peers that answer, lie, are late, leave and come back."""
    random = Random(7)
    bed, now, asked, waiting = Bed("bcdef"), 0.0, Counter(), {}
    nothing = bed.kept()
    for _ in range(3000):
        now += random.choice([0.0, 0.001, 0.004, 0.1])
        bed.lookups.turn(now)
        for _, name in bed.env.news:
            waiting.pop(name, None)
        bed.env.news.clear()
        assert all(now < since + LOOKUP_S for since in waiting.values()), "one is kept waiting"
        at = random.randrange(1, 9)
        ask = Admit(KEYS[:at], wait_s=0.5)
        if bed.source(now, ask, random.randrange(at)) is None:
            waiting.setdefault(ask.last_sought, now)
        for peer in bed.connections.peers:
            if random.random() < 0.5 and peer.sent:
                number, question = peer.sent.pop(random.randrange(len(peer.sent)))
                asked[peer.name] += 1
                bed.lookups.answered(peer, number, random.randrange(len(question.keys) + 3), now)
            if random.random() < 0.02:
                peer.state = random.choice([ConnectionState.READY, ConnectionState.CLOSED])
            if random.random() < 0.05:  # another connection
                bed.connections.peers[bed.connections.peers.index(peer)] = FakePeer(peer.name)
    assert min(asked.values()) > 50
    bed.lookups.turn(now + LOOKUP_S)
    assert len(bed.lookups) == 0
    bed.lookups.turn(now + LOOKUP_S + KEPT_S)
    assert bed.kept() == nothing
    assert bed.lookups.due_in(now + LOOKUP_S + KEPT_S) == math.inf


def test_an_answer_costs_the_same_however_many_questions_are_open():
    costs = []
    for known in (10, 1000):
        bed = Bed("bc")
        for at in range(known):
            bed.source(0.0, Admit([at.to_bytes(16, "little")], wait_s=0.5))
        with lines_run() as lines:
            bed.answer("b", 1, number=FIRST + known // 2)
            bed.lookups.turn(0.001)
        costs.append(len(lines))
    assert costs[0] == costs[1] > 0
