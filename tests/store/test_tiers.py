"""Copies between an arena and a tier below it, against a model: what is hit is right, and nothing is left behind.

The tier is the fake of `below_stage`.
"""

import tempfile

import pytest
from below_stage import GRANULES, LAYERS, WRITER, DictTier, Stage, key, pattern
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from steps import calls_run
from traced import traced

from pdx.memory.arena import GRANULE_BYTES
from pdx.store.chunk import NODE, Claim
from pdx.store.copy import Priority


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    stage.assert_idle()
    stage.check()
    stage.close()


def test_what_is_sealed_is_stored_below_and_comes_back(stage):
    stage.save([0, 1, 2])
    assert [verb for verb, _ in stage.tier.jobs] == ["store"] * 3
    stage.end_all()
    stage.forget([0, 1, 2])
    assert stage.hits([0, 1, 2]) == 0
    assert stage.may_come([0, 1, 2, 3])
    assert stage.hits([0, 1, 2]) == 0, "not before it is there"
    stage.end()
    assert stage.hits([0, 1, 2]) == 1
    assert stage.may_come([0, 1, 2, 3]), "the others are on their way"
    stage.end_all()
    assert stage.hits([0, 1, 2]) == 3
    assert not stage.may_come([0, 1, 2, 3])
    assert stage.counters["below_loaded_bytes"] == 3 * GRANULE_BYTES


def test_all_shards_are_stored_and_loaded(stage):
    stage.tier.changed = {}
    stage.save([0, 1], shards=2)
    assert stage.tier.changed == {}
    stage.end_all()
    assert set(stage.tier.chunks) == {(key(n), shard) for n in (0, 1) for shard in (0, 1)}
    assert stage.tier.changed == {key(0): 2, key(1): 2}
    stage.forget([0, 1])
    assert stage.may_come([0, 1], shards=2)
    stage.end()
    assert stage.hits([0, 1], shards=2) == 0, "one shard is not a chunk"
    stage.end_all()
    assert stage.hits([0, 1], shards=2) == 2


def test_two_that_want_the_same_wait_for_one_load(stage):
    stage.save([0, 1])
    stage.end_all()
    stage.forget([0, 1])
    assert stage.may_come([0, 1])
    assert stage.may_come([0, 1])
    assert stage.may_come([1]), "it is on its way for others"
    assert [verb for verb, _ in stage.tier.jobs] == ["load", "load"]


def test_what_is_loaded_is_not_stored_again(stage):
    stage.save([0])
    stage.end_all()
    stage.forget([0])
    stage.may_come([0])
    stage.end()
    assert stage.hits([0]) == 1
    assert not stage.tier.jobs


def test_a_load_that_is_too_late_gives_its_room_back_when_nothing_writes_it_any_more(stage):
    stage.save([0])
    stage.end_all()
    stage.forget([0])
    free = stage.store.free_bytes
    assert stage.may_come([0])
    stage.now += 6
    stage.tiers.storing.changed(stage.store.expire())
    stage.copies.tick(stage.now)
    stage.turn()
    assert stage.store.free_bytes < free, "the tier may still write there"
    assert not stage.may_come([0])
    stage.end()
    assert (stage.hits([0]), stage.store.free_bytes) == (0, free)
    assert stage.counters["copies_late"] == 1


def test_the_beginning_of_a_prompt_is_not_evicted_for_its_end(tmp_path):
    stage = Stage(tmp_path, granules=4)
    for number in range(6):
        stage.save([number])
        stage.end_all()
    assert sorted(name for name, _ in stage.tier.chunks) == [key(number) for number in range(6)]
    assert stage.hits([5]) == 1
    stage.forget([2, 3, 4, 5])
    assert stage.may_come([0, 1, 2, 3, 4, 5])
    stage.end_all()
    hits = stage.hits([0, 1, 2, 3, 4, 5])
    assert hits == 4, "as much of the beginning as there is room for"
    assert not stage.may_come([0, 1, 2, 3, 4, 5])
    assert stage.counters["loads_without_room"]
    stage.assert_idle()
    stage.close()


def test_a_tail_is_never_stored(stage):
    claim = Claim(
        keys=[key(0)],
        nbytes=GRANULE_BYTES,
        layers=LAYERS,
        owner=WRITER,
        writers=[WRITER],
        tail_nbytes=GRANULE_BYTES,
        transfer="t" * 16,
    )
    _, slots, _ = stage.store.reserve(claim)
    stage.arena.view(slots[0])[:] = pattern(key(0), 0)
    chunks = stage.store.fill(slots, 0, LAYERS, WRITER)
    stage.store.seal(chunks)
    stage.tiers.storing.changed(chunks)
    stage.turn()
    assert not stage.tier.jobs


