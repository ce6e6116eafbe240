"""Chunks are loaded ahead into the memory that is named: the host's, or that of an engine's GPU. Host memory stands for
the GPU's."""

import contextlib

import pytest
from service_stage import CHUNKS, Below, attach, keys, serving, there

from pdx.errors import ChunkMissing, NodeError, PdxError, TierUnknown
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.node.look_ahead import ARRIVAL_S
from pdx.store.eviction import WANTED
from pdx.testing.waiting import wait_until
from pdx.wire.hints import Hints
from pdx.wire.messages import Admit, Release
from pdx.wire.verbs import Advise, Prefetch, Selection

OWN = {1}  # the arena of the engine


class Bed:
    """A node with an arena in host memory, a smaller one on a GPU, an engine there, and a tier below."""

    def __init__(self, service, clock, *, gpus):
        self.service, self.clock = service, clock
        self.below = Below(self.service.copies, takes=False)
        self.service.tiers.below.append([self.below])
        self.engine = attach(self.service, "e", "scheduler", engine="e")
        self.worker = attach(self.service, "w", "worker", engine="e")
        if gpus:
            self.service.gpus[1] = "0"
            self.service.places.__init__(self.service)
            self.engine.home = self.worker.home = 1

    def prefetch(self, numbers, to="", *, dry_run=False):
        effect = self.service.control(Prefetch(Selection(keys(numbers)), to, dry_run))
        self.settle()
        return effect.chunks

    def settle(self, error=None):
        """Until no copy is under way; the numbers of what was loaded from below."""
        loaded = []

        def is_idle():
            self.service.env.mailbox.deliver()
            self.service.turn()
            loaded.extend(self.below.end(error))
            return not (len(self.service.copies) or self.service.copies.landed)

        wait_until(is_idle)
        self.service.turn()
        return loaded

    @property
    def coming(self):
        """How many chunks are waited for, to be copied to a GPU."""
        return sum(len(each.coming) for each in self.service.look_ahead._expected.values())

    def of(self, numbers, arena):
        store = self.service.store
        return [number for number in numbers if store.find(keys([number]), 1, (arena,))]

    def admit(self, numbers):
        """What the engine finds at once, and in which arenas."""
        answer = self.service.handle(self.engine, Admit(keys(numbers), lease_s=30.0, wait_s=5.0, request="r"))
        self.service.handle(self.engine, Release(answer.lease))
        return answer.hits, {slot.arena for slot in answer.slots}

    def is_wanted(self, number, arena):
        (chunk,) = self.service.store.index.of(keys([number])[0], 1, (arena,))
        return chunk.level == WANTED


