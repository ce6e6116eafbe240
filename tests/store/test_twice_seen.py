"""What is stored when it is seen for the second time (`--store twice-seen`): found in memory, or computed again.

The tier is the fake of `below_stage`.
"""

import pytest
from below_stage import GRANULE_BYTES, GRANULES, LAYERS, WRITER, Stage, key

from pdx.store import history
from pdx.store.chunk import Claim
from pdx.store.policies.by_name import find

OTHERS = range(100, 100 + GRANULES)


@pytest.fixture
def policy(request):
    return getattr(request, "param", "lru")


@pytest.fixture
def stage(tmp_path, policy):
    stage = Stage(tmp_path, choice="twice-seen", policy=find(policy, lambda: stage.now))
    yield stage
    stage.assert_idle()
    stage.check()
    stage.close()


def found(stage, numbers, shards=1):
    for chunks in stage.store.find([key(number) for number in numbers], shards):
        stage.tiers.storing.found_by_request(chunks)
    stage.turn()


def stored(stage):
    stage.end_all()
    return sorted({int(name) for name, _ in stage.tier.chunks})


def test_what_is_seen_once_is_not_stored(stage):
    stage.save(range(4))
    stage.save(OTHERS)
    assert stage.hits([0]) == 0
    assert stored(stage) == []


def test_what_is_found_in_memory_is_stored_once(stage):
    stage.save(range(4))
    found(stage, [0, 1])
    assert stored(stage) == [0, 1]
    found(stage, [0, 1])
    assert not stage.tier.jobs


def test_what_left_memory_and_is_computed_again_is_stored_then(stage):
    stage.save(range(2))
    stage.save(OTHERS)
    stage.save([0, 2])
    assert len(stage.tier.jobs) == 1, "without a request that finds it there"
    assert stored(stage) == [0]
    found(stage, [0])
    assert not stage.tier.jobs, "once"


def test_all_shards_of_it_are_stored(stage):
    stage.save([0], shards=2)
    stage.save(OTHERS)
    stage.save([0], shards=2)
    stage.end_all()
    assert set(stage.tier.chunks) == {(key(0), 0), (key(0), 1)}


def test_what_was_deleted_is_new_again(stage):
    stage.save([0])
    stage.forget([0])
    stage.save([0])
    assert stored(stage) == []


def test_what_a_writer_gave_up_was_not_seen(stage):
    claim = Claim(keys=[key(0)], nbytes=GRANULE_BYTES, layers=LAYERS, owner=WRITER, writers=[WRITER], partial=True)
    _, slots, _ = stage.store.reserve(claim)
    stage.store.let_go([stage.store.at(slot) for slot in slots])
    stage.save([0])
    assert stored(stage) == []


def test_what_is_gone_for_too_long_is_new_again(stage, monkeypatch):
    monkeypatch.setattr(history, "MAX_GONE", 2)
    stage.save(range(4))
    stage.save(OTHERS)
    stage.save(range(4))
    assert stored(stage) == []


@pytest.mark.parametrize("policy", ["age:60"], indirect=True)
def test_what_became_too_old_and_is_computed_again_is_stored(stage):
    stage.save([0])
    stage.now += 61
    stage.store.expire()
    assert stage.hits([0]) == 0
    stage.save([0])
    assert stored(stage) == [0]
