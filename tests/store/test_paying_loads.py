"""What is loaded from a tier, and what is computed because that is faster, by what was measured of both (invariant 10).

The tier is the fake of `below_stage`: its jobs say themselves how long they took.
"""

import pytest
from below_stage import DictTier, Stage, key, pattern
from steps import calls_run

from pdx.memory.arena import GRANULE_BYTES
from pdx.store import copy, paying, tiers
from pdx.store.chunk import Wanted
from pdx.store.paying import Computing
from pdx.telemetry.rate import HALF_BYTES, HALF_NS, Rate

MS = 1_000_000


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    stage.ns = 0
    yield stage
    stage.assert_idle()
    stage.check()
    stage.close()


def load(stage, numbers, ms):
    """All jobs under way end, each after so many milliseconds."""
    while stage.tier.jobs:
        job = stage.tier.jobs[0][1]
        job.start_ns, stage.ns = stage.ns + 1, stage.ns + 1 + ms * MS
        job.end_ns = stage.ns
        stage.end()
    assert stage.hits(numbers) == len(numbers)


def ask(stage, numbers, chunk_s, backlog_s=0.0):
    """Whether a request waits for what is missing; a chunk is computed in so many seconds, behind others."""
    hits = stage.hits(numbers)
    may = stage.tiers.may_come(
        Wanted([key(number) for number in numbers], 1), hits, computing=Computing(chunk_s, backlog_s)
    )
    stage.turn()
    return may


def below(stage, numbers):
    """Only the tier has these."""
    stage.save(numbers)
    stage.end_all()
    stage.forget(numbers)


def measured(stage, ms):
    """A chunk was loaded in so many milliseconds."""
    below(stage, [99])
    assert stage.may_come([99])
    load(stage, [99], ms)
    stage.forget([99])


def test_of_a_tier_that_was_not_measured_everything_is_loaded(stage):
    below(stage, [0, 1])
    assert ask(stage, [0, 1], chunk_s=1e-6)
    load(stage, [0, 1], 1)


def test_what_an_engine_computes_before_counts(stage):
    measured(stage, 100)
    below(stage, [0])
    assert not ask(stage, [0], chunk_s=0.05, backlog_s=0.05)
    stage.end_all()
    stage.forget([0])
    assert ask(stage, [0], chunk_s=0.05, backlog_s=0.07)
    stage.end_all()


@pytest.mark.parametrize(("chunk_ms", "waits"), [(200, True), (130, True), (105, False), (50, False), (1, False)])
def test_what_takes_longer_to_load_than_to_compute_is_computed(stage, chunk_ms, waits):
    measured(stage, 100)
    below(stage, [0, 1, 2])
    assert bool(ask(stage, [0, 1, 2], chunk_s=chunk_ms / 1000)) is waits
    assert stage.counters["loads_not_worth"] == (0 if waits else 3)
    stage.end_all()


def test_what_others_load_from_the_tier_comes_first(stage):
    measured(stage, 100)
    below(stage, [0, 1, 2, 3, 4])
    assert ask(stage, [0, 1, 2, 3], chunk_s=0.15)
    assert not ask(stage, [4], chunk_s=0.15), "four are before it"
    assert ask(stage, [4], chunk_s=0.6)
    stage.end_all()


def test_bytes_that_are_loaded_are_not_waited_for_twice(stage):
    measured(stage, 100)
    below(stage, [0, 1, 2, 3])
    assert ask(stage, [0, 1, 2], chunk_s=0.15)
    assert stage.copies.queue(stage.tier).bytes_before(1 << 62) == 3 * GRANULE_BYTES
    stage.end()
    assert stage.copies.queue(stage.tier).bytes_before(1 << 62) == 2 * GRANULE_BYTES
    stage.end(fails=True)
    stage.end()
    assert stage.copies.queue(stage.tier).bytes_before(1 << 62) == 0


def test_now_and_then_one_chunk_is_loaded_that_nobody_waits_for(stage):
    measured(stage, 100)
    below(stage, [0, 1, 2])
    assert not ask(stage, [0, 1, 2], chunk_s=0.05)
    assert [job.parts[0].key for _, job in stage.tier.jobs] == [key(2)], "not the next one, for which it would wait"
    assert not ask(stage, [0, 1, 2], chunk_s=0.05)
    assert len(stage.tier.jobs) == 1
    job = stage.tier.jobs[0][1]
    job.start_ns, job.end_ns = stage.ns + 1, stage.ns + 2
    stage.end()
    stage.now += paying.PROBE_S
    stage.forget([2])
    for _ in range(5):  # each look counts as much as the slow load before it
        assert not ask(stage, [0, 1, 2], chunk_s=0.0051)
        while stage.tier.jobs:
            stage.ns += 10
            job = stage.tier.jobs[0][1]
            job.start_ns, job.end_ns = stage.ns, stage.ns + 1
            stage.end()
        stage.forget([2])
        stage.now += paying.PROBE_S
    assert ask(stage, [0, 1, 2], chunk_s=0.05), "it is faster now"
    stage.end_all()


