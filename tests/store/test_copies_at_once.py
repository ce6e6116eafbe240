"""Copies of one chunk to several tiers, and of several chunks of one prompt, that are under way at the same time.

The tiers are the fakes of test_tiers, and a real disk.
"""

import contextlib
import itertools

import pytest
from disk_bed import Bed
from test_tiers import DictTier, Stage, key

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


def test_all_chunks_of_a_prompt_are_loaded_at_the_same_time(stage):
    stage.save(range(6))
    end_all(stage)
    stage.forget(range(6))
    assert stage.may_come(range(6))
    assert len(stage.tier.jobs) == 6
    for _ in range(6):
        stage.end(-1)  # whichever order they come in
    assert stage.hits(range(6)) == 6


def test_a_disk_has_several_reads_of_a_prompt_under_way(tmp_path, gate):
    with contextlib.closing(Bed(tmp_path, slots=10)) as bed:
        for number in range(4):
            assert bed.store(number)
        read = gate("read")
        copies = [bed.start_load(number, at=number + 1) for number in range(4)]
        for _ in copies:
            assert read.arrived.acquire(timeout=60), "a read waits for another one"
        assert not bed.over.keys() & {copy.number for copy in copies}
        read.open()
        assert [bed.end(copy) for copy in copies] == [None] * 4
