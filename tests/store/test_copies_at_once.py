"""Copies of one chunk to several tiers that are under way at the same time. The tiers are fakes of `below_stage`."""

import itertools

import pytest
from below_stage import DictTier, Stage, key

from pdx.memory.arena import GRANULE_BYTES

TIERS = 3


@pytest.fixture
def stage(tmp_path):
    """With several levels below."""
    stage = Stage(tmp_path)
    stage.all = [stage.tier, *(DictTier(stage.arena, lambda: stage.copies) for _ in range(TIERS - 1))]
    for number, tier in enumerate(stage.all[1:]):
        tier.name = f"below-{number}"
        stage.tiers.below.append([tier])
    yield stage
    end_all(stage)
    stage.assert_idle()
    stage.check()
    stage.close()


def end_all(stage):
    while any(tier.jobs for tier in stage.all):
        for tier in stage.all:
            while tier.jobs:
                tier.end()
        stage.turn()


@pytest.mark.parametrize("order", list(itertools.permutations(range(TIERS))))
@pytest.mark.parametrize("fails", range(-1, TIERS))
def test_a_chunk_is_stored_from_one_slot_that_stays_until_the_last_tier_has_it(stage, order, fails):
    free = stage.store.free_bytes
    stage.save([0])
    [slot] = {part.slot for tier in stage.all for _, job in tier.jobs for part in job.parts}
    assert [len(tier.jobs) for tier in stage.all] == [1] * TIERS
    assert stage.store.free_bytes == free - GRANULE_BYTES, "one buffer serves all"
    [chunk] = stage.store.find([key(0)], 1)[0]
    assert chunk.leases == TIERS
    stage.forget([0])
    for at in order:
        assert (stage.store.free_bytes, stage.arena.check(slot)) == (free - GRANULE_BYTES, None)
        stage.all[at].end(fails=at == fails)
        stage.turn()
    assert stage.store.free_bytes == free
    assert [len(tier.chunks) for tier in stage.all] == [at != fails for at in range(TIERS)]


def test_a_chunk_is_evicted_when_the_last_tier_has_it_and_not_before(stage):
    stage.save([0])
    stage.save(range(1, 20))
    for tier in stage.all[:-1]:
        while tier.jobs:
            tier.end()
        stage.turn()
        assert stage.hits([0]) == 1
        stage.save(range(20, 40))
        assert stage.hits([0]) == 1, "one tier still reads it"
    end_all(stage)
    stage.save(range(40, 60))
    assert stage.hits([0]) == 0