def held(stage):
    return sum(chunk.leases > 0 for chunk in stage.store.index.slots[0].values())


@pytest.mark.parametrize("more_granules", [0, 100 * GRANULES])
def test_stores_that_nobody_waits_for_hold_a_bounded_part_of_the_arena_where_they_lie(tmp_path, more_granules):
    stage = Stage(tmp_path, more_granules=more_granules)
    stage.save(list(range(GRANULES)))
    assert len(stage.tier.jobs) == held(stage) == GRANULES // 4
    while stage.tier.jobs:
        stage.end()
        assert held(stage) <= GRANULES // 4
    assert len(stage.tier.chunks) == GRANULES, "what had to wait is stored as soon as there is room"
    assert not stage.counters["stores_dropped"]
    stage.assert_idle()
    stage.close()


def test_what_is_evicted_before_its_turn_is_not_stored_and_counts(stage):
    stage.save(list(range(GRANULES)))
    stage.forget(range(8, GRANULES))
    stage.end_all()
    assert len(stage.tier.chunks) == 8
    assert stage.counters["stores_dropped"] == stage.tier.tally.dropped == GRANULES - 8


def test_what_waits_to_be_stored_is_bounded(stage, monkeypatch):
    monkeypatch.setattr("pdx.store.storing.MAX_WAITING", 6)
    stage.save(list(range(GRANULES)))
    assert stage.counters["stores_dropped"] == GRANULES - GRANULES // 4 - 6
    stage.end_all()
    assert len(stage.tier.chunks) == GRANULES // 4 + 6


def test_a_chunk_that_alone_is_more_than_that_part_goes_alone(tmp_path):
    stage = Stage(tmp_path, granules=2)
    stage.save([0])
    stage.save([1])
    assert len(stage.tier.jobs) == held(stage) == 1
    stage.end()
    assert len(stage.tier.jobs) == held(stage) == 1
    stage.end()
    assert len(stage.tier.chunks) == 2
    assert not stage.counters["stores_dropped"]
    stage.assert_idle()
    stage.close()


def test_chunks_of_another_number_of_shards_take_turns(stage):
    """What one engine seals without end keeps nothing of another engine from the tier."""
    stage.save(list(range(12)))
    stage.save([12, 13], shards=2)
    stored = []
    while stage.tier.jobs:
        stored.append(stage.tier.jobs[0][1].parts[0].key)
        stage.end()
    assert stored.index(key(12)) < stored.index(key(13)) < stored.index(key(11))


def test_a_store_that_is_late_keeps_no_load_from_the_tier(stage):
    stage.save([0])
    stage.end_all()
    stage.forget([0])
    stage.tier.max_inflight_bytes = 0
    stage.save([1, 2])
    stage.now += 21
    stage.copies.tick(stage.now)
    assert stage.counters["copies_late"] == 1
    stage.tier.max_inflight_bytes = GRANULE_BYTES
    assert stage.may_come([0])


def test_what_is_sealed_before_a_tier_takes_stores_is_stored_when_it_does(stage):
    stage.tier.takes_stores = False
    stage.save([0, 1])
    assert not stage.tier.jobs
    assert held(stage) == 0
    stage.tier.takes_stores = True
    stage.turn()
    stage.end_all()
    assert len(stage.tier.chunks) == 2


def test_what_waits_to_be_stored_costs_nothing_while_there_is_no_room(stage):
    stage.save(list(range(GRANULES)))
    with calls_run() as calls:
        stage.turn()
    assert not [name for file, name in calls if file.endswith("store/index.py")], "no chunk is looked at"


def test_what_is_over_leaves_nothing(stage):
    stage.save([0])
    stage.end_all()
    with traced() as held:
        for number in range(300):
            tier = DictTier(stage.arena, lambda: stage.copies)  # one among peers that come and go
            stage.copies.store(
                tier, [key(0)], 1, priority=Priority.HANDOFF, deadline=stage.now + 1, transfer=f"transfer {number}"
            )
            stage.copies.pump()
            stage.copies.changed(stage.store.find([key(0)], 1)[0])
            if number % 2:
                stage.copies.cancel(f"transfer {number}")
            tier.end()
        del tier
        assert held() < 50_000