def test_a_load_that_is_late_by_the_time_of_computing_is_given_up_and_is_a_measurement(stage):
    below(stage, [0, 1])
    assert ask(stage, [0, 1], chunk_s=0.5)
    stage.now += paying.LATE * 2 * 0.5 + 0.01
    stage.tiers.storing.changed(stage.store.expire())
    stage.copies.tick(stage.now)
    stage.turn()
    assert stage.counters["copies_late"] == 1
    rate = stage.tier.load_rate
    assert rate.is_known
    assert rate.gb_s == 0.0
    stage.now += 100.0
    assert not ask(stage, [0, 1], chunk_s=0.5), "not even after a while: nothing ever came"
    stage.end_all()


def late(stage, seconds):
    """So much time passes; what is late is given up."""
    stage.now += seconds
    stage.tiers.storing.changed(stage.store.expire())
    stage.copies.tick(stage.now)
    stage.turn()


def test_a_tier_that_brings_what_others_wait_for_is_not_slow(stage):
    """The load of a long prompt is late because there is much of it."""
    below(stage, [0, 1, 2, 3])
    assert stage.may_come([0, 1, 2])
    job = stage.tier.jobs[0][1]
    job.start_ns, job.end_ns = 1, 2
    stage.end()
    late(stage, 5.01)
    assert stage.counters["copies_late"] == 1
    assert stage.may_come([3])
    stage.end_all()
    assert stage.counters["loads_from_slow_tiers"] == 0


def test_a_tier_that_has_brought_nothing_in_time_is_left_alone_until_it_does(stage):
    below(stage, [0, 1, 2, 3])
    assert stage.may_come([0, 1])
    late(stage, 5.01)
    assert not stage.may_come([2])
    assert stage.counters["loads_from_slow_tiers"] == 1
    for _, job, *_ in list(stage.tier.jobs):
        job.start_ns, job.end_ns = int(100e9), int(stage.now * 1e9)
        stage.end(fails=True)  # it was given up, and its bytes have come
    assert stage.may_come([3])
    stage.end_all()


@pytest.mark.parametrize("chunk_s", [None, 100.0])
def test_a_load_is_cut_to_what_comes_in_time(stage, chunk_s):
    measured(stage, 1000)
    below(stage, range(8))
    assert stage.may_come(range(8)) if chunk_s is None else ask(stage, range(8), chunk_s)
    assert len(stage.tier.jobs) == 4, "five seconds, of a chunk a second, a tenth more"
    assert stage.counters["loads_cut"] == 4
    stage.end_all()
    assert stage.hits(range(8)) == 4


def test_the_queue_is_not_looked_through_for_each_chunk_of_a_load_that_is_cut(stage):
    """It has a place for each size of what is loaded: for 4,096 chunks that took longer than all the rest."""
    measured(stage, 10)
    stage.tier.chunks |= {(key(number), 0): pattern(key(number), 0) for number in range(600)}
    with calls_run() as calls:
        assert stage.may_come(range(600))
    assert stage.counters["loads_cut"] == 600 - 454, "five seconds, of ten milliseconds each, a tenth more"
    assert sum(count for (_, name), count in calls.items() if name == "CopyQueue.bytes_before") in range(1, 50)
    stage.end_all()


def test_of_a_tier_that_brings_no_chunk_in_time_one_is_tried_now_and_then(stage):
    measured(stage, 10_000)
    below(stage, [0, 1])
    assert not stage.may_come([0, 1])
    assert [job.parts[0].key for _, job in stage.tier.jobs] == [key(1)]
    stage.end_all()


def test_a_short_prompt_does_not_wait_for_a_long_one(stage):
    """Neither in the order of what is loaded, nor in what is expected of it."""
    stage.tier.loads_at_once = 2
    measured(stage, 100)
    below(stage, range(9))
    assert stage.may_come(range(8))
    assert [job.parts[0].key for _, job in stage.tier.jobs] == [key(0), key(1)], "no more than keeps it busy"
    assert stage.copies.queue(stage.tier).bytes_before(1 << 62) == 8 * GRANULE_BYTES
    assert stage.copies.queue(stage.tier).bytes_before(GRANULE_BYTES) == 2 * GRANULE_BYTES
    assert ask(stage, [8], chunk_s=0.4)
    stage.end()
    assert [job.parts[0].key for _, job in stage.tier.jobs] == [key(1), key(8)]
    stage.end_all()
    assert stage.hits(range(9)) == 9


