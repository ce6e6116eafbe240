"""Requests of several cache groups whose engine has an arena of its own: host memory stands for its GPU's."""

import pytest
from groups_stage import FULL, STATE, WINDOW, GroupsStage
from service_stage import CHUNKS, Clock, serving

from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.store.eviction import LEAST
from pdx.store.history import Cause
from pdx.testing.waiting import wait_until

OWN = (1,)  # the arena of the engine


@pytest.fixture
def prompt(place):
    with Arena.create(place / "other", CHUNKS * GRANULE_BYTES) as other, serving(place, Clock(), [other]) as service:
        prompt = GroupsStage(service, [FULL, WINDOW, STATE], 6)
        prompt.worker.home = prompt.engine.home = 1
        yield prompt
        settle(prompt)
        prompt.assert_idle()


def settle(prompt, tier=None):
    """Until no copy is under way: the answers that came."""
    answers = []

    def is_idle():
        prompt.service.env.mailbox.deliver()
        answers.extend(prompt.turn())
        if tier is not None:
            tier.end()
        return not (len(prompt.service.copies) or prompt.service.copies.landed)

    wait_until(is_idle)
    return [*answers, *prompt.turn(), *prompt.turn()]


def of_arena(prompt, arena):
    """Which (group, chunk) it has."""
    found = prompt.service.store.find
    return [place for place in places(prompt) if found([prompt.key(*place)], 1, (arena,))]


def places(prompt):
    return [(group, chunk) for group in range(3) for chunk in range(6)]


def forget(prompt, arena, gone):
    """Those in one arena go."""
    store = prompt.service.store
    chunks = [chunk for place in gone for chunk in store.index.of(prompt.key(*place), 1, (arena,))]
    for chunk in chunks:
        store.pools[arena].drop(chunk, Cause.DELETED)


@pytest.fixture
def stored(prompt):
    """All of it is in both arenas."""
    prompt.store()
    settle(prompt)
    assert of_arena(prompt, 0) == of_arena(prompt, 1) == places(prompt)
    return prompt


def test_what_is_needed_comes_from_the_other_arena(stored):
    forget(stored, 1, places(stored))
    assert stored.ask(wait_s=10.0) is None
    (answer,) = settle(stored)
    assert (answer.hits, {slot.arena for slot in answer.slots}) == (6, {1})
    assert of_arena(stored, 1) == stored.needs(6)
    stored.release(answer)


def test_what_a_prompt_has_passed_is_worth_the_least_in_both(prompt):
    answer = prompt.ask_room()
    prompt.fill(answer.granted_slots)
    prompt.release(answer)
    settle(prompt)
    passed = {(1, 0), (1, 1), (1, 2), *((2, chunk) for chunk in range(4))}
    for arena in (0, 1):
        chunks = prompt.service.store.index.slots[arena].values()
        assert set(prompt.named([each.key for each in chunks if each.level == LEAST])) == passed


def test_nothing_is_copied_that_the_rest_is_missing_for(stored):
    forget(stored, 1, places(stored))
    forget(stored, 0, [(2, chunk) for chunk in range(6)])
    answer = stored.ask(wait_s=10.0)
    assert (answer.hits, answer.waiting) == (0, False)
    assert not of_arena(stored, 1)


def test_the_other_arena_and_a_tier_below_together(stored):
    """Of what is missing, part of each group is in the host's arena and part below it, one after the other."""
    tier = stored.below()
    forget(stored, 1, places(stored))
    gone = [(0, 1), (0, 3), (1, 5), (2, 5)]
    forget(stored, 0, gone)
    tier.keys |= {stored.key(*place) for place in gone}
    assert stored.ask(wait_s=10.0) is None
    (answer,) = settle(stored, tier)
    assert (answer.hits, {slot.arena for slot in answer.slots}) == (6, {1})
    stored.release(answer)