@pytest.fixture
def beds(place, clock):
    with contextlib.ExitStack() as undo:
        gpu = undo.enter_context(Arena.create(place / "gpu", CHUNKS * GRANULE_BYTES // 16))

        def make(*, gpus=True):
            made = Bed(undo.enter_context(serving(place, clock, [gpu] if gpus else [])), clock, gpus=gpus)
            beds.append(made)
            return made

        beds = []
        yield make
        assert not any(bed.coming for bed in beds)


@pytest.fixture
def bed(beds):
    return beds()


def test_an_engine_finds_what_was_loaded_ahead_in_its_gpus_memory(bed):
    bed.below.keys |= set(keys(range(6)))
    assert bed.prefetch(range(6), "gpu", dry_run=True) == 6
    assert bed.of(range(6), 0) == [], "nothing was done"
    assert bed.prefetch(range(6), "gpu") == 6
    assert bed.of(range(6), 1) == list(range(6))
    assert bed.admit(range(6)) == (6, OWN)
    assert not bed.below.jobs
    assert not len(bed.service.copies), "it is not copied again"
    assert bed.prefetch(range(6), "gpu") == 0
    assert bed.service.counters["prefetched_chunks"] == 12, "each into the host's memory, and from there"


def test_where_nothing_else_is_said_it_is_loaded_into_the_first_arena(bed):
    bed.below.keys |= set(keys(range(6)))
    assert [bed.prefetch(range(3), ""), bed.prefetch(range(3, 6), "host")] == [3, 3]
    assert (bed.of(range(6), 0), bed.of(range(6), 1)) == (list(range(6)), [])


def test_what_the_first_arena_has_of_it_is_copied_and_the_rest_loaded_first(bed):
    bed.below.keys |= set(keys(range(6)))
    bed.prefetch([1, 2, 4])
    bed.service.control(Prefetch(Selection(keys(range(6))), "gpu"))
    wait_until(lambda: bed.service.env.mailbox.deliver() or bed.service.turn() or bed.of(range(6), 1) == [1, 2, 4])
    assert bed.coming == 3
    assert sorted(bed.settle()) == [0, 3, 5]
    assert bed.of(range(6), 1) == list(range(6))


def test_it_is_evicted_last_in_both_until_the_request_has_had_time_to_come(bed):
    bed.below.keys |= set(keys(range(6)))
    bed.prefetch(range(6), "gpu")
    assert all(bed.is_wanted(number, arena) for number in range(6) for arena in (0, 1))
    bed.clock.now += ARRIVAL_S + 1
    bed.service.tick()
    assert not any(bed.is_wanted(number, arena) for number in range(6) for arena in (0, 1))
    assert not bed.service.store.wanted


def test_a_gpus_memory_gets_no_more_than_half_of_it(bed):
    bed.below.keys |= set(keys(range(20)))
    bed.prefetch(range(20), "gpu")
    assert bed.of(range(20), 1) == list(range(8)), "16 chunks have room there"


def test_what_cannot_be_loaded_is_tried_once(bed):
    bed.below.keys |= set(keys(range(6)))
    bed.service.control(Prefetch(Selection(keys(range(6))), "gpu"))
    bed.service.turn()
    loads = len(bed.below.jobs)
    bed.settle(PdxError("broken"))
    bed.settle()
    assert loads
    assert not bed.below.jobs
    assert bed.of(range(6), 1) == []
    assert not bed.coming


def test_what_is_given_up_leaves_nothing(bed):
    bed.below.keys |= set(keys(range(6)))
    bed.service.control(Prefetch(Selection(keys(range(6))), "gpu"))
    bed.service.turn()
    assert bed.coming
    bed.clock.now += ARRIVAL_S + 1
    bed.service.tick()
    assert not bed.coming
    bed.settle()
    assert bed.of(range(6), 1) == []


def test_the_last_request_of_a_session_is_loaded_to_its_engines_gpu_by_a_hint(bed):
    bed.below.keys |= set(keys(range(6)))
    bed.service.handle(bed.engine, Admit(keys(range(6)), lease_s=1.0, request="r", hints=Hints("s")))
    hints = Hints("s", prefetch=[""], prefetch_to="gpu")
    said = {each.field: each.outcome for each in bed.service.control(Advise(hints)).verdicts}
    assert said["prefetch"] == "accepted"
    bed.settle()
    assert bed.of(range(6), 1) == list(range(6))
    assert bed.admit(range(6)) == (6, OWN)


def test_two_that_wait_for_the_same_chunks_get_them(bed):
    bed.below.keys |= set(keys(range(6)))
    for count in (4, 6):
        bed.service.control(Prefetch(Selection(keys(range(count))), "gpu"))
    bed.service.turn()
    assert bed.settle()
    assert bed.of(range(6), 1) == list(range(6))


def test_where_there_is_no_such_memory_one_sentence_says_so(beds):
    bed = beds(gpus=False)
    bed.below.keys |= set(keys(range(6)))
    with pytest.raises(TierUnknown, match="^this node has no tier 'gpu'; it has 'host', 'below'$"):
        bed.prefetch(range(6), "gpu")
    for dry_run in (False, True):
        with pytest.raises(NodeError, match="below is no memory that chunks are prefetched into; move stores them"):
            bed.prefetch(range(6), "below", dry_run=dry_run)
    with pytest.raises(ChunkMissing, match="none of 2 chunks is in any tier of this node"):
        bed.prefetch([8, 9])
    bed.service.handle(bed.engine, Admit(keys(range(6)), lease_s=1.0, request="r", hints=Hints("s")))
    verdicts = bed.service.control(Advise(Hints("s", prefetch=[""], prefetch_to="gpu"))).verdicts
    for verdict in (each for each in verdicts if each.field != "session"):
        assert (verdict.outcome, verdict.text) == ("refused", "this node has no tier 'gpu'; it has 'host', 'below'")
    assert there(bed.service, range(6)) == []
