"""The life of a push on both sides: no room is given back while it may still be written, and everything ends."""

from __future__ import annotations

import pytest

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


def test_room_that_may_be_written_is_free_only_after_let_go_or_a_fence():
    """Invariant 3; and the sender says that it let go only when nothing reads its memory any more."""
    ends = {(state, step) for (state, step), target in COPY.items() if target is CopyState.OVER}
    assert ends == {(CopyState.DRAINING, CopyStep.DRAINED)}
    freeing = {step for (state, step), target in PUSH.items() if state in MAY_BE_WRITTEN and target is PushState.OVER}
    assert freeing == {PushStep.LET_GO, PushStep.FENCED}
    assert PUSH[PushState.LANDING, PushStep.LOST] is PushState.CLOSING
    assert (PushState.LANDING, PushStep.FENCED) not in PUSH