def test_a_long_prompt_lets_so_many_short_ones_go_first_and_no_more(stage):
    stage.tier.loads_at_once = 1
    below(stage, range(12))
    assert stage.may_come(range(4))
    others = 0
    while stage.hits(range(4)) < 4:
        others += 1
        assert others <= copy.OVERTAKEN * 4, "it never gets its turn"
        assert stage.may_come([4 + others % 8])  # one comes as fast as the tier loads one
        stage.end()
        stage.forget([4 + others % 8])
    stage.end_all()


def test_one_that_has_its_turn_is_expected_before_short_ones(stage):
    stage.tier.loads_at_once = 1
    below(stage, range(10))
    assert stage.may_come([0, 1])
    assert stage.copies.queue(stage.tier).bytes_before(GRANULE_BYTES) == GRANULE_BYTES, "what is given"
    for number in range(2, 2 + copy.OVERTAKEN * 2):
        assert stage.may_come([number])
    assert stage.copies.queue(stage.tier).bytes_before(GRANULE_BYTES) == 10 * GRANULE_BYTES
    stage.end()
    assert [job.parts[0].key for _, job in stage.tier.jobs] == [key(1)]
    stage.end_all()


def test_a_fast_tier_is_given_more_than_it_loads_at_a_time(stage):
    stage.tier.loads_at_once = 2
    measured(stage, 10)
    below(stage, range(8))
    assert stage.may_come(range(8))
    assert len(stage.tier.jobs) == 5, "fifty milliseconds"
    stage.end_all()


def test_what_was_given_up_is_not_waited_for(stage):
    stage.tier.loads_at_once = 1
    below(stage, [0, 1, 2])
    assert stage.may_come([0, 1, 2])
    late(stage, 5.01)
    assert stage.copies.queue(stage.tier).bytes_before(1 << 62) == GRANULE_BYTES, "what is given"
    stage.end_all()


def test_what_is_stored_does_not_wait_for_loads(stage):
    stage.tier.loads_at_once = 1
    below(stage, range(4))
    assert stage.may_come(range(4))
    stage.save([5])
    assert [verb for verb, _ in stage.tier.jobs] == ["load", "store"]
    stage.end_all()


def test_a_short_load_has_a_quarter_of_a_second_at_least(stage):
    below(stage, [0])
    assert ask(stage, [0], chunk_s=1e-5)
    [copy] = stage.copies.of(stage.tier)
    assert copy.deadline == stage.now + paying.MIN_LOAD_S
    stage.end_all()


def test_only_the_part_that_pays_is_loaded(tmp_path):
    """The beginning lies in a fast tier, the rest in a slow one."""
    stage = Stage(tmp_path)
    fast, slow = stage.tier, type(stage.tier)(stage.arena, lambda: stage.copies)
    slow.name = "slow"
    stage.tiers.below.append([slow])
    stage.save([0, 1, 2, 3])
    while fast.jobs or slow.jobs:
        (fast if fast.jobs else slow).end()
        stage.turn()
    stage.forget([0, 1, 2, 3])
    fast.evict([key(2), key(3)])
    stage.tier.load_rate.moved(GRANULE_BYTES, 1, 1 + MS)
    slow.load_rate.moved(GRANULE_BYTES, 1, 1 + 100 * MS)
    assert ask(stage, [0, 1, 2, 3], chunk_s=0.05)
    assert {job.parts[0].key for _, job in fast.jobs} == {key(0), key(1)}
    assert {job.parts[0].key for _, job in slow.jobs} == {key(3)}, "nobody waits for that"
    assert stage.counters["loads_not_worth"] == 2
    while fast.jobs or slow.jobs:
        (fast if fast.jobs else slow).end()
        stage.turn()
    stage.assert_idle()
    stage.close()


class Asked(DictTier):
    """A tier that must be asked."""

    name = "far"

    def __init__(self, answer_s, asked_s):
        super().__init__(None, None)
        self.answer_s = answer_s
        self.since_s = asked_s
        self.asked = []

    def asked_s(self, name):
        return self.since_s

    def seeks(self, keys, shards):
        self.asked.append(list(keys))
        return True


CASES = [(0.0, 0.0, 0.04), (0.03, 0.0, 0.04), (0.05, 0.0, 0.0), (0.0, 0.03, 0.01), (0.0, 0.05, 0.0)]


