"""The life of a slot: nothing is given to another while somebody may still use it, and everything ends free."""

from pdx.store.lifecycle import TRANSITIONS, WRITABLE, State, Step


def test_every_state_and_step_is_used():
    assert {state for state, _ in TRANSITIONS} == set(State) == set(TRANSITIONS.values())
    assert {step for _, step in TRANSITIONS} == set(Step)


def test_memory_is_freed_only_when_its_writer_lets_go_and_its_last_reader_is_done():
    frees = {(state, step) for (state, step), after in TRANSITIONS.items() if after is State.FREE}
    assert {step for state, step in frees if state in WRITABLE} == {Step.LET_GO}
    assert {step for before, step in TRANSITIONS if before is State.RETIRED} == {Step.UNLEASED}
    for state in set(State) - {State.FREE, State.RETIRED}:  # a push reads chunks that are filled, a lease sealed ones
        assert TRANSITIONS[state, Step.DELETE] is State.RETIRED


def test_only_a_free_slot_is_reserved_only_a_filling_one_sealed_and_a_sealed_one_never_filled_again():
    assert [state for state, step in TRANSITIONS if step is Step.RESERVE] == [State.FREE]
    assert [state for (state, _), after in TRANSITIONS.items() if after is State.SEALED] == [State.FILLING]
    assert not _reachable(State.SEALED) & WRITABLE


def test_every_state_reaches_free():
    assert all(State.FREE in _reachable(state) for state in State)


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
