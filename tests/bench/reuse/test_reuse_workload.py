"""Plans of the reuse bench: the same each time, as often as asked, as fast as asked."""

import math
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from pdx.bench.reuse.records import BURST, DOCUMENTS, FIRST, KNOWN, SESSIONS
from pdx.bench.reuse.workload import FEW, TOGETHER, Settings, Turn, order, sessions_of
from pdx.errors import ConfigError

SETTINGS = Settings(
    workloads=(DOCUMENTS, SESSIONS),
    documents=8,
    tokens=2000,
    question_tokens=32,
    rounds=3,
    sessions=8,
    turns=4,
    first_tokens=1000,
    message_tokens=200,
    output_tokens=16,
    loads=(0.5, 1.0),
    rates=(),
    repeats=2,
)


def turn(workload=DOCUMENTS, load="0.5", share=0.5, rate=None, repeat=0):
    return Turn(repeat, "plain", workload, load, share, rate)


def test_the_same_plan_for_every_system():
    for workload in (DOCUMENTS, SESSIONS):
        one = sessions_of(SETTINGS, turn(workload), 4.0)
        assert one == sessions_of(SETTINGS, replace(turn(workload), system="other"), 4.0)
        assert one != sessions_of(SETTINGS, turn(workload, repeat=1), 4.0)
        assert one != sessions_of(replace(SETTINGS, seed=7), turn(workload), 4.0)


def test_each_document_comes_as_often_and_in_no_order():
    asked = [session.document.name for session in sessions_of(SETTINGS, turn(), 4.0)]
    assert set(Counter(asked).values()) == {SETTINGS.rounds}
    assert asked != sorted(asked)
    assert [session.document.tokens for session in sessions_of(SETTINGS, turn(), 4.0)] == [2000] * 24


def test_requests_come_at_a_share_of_the_burst():
    for share in (0.5, 1.0):
        sessions = sessions_of(SETTINGS, turn(share=share), 4.0)
        assert max(session.start_s for session in sessions) == pytest.approx(len(sessions) / (4.0 * share))
    assert {session.start_s for session in sessions_of(SETTINGS, turn(share=None, rate=math.inf), None)} == {0.0}
    with pytest.raises(ValueError, match="burst that was not measured"):
        sessions_of(SETTINGS, turn(), None)


def test_a_session_pauses_while_the_others_are_asked():
    many = replace(SETTINGS, sessions=400)
    sessions = sessions_of(many, turn(SESSIONS, share=None, rate=8.0), None)
    assert max(session.start_s for session in sessions) == pytest.approx(400 / 8.0)
    pauses = [each.think_s for session in sessions for each in session.messages[1:]]
    assert statistics.mean(pauses) == pytest.approx(400 / 8.0, rel=0.1)
    alone = sessions_of(many, turn(SESSIONS, load=FIRST, share=None), None)
    assert [[each.think_s for each in session.messages] for session in alone] == [[0.0] * 4] * FEW


def test_systems_take_turns_at_each_load_or_in_each_repeat():
    systems = ["a", "b"]
    beside = order(SETTINGS, systems, all_at_once=True)
    assert [each.system for each in beside[:4]] == ["a", "b", "b", "a"]
    apart = order(SETTINGS, systems, all_at_once=False)
    loads = 1 + 2 * (2 + len(SETTINGS.loads))
    assert [each.system for each in apart] == ["a"] * loads + ["b"] * 2 * loads + ["a"] * loads
    assert set(beside) == set(apart)
    for turns in (beside, apart):  # a share is of a burst that came before
        mine = [(each.workload, each.load) for each in turns if (each.system, each.repeat) == ("a", 0)]
        assert mine[:5] == [(DOCUMENTS, load) for load in (FIRST, KNOWN, BURST, "0.5", "1")]
        assert (SESSIONS, KNOWN) not in mine


def test_a_working_set_that_the_engine_holds_itself_is_refused():
    few = 1 + TOGETHER
    SETTINGS.check()
    with pytest.raises(ConfigError, match="more --documents"):
        replace(SETTINGS, documents=few).check()
    with pytest.raises(ConfigError, match="more --sessions"):
        replace(SETTINGS, sessions=few, workloads=(SESSIONS,)).check()
    assert SETTINGS.longest == 2000 + 32 + 16
    assert replace(SETTINGS, workloads=(SESSIONS,)).longest == 1000 + 16 + 3 * 216
