"""The life of a push on both sides: no room is given back while it may still be written, and everything ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.node.peers.inbound_push import PUSH, PushState, PushStep
from pdx.store.copy import COPY, CopyState, CopyStep

TABLES = {
    "sender": (COPY, CopyState, CopyStep, CopyState.QUEUED),
    "receiver": (PUSH, PushState, PushStep, PushState.QUEUED),
}
MAY_BE_WRITTEN = {PushState.LANDING, PushState.CLOSING}


@pytest.fixture(params=TABLES.values(), ids=TABLES.keys())
def side(request):
    return request.param


def after(table, state):
    return {target for (before, _), target in table.items() if before is state}


def test_every_state_is_reached_and_every_step_is_used(side):
    table, states, steps, first = side
    reached, todo = {first}, [first]
    while todo:
        new = after(table, todo.pop()) - reached
        reached |= new
        todo += new
    assert reached == set(states)
    assert {step for _, step in table} == set(steps)


def test_only_over_is_final_and_nothing_goes_back(side):
    table, states, _, first = side
    order = list(states)
    assert [state for state in states if not after(table, state)] == [states.OVER]
    assert all(order.index(target) > order.index(state) for (state, _), target in table.items())
    assert first not in table.values()


def test_only_a_state_in_the_beginning_is_granted(side):
    table, _, steps, first = side
    assert [state for state, step in table if step is steps.GRANT] == [first]


def test_the_sender_says_let_go_only_when_nothing_reads_its_memory_any_more():
    ends = {(state, step) for (state, step), target in COPY.items() if target is CopyState.OVER}
    assert ends == {(CopyState.DRAINING, CopyStep.DRAINED)}


@pytest.mark.parametrize("state", [CopyState.QUEUED, CopyState.RUNNING])
def test_a_sender_can_always_give_up(state):
    assert COPY[state, CopyStep.GIVE_UP] is CopyState.DRAINING


def test_room_that_may_be_written_is_free_only_after_let_go_or_a_fence():
    """Invariant 3."""
    freeing = {step for (state, step), target in PUSH.items() if state in MAY_BE_WRITTEN and target is PushState.OVER}
    assert freeing == {PushStep.LET_GO, PushStep.FENCED}
    assert PUSH[PushState.LANDING, PushStep.LOST] is PushState.CLOSING
    assert (PushState.LANDING, PushStep.FENCED) not in PUSH


def test_who_waits_for_room_holds_none():
    assert PUSH[PushState.QUEUED, PushStep.LOST] is PushState.OVER


@pytest.mark.parametrize("state", [state for state in PushState if state is not PushState.OVER])
def test_a_receiver_takes_what_its_peer_does_in_every_state(state):
    assert (state, PushStep.LET_GO) in PUSH
    assert (state, PushStep.LOST) in PUSH or state is PushState.CLOSING


@given(st.sampled_from(list(TABLES.values())), st.data())
def test_every_walk_ends_over(side, data):
    table, states, _, state = side
    seen = [state]
    while choices := sorted(step for before, step in table if before is state):
        state = table[state, data.draw(st.sampled_from(choices))]
        seen.append(state)
    assert state is states.OVER
    assert len(seen) == len(set(seen)) <= len(states)


@given(st.lists(st.sampled_from(PushStep), max_size=20))
def test_a_receiver_that_granted_never_ends_before_let_go_or_a_fence(steps):
    state, taken = PushState.QUEUED, []
    for step in steps:
        target = PUSH.get((state, step))
        if target is None:
            continue
        taken.append(step)
        state = target
    if state is PushState.OVER and PushStep.GRANT in taken:
        assert taken[-1] in (PushStep.LET_GO, PushStep.FENCED)