def test_one_chunk_that_cannot_be_loaded_costs_none_of_the_others(stage):
    stage.save(list(range(4)))
    stage.end_all()
    stage.forget(range(4))
    free = stage.store.free_bytes
    stage.tier.max_inflight_bytes = 2 * GRANULE_BYTES
    assert stage.may_come(list(range(4)))
    assert len(stage.tier.jobs) == 2
    del stage.tier.chunks[key(1), 0]
    stage.end(1)
    assert not stage.may_come([1]), "nobody waits for it any more"
    stage.end_all()
    assert [stage.hits([number]) for number in range(4)] == [1, 0, 1, 1]
    assert stage.store.free_bytes == free - 3 * GRANULE_BYTES
    assert stage.counters["jobs_failed"] == 1


def test_what_is_deleted_while_it_is_loaded_is_not_there_afterwards(stage):
    """A client's name says nothing of the bytes: the old ones must not come back under it."""
    stage.save([0, 1])
    stage.end_all()
    stage.forget([0, 1])
    free = stage.store.free_bytes
    assert stage.may_come([0, 1])
    stage.forget([0])
    assert stage.store.free_bytes < free, "the tier may still write there"
    stage.end_all()
    assert [stage.hits([number]) for number in (0, 1)] == [0, 1]
    assert stage.store.free_bytes == free - GRANULE_BYTES


def test_what_is_only_stored_leaves_room_for_what_somebody_waits_for(stage):
    """A slow disk that is busy with stores is still asked for the chunks that a request waits for."""
    stage.save([0])
    stage.end_all()
    stage.forget([0])
    stage.tier.max_inflight_bytes = 4 * GRANULE_BYTES
    stage.save([1, 2, 3, 4])
    assert [verb for verb, _ in stage.tier.jobs] == ["store", "store"]
    assert stage.may_come([0])
    assert [verb for verb, _ in stage.tier.jobs] == ["store", "store", "load"]


def test_jobs_go_in_the_order_of_priorities_whatever_was_begun_first(stage):
    begun = [*list(Priority)[2:], *list(Priority)[:2]]
    stage.tier.max_inflight_bytes = GRANULE_BYTES
    stage.save(list(range(10, 16)))
    stage.end_all()
    stage.tier.chunks.clear()
    stage.copies.store(stage.tier, [key(15)], 1, priority=Priority.REBALANCE, deadline=200.0)
    stage.copies.pump()
    for number, priority in enumerate(begun):
        stage.copies.store(stage.tier, [key(10 + number)], 1, priority=priority, deadline=200.0)
    order = []
    while stage.tier.jobs:
        ((_, job),) = stage.tier.jobs
        order.append(job.parts[0].key)
        stage.end()
    names = {key(10 + number): priority for number, priority in enumerate(begun)}
    assert order[0] == key(15), "it was under way"
    assert [names[name] for name in order[1:]] == sorted(Priority)


class Machine(RuleBasedStateMachine):
    """Any order of saves, losses, questions, ends and failures."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.stage = Stage(self.folder.name)

    numbers = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)

    @rule(numbers=numbers)
    def save(self, numbers):
        self.stage.save(numbers)

    @rule(first=st.integers(0, 6), count=st.integers(1, 5))
    def ask(self, first, count):
        self.stage.may_come(list(range(first, first + count)))

    @precondition(lambda self: self.stage.tier.jobs)
    @rule(at=st.integers(0, 30), fails=st.booleans())
    def end(self, at, fails):
        self.stage.end(at % len(self.stage.tier.jobs), fails=fails)

    @rule(numbers=numbers)
    def forget(self, numbers):
        self.stage.forget(numbers)
        self.stage.turn()

    @rule(numbers=numbers)
    def evict_below(self, numbers):
        self.stage.tier.evict([key(number) for number in numbers])

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds):
        self.stage.now += seconds
        late = self.stage.store.expire()
        self.stage.copies.changed(late)
        self.stage.copies.tick(self.stage.now)
        self.stage.turn()

    @rule()
    def lose(self):
        self.stage.copies.lost(self.stage.tier)
        self.stage.turn()

    @rule(number=st.integers(0, 9))
    def cancel_of_a_store(self, number):
        self.stage.copies.store(
            self.stage.tier, [key(number)], 1, priority=Priority.REBALANCE, deadline=self.stage.now + 3
        )
        self.stage.turn()

    @invariant()
    def hits_are_right(self):
        self.stage.check()

    def teardown(self):
        self.stage.assert_idle()
        self.stage.check()
        filling = [
            chunk
            for chunk in self.stage.store.index.slots[0].values()
            if chunk.writer == NODE and not chunk.is_complete
        ]
        assert not filling
        self.stage.close()
        self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
