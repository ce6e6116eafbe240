"""The states of a request, and the names of its blocks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from toy_engine import Request, layout

from pdx.engine.request import LOADING, TRANSITIONS, RequestKeys, State, Step, TrackedRequest

QUEUED = {State.WAITING, State.DECIDED}


@pytest.mark.parametrize("state", State)
def test_every_life_can_go_on(state: State) -> None:
    after = {step: TRANSITIONS[state, step] for step in Step if (state, step) in TRANSITIONS}
    assert after, "it leads somewhere"
    if state is State.LEFT_OUT:
        assert set(after.values()) == {state}
        return
    assert (Step.LOADED in after) == (state in LOADING), "a load that was begun ends once"
    assert (Step.PREEMPT in after) == (state not in (*QUEUED, *LOADING)), "blocks are not taken from a load"
    assert after[Step.VOID] in (State.WAITING, State.VOID, State.LOADING_VOID), "nothing old is saved"
    assert after[Step.VOID] in QUEUED or TRANSITIONS.get((after[Step.VOID], Step.RUN)) in (State.VOID, None)


def test_a_step_that_is_not_in_the_table_is_refused_and_requests_are_counted_by_state() -> None:
    counts = Counter[State]()
    request, other = (
        TrackedRequest(Request(name, [1]), layout(), None, b"", counts=counts) for name in ("first", "second")
    )
    for step in (Step.DECIDE, Step.LOAD, Step.VOID, Step.LOADED):
        request.step(step)
    assert +counts == {State.VOID: 1, State.WAITING: 1}
    with pytest.raises(KeyError):
        request.step(Step.LOADED)
    request.step(Step.PREEMPT)
    for each in (request, other):
        each.end()
    assert not +counts


def test_a_blocks_name_is_the_end_of_its_hash() -> None:
    """So that others who read vLLM's events know them."""
    request = cast(Any, SimpleNamespace(block_hashes=[bytes(range(32)), b"short"]))
    names = RequestKeys(request, layout(), b"").block_names(0, 2)
    assert (names[:16], names[16:]) == (bytes(range(16, 32)), b"\0" * 11 + b"short")
    assert int.from_bytes(names[8:16], "big") == int.from_bytes(bytes(range(32)), "big") & (1 << 64) - 1
