"""What is stored when it is among the next to be evicted (`--store write-back`), with every policy.

The tier is the fake of `below_stage`.
"""

import contextlib
import tempfile
from collections import Counter

import pytest
from below_stage import GRANULES, Stage, key
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_models import MODELS, ROOM
from steps import calls_run

from pdx.store import storing
from pdx.store.history import Cause
from pdx.store.policies.by_name import find


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path, choice="write-back", window=4 / GRANULES)
    yield stage
    stage.assert_idle()
    stage.check()
    stage.close()


def look(stage):
    stage.tiers.storing.look_ahead()
    stage.turn()


def stored(stage):
    stage.end_all()
    return sorted(int(name) for name, _ in stage.tier.chunks)


def use(stage, number):
    lease = stage.store.lease(stage.store.find([key(number)], 1)[0], 7, 10.0)
    stage.store.release(lease, 7)


def test_nothing_is_stored_while_there_is_room(stage):
    for number in range(GRANULES - 4):
        stage.save([number])
        look(stage)
    assert not stage.tier.jobs


def test_what_goes_next_is_stored_before_it_goes_and_nothing_else(stage):
    for number in range(GRANULES):
        stage.save([number])
        look(stage)
    assert stored(stage) == [0, 1, 2, 3]
    look(stage)
    look(stage)
    assert stored(stage) == [0, 1, 2, 3], "once, and the others do not take their places"
    stage.save([16, 17])
    assert stored(stage) == [0, 1, 2, 3, 4, 5], "who evicts sees to what goes next, without a look in between"
    assert stage.hits([0]) == stage.hits([1]) == 0
    assert stage.hits([2]) == 1, "what is stored is here until its room is needed"
    assert stage.store.counters["evicted_unstored"] == 0
    assert stage.may_come([0, 1])
    stage.end_all()
    assert stage.hits([0, 1]) == 2
    look(stage)
    assert 0 not in [int(job.parts[0].key) for verb, job in stage.tier.jobs if verb == "store"]


def test_what_is_used_while_it_is_stored_goes_later(stage):
    for number in range(GRANULES):
        stage.save([number])
    look(stage)
    use(stage, 1)
    stage.end_all()
    use(stage, 0)
    stage.save([20, 21])
    assert [stage.hits([number]) for number in range(5)] == [1, 1, 0, 0, 1]
    stage.end_all()


def test_more_than_the_window_at_once_is_counted(stage):
    stage.save(range(GRANULES))
    look(stage)
    stage.end_all()
    stage.save(range(20, 26))
    assert stage.store.counters["evicted"] == 6
    assert stage.store.counters["evicted_unstored"] == 2


def test_a_look_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(storing, "MAX_LOOKS", 3)
    stage.save(range(GRANULES))
    assert stored(stage) == [13, 14, 15]
    for _ in range(3):
        look(stage)
    assert stored(stage) == [13, 14, 15]
    stage.save([20])
    assert stored(stage) == [12, 13, 14, 15], "the others follow when those are gone"


@pytest.mark.parametrize("choice", ["all", "twice-seen", "write-back"])
def test_what_a_tier_has_removed_is_stored_again_before_it_leaves_memory(tmp_path, choice):
    with contextlib.closing(Stage(tmp_path, choice=choice, window=4 / GRANULES)) as stage:
        stage.save(range(GRANULES))
        for number in range(GRANULES):
            stage.tiers.storing.found_by_request(stage.store.find([key(number)], 1)[0])
        look(stage)
        stage.end_all()
        before = sorted(int(name) for name, _ in stage.tier.chunks)
        assert {12, 13, 14, 15} <= set(before)
        for number in (3, 14):
            stage.tier.chunks.pop((key(number), 0), None)
            stage.tiers.storing.removed([key(number)])
        assert not stage.store.find([key(14)], 1)[0][0].is_stored
        look(stage)
        assert stored(stage) == [number for number in before if number != 3], "the other has time"
        for number in range(20, 32):
            stage.save([number])
            look(stage)
            stage.end_all()
        assert 3 in stored(stage)
        assert stage.store.counters["evicted_unstored"] == 0
        with calls_run() as calls:
            stage.tiers.storing.look_ahead()
        looks = [name for _, name in calls if name == "EvictionOrder.peek"]
        assert bool(looks) == (choice == "write-back"), "nothing is looked for that is stored"


@pytest.mark.parametrize("choice", ["all", "twice-seen", "write-back"])
def test_what_a_tier_had_and_has_removed_is_not_said_to_have_been_kept_from_it(tmp_path, choice):
    with contextlib.closing(Stage(tmp_path, choice=choice, window=1 / GRANULES)) as stage:
        stage.save([0])
        stage.tiers.storing.found_by_request(stage.store.find([key(0)], 1)[0])
        stage.save(range(1, GRANULES))
        look(stage)
        stage.end_all()
        assert (key(0), 0) in stage.tier.chunks
        stage.tier.evict([key(0)])
        stage.tier.history.note([key(0)], Cause.REMOVED, stage.now)
        stage.tiers.storing.removed([key(0)])
        stage.save(range(20, 20 + GRANULES))  # it leaves memory before its turn comes again
        gone = stage.store.history.why(key(0))
        assert not gone.is_stored
        assert list(stage.tiers.explain_missing(key(0), gone, is_named=False)) == [
            ("evicted", "below: removed to make room, 0.0 s ago")
        ]
        stage.end_all()


@pytest.mark.parametrize("choice", ["all", "twice-seen", "write-back"])
def test_a_tier_smaller_than_the_window_is_not_written_to_all_the_time(tmp_path, choice):
    stage = Stage(tmp_path, choice=choice, window=8 / GRANULES)
    held = []

    def turn():
        look(stage)
        while stage.tier.jobs:
            held.append(stage.tier.jobs[0][1].parts[0].key)
            stage.end()
            while len(stage.tier.chunks) > 3:
                oldest = next(iter(stage.tier.chunks))
                del stage.tier.chunks[oldest]
                stage.tiers.storing.removed([oldest[0]])
            stage.turn()

    try:
        stage.save(range(GRANULES))
        for number in range(GRANULES):
            stage.tiers.storing.found_by_request(stage.store.find([key(number)], 1)[0])
        for _ in range(20):
            turn()
        before = len(held)
        assert max(Counter(held).values()) == 2, "once, and once again, as it may leave memory soon"
        for _ in range(20):
            turn()
        assert len(held) == before
        chunks = [chunk for number in range(GRANULES) for [chunk] in stage.store.find([key(number)], 1)]
        chunk = next(each for each in chunks if each.is_stored_again and not each.is_stored)
        stage.tiers.storing.found_by_request([chunk])
        turn()
        assert held[before:].count(chunk.key) == 1, "what a request has found since is worth it again"
    finally:
        stage.close()


@pytest.mark.parametrize("name", MODELS)
@given(accesses=st.lists(st.integers(0, 25), max_size=80), window=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_storing_ahead_changes_nothing_of_what_goes(tmp_path, name, window, accesses):
    with contextlib.closing(
        Stage(tempfile.mkdtemp(dir=tmp_path), granules=ROOM, policy=find(name), choice="write-back", window=window)
    ) as stage:
        found = []
        for number in accesses:
            there = stage.hits([number]) == 1
            found.append(there)
            if there:
                stage.store.touch(stage.store.find([key(number)], 1)[0])
            else:
                stage.save([number])
            look(stage)
            stage.end_all()
        assert found == list(MODELS[name](accesses))
        assert window < 1.0 or name == "s3fifo" or stage.store.counters["evicted_unstored"] == 0
