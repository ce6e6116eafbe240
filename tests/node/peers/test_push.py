"""The life of a push on both sides: no room is given back while it may still be written, and everything ends."""

from __future__ import annotations

from pdx.node.peers.inbound_push import PUSH, PushState, PushStep
from pdx.store.copy import COPY, CopyState, CopyStep

MAY_BE_WRITTEN = {PushState.LANDING, PushState.CLOSING}


def test_room_that_may_be_written_is_free_only_after_let_go_or_a_fence():
    """Invariant 3; and the sender says that it let go only when nothing reads its memory any more."""
    ends = {(state, step) for (state, step), target in COPY.items() if target is CopyState.OVER}
    assert ends == {(CopyState.DRAINING, CopyStep.DRAINED)}
    freeing = {step for (state, step), target in PUSH.items() if state in MAY_BE_WRITTEN and target is PushState.OVER}
    assert freeing == {PushStep.LET_GO, PushStep.FENCED}
    assert PUSH[PushState.LANDING, PushStep.LOST] is PushState.CLOSING
    assert (PushState.LANDING, PushStep.FENCED) not in PUSH
