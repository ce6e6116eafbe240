"""The life of a slot: nothing is given to another while somebody may still use it, and everything ends free."""

import pytest

from pdx.store.lifecycle import TRANSITIONS, State, Step

WRITER_MAY_WRITE = {State.FILLING, State.QUARANTINED}
READER_MAY_READ = {State.RETIRED}


def test_every_state_and_step_is_used():
    assert {state for state, _ in TRANSITIONS} == set(State) == set(TRANSITIONS.values())
    assert {step for _, step in TRANSITIONS} == set(Step)


def test_memory_a_writer_may_write_is_freed_only_when_it_lets_go():
    frees = {(state, step) for (state, step), after in TRANSITIONS.items() if after is State.FREE}
    assert {step for state, step in frees if state in WRITER_MAY_WRITE} == {Step.LET_GO}


def test_memory_a_reader_may_read_is_freed_only_when_it_is_unleased():
    frees = {(state, step) for (state, step), after in TRANSITIONS.items() if after is State.FREE}
    assert {step for state, step in frees if state in READER_MAY_READ} == {Step.UNLEASED}


@pytest.mark.parametrize("state", [state for state in State if state not in (State.FREE, State.RETIRED)])
def test_whatever_somebody_reads_is_retired_before_it_is_free(state):
    """A push reads chunks that are filled, a lease those that are sealed."""
    assert TRANSITIONS[state, Step.DELETE] is State.RETIRED
    assert {step for before, step in TRANSITIONS if before is State.RETIRED} == {Step.UNLEASED}


def test_only_a_filling_chunk_is_sealed_and_a_sealed_one_never_filled_again():
    assert [state for (state, _), after in TRANSITIONS.items() if after is State.SEALED] == [State.FILLING]
    reachable = _reachable(State.SEALED)
    assert not reachable & WRITER_MAY_WRITE


def test_a_slot_is_reserved_only_when_it_is_free():
    assert [state for state, step in TRANSITIONS if step is Step.RESERVE] == [State.FREE]


@pytest.mark.parametrize("state", list(State))
def test_every_state_reaches_free(state):
    steps = {after for (before, _), after in TRANSITIONS.items() if before is state}
    assert State.FREE in steps | set().union(*map(_reachable, steps))


def _reachable(state):
    """The states after `state`, in the same life."""
    found, todo = set(), [state]
    while todo:
        now = todo.pop()
        for (before, _), after in TRANSITIONS.items():
            if before is now and after not in found:
                found.add(after)
                if after is not State.FREE:
                    todo.append(after)
    return found
