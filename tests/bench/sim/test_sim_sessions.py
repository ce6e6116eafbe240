"""Generated conversations: their statistics, and what a turn asks for."""

import statistics
from collections import Counter

import pytest
from msgspec.structs import replace

from pdx.bench.sim.sessions import Conversations, generate, turns

ASKED = Conversations(sessions=6000)


@pytest.mark.long
def test_they_have_the_statistics_that_were_published_of_sharegpt():
    found = turns(ASKED)
    counts = Counter(turn.session for turn in found)
    tokens = Counter()
    for turn in found:
        tokens[turn.session] += turn.question + turn.answer
    assert len(counts) == 6000
    assert statistics.fmean(counts.values()) == pytest.approx(5.75, rel=0.03)
    assert sum(count > 1 for count in counts.values()) / 6000 == pytest.approx(0.73, abs=0.02)
    assert sum(count > 2048 for count in tokens.values()) / 6000 == pytest.approx(0.47, abs=0.02)
    assert sum(count > 4096 for count in tokens.values()) / 6000 == pytest.approx(0.30, abs=0.02)


def of_sessions(trace):
    sessions = {}
    for request in trace.requests:
        sessions.setdefault(request.session, []).append(request)
    return sessions.values()


def test_a_turn_begins_with_what_the_turns_before_it_left():
    trace = generate(replace(ASKED, sessions=200, window=1 << 20))
    for requests in of_sessions(trace):
        for before, behind in zip(requests, requests[1:], strict=False):
            whole = [key for key in before.keys if key[8:12] != b"\xff\xff\xff\xff"]
            left = [*whole, *before.answer_keys]
            assert list(behind.keys[: len(left)]) == left
            assert len(left) == (before.tokens + before.output) // 64


def test_no_prompt_and_answer_are_longer_than_the_window():
    trace = generate(replace(ASKED, sessions=500))
    assert max(request.tokens + request.output for request in trace.requests) <= 2048
    assert all(len(set(request.keys)) == len(request.keys) == -(-request.tokens // 64) for request in trace.requests)


def test_a_history_that_was_cut_keeps_its_first_block_where_kv_may_move():
    moves, stays = (generate(replace(ASKED, sessions=200, moves=moves)) for moves in (True, False))
    cut = 0
    for with_first, without in zip(moves.requests, stays.requests, strict=True):
        assert (with_first.tokens, len(with_first.keys)) == (without.tokens, len(without.keys))
        assert len(with_first.content) == 4 * (with_first.tokens // 64 + len(with_first.answer_keys))
        assert with_first.keys[1:] == without.keys[1:], "keys are chained"
        cut += with_first.keys[0] != without.keys[0]
    assert cut > 100
    for requests in of_sessions(moves):
        seen, first = set(), next((request.content[:4] for request in requests if request.content), b"")
        for request in requests:
            assert not request.content or request.content[:4] == first or request.content[:4] not in seen, "all is new"
            seen.update(request.block_names)