@pytest.mark.parametrize(("answered_s", "asked_s", "patience_s"), CASES)
def test_an_answer_is_waited_for_a_tenth_of_the_time_of_computing(stage, answered_s, asked_s, patience_s):
    far = Asked(answered_s, asked_s)
    stage.tiers.below.append([far])
    waits_s = stage.tiers.may_come(Wanted([key(number) for number in range(4)], 1), 0, computing=Computing(0.1))
    assert waits_s == pytest.approx(patience_s)
    assert far.asked == [[key(number) for number in range(4)]], "the next request may have it"
    stage.tiers.below.pop()


def test_an_engine_of_unknown_pace_waits_for_an_answer_as_long_as_it_takes(stage):
    stage.tiers.below.append([Asked(10.0, 3.0)])
    assert stage.tiers.may_come(Wanted([key(0)], 1), 0) == float("inf")
    stage.tiers.below.pop()


def test_a_tier_whose_loads_did_not_pay_once_is_waited_for_again_now_and_then(stage):
    """Else nobody would learn that it is faster, where every prompt is asked for once: what it has is not known in
    time, so that there is nothing that could be loaded for nobody."""
    measured(stage, 100)
    far = Asked(0.0, 0.0)
    far.load_rate.moved(GRANULE_BYTES, 1, 1 + 100 * MS)
    stage.tiers.below.append([far])
    assert ask(stage, [0, 1], chunk_s=0.05) == pytest.approx(tiers.ANSWER_SHARE * 2 * 0.05)
    stage.now += paying.PROBE_S - 0.01
    assert not ask(stage, [2, 3], chunk_s=0.05), "one request in so long"
    stage.now += 0.02
    assert ask(stage, [4, 5], chunk_s=0.05)
    far.load_rate.moved(GRANULE_BYTES, 10**12, 10**12 + 10 * MS)
    assert ask(stage, [6, 7], chunk_s=0.05), "it is faster"
    assert ask(stage, [8, 9], chunk_s=0.05)
    stage.tiers.below.pop()


def test_many_keys_on_several_disks_cost_in_proportion_to_them(stage):
    """The tier is asked for a few at a time, however many are left."""
    looked = []
    find = stage.tier.find
    stage.tier.find = lambda keys, shards: looked.append(len(keys)) or find(keys[:1], shards)[:1]
    numbers = list(range(8))
    below(stage, numbers)
    looked.clear()
    stage.tiers.may_come(Wanted([key(number) for number in [*numbers, *range(1000, 5000)]], 1), 0)
    assert sum(looked) <= 9 * tiers.SOME
    stage.turn()
    stage.end_all()


# ---- the rate --------------------------------------------------------------------------------


def test_of_jobs_side_by_side_the_common_time_counts_once():
    rate = Rate()
    for start, end in ((0, 10), (1, 11), (2, 12)):
        rate.moved(100, start, end)
    assert rate.gb_s == pytest.approx(300 / 12, rel=1e-3)
    rate.moved(100, 1000, 1004)
    assert rate.gb_s == pytest.approx(400 / 16, rel=1e-3), "nothing is counted while nothing was to be done"


def test_what_was_measured_lately_counts_more():
    rate = Rate()
    rate.moved(HALF_BYTES, 0, HALF_BYTES)  # 1 GB/s
    rate.moved(HALF_BYTES, HALF_BYTES, 3 * HALF_BYTES)  # 0.5 GB/s
    assert rate.gb_s == pytest.approx(1.5 / 2.5)
    for _ in range(20):
        rate.moved(HALF_BYTES, rate.end_ns, rate.end_ns + 2 * HALF_BYTES)
    assert rate.gb_s == pytest.approx(0.5, rel=1e-3)
    rate = Rate()
    rate.moved(1000, 0, 1000)
    rate.moved(1000, 1000 + HALF_NS, 3000 + HALF_NS)
    assert rate.gb_s == pytest.approx(1500 / 2500, rel=1e-3), "nothing was to be done for long"


def test_nothing_measured_and_nothing_moved_are_told_apart():
    rate = Rate()
    assert (rate.is_known, rate.gb_s, rate.seconds(10)) == (False, 0.0, 0.0)
    rate.moved(0, 0, 5)
    assert (rate.is_known, rate.gb_s, rate.seconds(10)) == (True, 0.0, float("inf"))


@pytest.mark.parametrize("chunk_s", [0.05, 100.0])
def test_what_was_hit_is_not_evicted_for_what_is_loaded_behind_it(tmp_path, chunk_s):
    """Also not for a look how fast a tier is: the answer is about the hits."""
    stage = Stage(tmp_path, granules=3)
    stage.ns = 0
    measured(stage, 100)
    below(stage, [3])
    stage.save([0, 1, 2])
    stage.end_all()
    ask(stage, [0, 1, 2, 3], chunk_s=chunk_s)
    assert stage.hits([0, 1, 2]) == 3
    assert stage.counters["loads_without_room"] == 1
    stage.end_all()
    stage.close()
