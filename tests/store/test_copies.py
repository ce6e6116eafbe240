"""Pushes from this node: what goes when, what the peer may answer, and that every push ends, whatever happens."""

import gc
import weakref

import pytest
from push_stage import MIB, FakePeerTier, Granted, SendingStage, key
from steps import calls_run

from pdx.errors import ChannelBroken, ProtocolError, TransferAborted, WriteRefused
from pdx.memory.digest import digests
from pdx.memory.layout import slice_span
from pdx.memory.slot import Slot
from pdx.store.copy import MAX_SLICES
from pdx.store.tier import Tier
from pdx.transports.channel import MAX_NOTIFY_BYTES, MAX_PIECES
from pdx.wire.base import DIGEST_BYTES, MAX_LAYERS
from pdx.wire.messages import Landed, Release, Slices, encode

TRANSFER = "transfer-0123456789"
KIB = 1 << 10


@pytest.fixture
def stage_with(tmp_path):
    stages = []

    def make(**settings):
        folder = tmp_path / str(len(stages))
        folder.mkdir()
        stages.append(SendingStage(folder, **settings))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


@pytest.fixture
def stage(stage_with):
    return stage_with()


def pushed(stage, numbers, nbytes, *, layers=1, shards=1, **claim):
    """A push of chunks that were just reserved, granted by the peer: the slots."""
    slots = stage.reserve(numbers, nbytes, layers=layers, shards=shards, **claim)
    assert stage.start(numbers, shards=shards) == len(numbers)
    stage.grant(stage.way.offers[-1])
    return slots


def slices_of(job):
    return [(piece.local, one.first_layer, one.layers) for piece, one in zip(job.pieces, job.slices, strict=True)]


# ---- what goes when ------------------------------------------------------------------------------


def test_layers_are_grouped_until_a_write_is_worth_it_and_the_rest_goes_at_the_end(stage):
    slots = pushed(stage, [0], 10 * 256 * KIB, layers=10)
    for layer in range(3):
        stage.fill(slots, layer)
    assert not stage.way.jobs, "768 KiB are too few as long as more are to come"
    stage.fill(slots, 3)
    assert [job.nbytes for job in stage.way.jobs] == [MIB]
    for layer in range(4, 9):
        stage.fill(slots, layer)
    assert [job.nbytes for job in stage.way.jobs] == [MIB, MIB]
    stage.fill(slots, 9)
    assert [job.nbytes for job in stage.way.jobs] == [MIB, MIB, 512 * KIB], "nothing more comes: the rest"
    assert slices_of(stage.way.jobs[2]) == [(slots[0].offset + 8 * 256 * KIB, 8, 2)]
    stage.finish_all()
    assert stage.way.farewells == [Release(1, True)]
    assert stage.over == [(1, True)]
    stage.assert_idle()


def test_the_same_layers_of_neighbouring_chunks_go_together(stage):
    slots = pushed(stage, [0, 1, 2, 3], 4 * 256 * KIB, layers=4)
    stage.fill(slots, 0)
    job = stage.finish()
    assert job.nbytes == MIB
    assert slices_of(job) == [(slot.offset, 0, 1) for slot in slots]
    assert [(one.offset, one.generation) for one in job.slices] == [
        (SendingStage.REMOTE + n * MIB, 7) for n in range(4)
    ]


def test_a_write_is_at_most_8_mib_and_says_exactly_what_it_carries(stage):
    slots = pushed(stage, [0], 20 * MIB, layers=20)
    stage.fill(slots, 0, 20, seal=True)
    assert [job.nbytes for job in stage.way.jobs] == [8 * MIB, 8 * MIB, 4 * MIB]
    for job in stage.way.jobs:
        assert job.nbytes <= Tier.max_job_bytes
        assert job.nbytes == sum(piece.nbytes for piece in job.pieces)
        for piece, one, spans in zip(job.pieces, job.slices, job.spans, strict=True):
            assert sum(size for _, size in spans) == piece.nbytes
            assert spans[0][0] == piece.local
            assert len(spans) == one.layers
    assert [one.first_layer for job in stage.way.jobs for one in job.slices] == [0, 8, 16]


def test_a_slice_that_is_larger_than_a_write_goes_alone(stage):
    slots = pushed(stage, [0], 20 * MIB, layers=2)
    stage.fill(slots, 0, 2, seal=True)
    assert [job.nbytes for job in stage.way.jobs] == [10 * MIB, 10 * MIB]


def test_a_full_write_goes_at_once_however_large_a_group_is_to_be(stage_with):
    stage = stage_with(group_bytes=64 * MIB)
    slots = pushed(stage, [0], 20 * MIB, layers=20)
    stage.fill(slots, 0, 9)
    assert [job.nbytes for job in stage.way.jobs] == [8 * MIB], "it cannot become larger, so nothing is won by waiting"
    stage.lose(slots)
    stage.finish_all(TransferAborted(""))


def test_many_small_slices_are_a_full_write_too(stage):
    slots = pushed(stage, list(range(600)), 64, layers=4)
    stage.fill(slots, 0, 2)
    assert [sum(one.layers for one in job.slices) for job in stage.way.jobs] == [MAX_SLICES]


def test_the_longest_notification_has_room_for_all_digests():
    """As many slices as a write may have, in as many chunks, with the longest numbers."""
    one = Slices(1 << 48, (1 << 63) - 1, MAX_LAYERS - 1, 1, bytes(DIGEST_BYTES))
    assert len(encode(Landed((1 << 63) - 1, [one] * MAX_SLICES))) <= MAX_NOTIFY_BYTES
    assert MAX_SLICES <= MAX_PIECES
    whole = Slices(1 << 48, (1 << 63) - 1, 0, MAX_SLICES, bytes(MAX_SLICES * DIGEST_BYTES))
    assert len(encode(Landed((1 << 63) - 1, [whole]))) <= MAX_NOTIFY_BYTES


def test_slices_that_do_not_divide_evenly_are_sent_to_the_byte(stage):
    slots = pushed(stage, [0], 10_007, layers=7)
    stage.fill(slots, 0, 7, seal=True)
    (job,) = stage.finish_all()
    assert [(piece.local, piece.nbytes) for piece in job.pieces] == [(slots[0].offset, 10_007)]
    assert job.spans == [
        [(slots[0].offset + slice_span(10_007, 7, n, 1)[0], slice_span(10_007, 7, n, 1)[1]) for n in range(7)]
    ]
    assert digests(stage.arena, job.spans[0])


def test_layers_that_are_filled_out_of_order_are_sent_as_the_runs_they_form(stage):
    slots = pushed(stage, [0], 6 * MIB, layers=6)
    for layer in (4, 1, 3, 0):
        stage.fill(slots, layer)
    stage.fill(slots, 2)
    stage.fill(slots, 5)
    sent = [
        layer
        for job in stage.finish_all()
        for one in job.slices
        for layer in range(one.first_layer, one.first_layer + one.layers)
    ]
    assert sorted(sent) == list(range(6))
    assert sent[:2] == [4, 1]
    assert stage.over == [(1, True)]


# ---- what a message costs -------------------------------------------------------------------------


def calls(work):
    with calls_run() as counted:
        work()
    return counted.total()


LAYERS = 80


def busy(stage_with, pushes, chunks):
    """A stage with so many pushes of so many chunks under way, a first layer of each filled: their slots."""
    stage = stage_with(granules=pushes * chunks * 2, group_bytes=64 * KIB, window_bytes=MIB)
    slots = [
        pushed(stage, list(range(n * chunks, (n + 1) * chunks)), LAYERS * 64, layers=LAYERS) for n in range(pushes)
    ]
    for mine in slots:
        stage.fill(mine[:32], 0)
    return stage, slots


@pytest.mark.parametrize("is_full", [False, True], ids=["a window with room", "a full window"])
def test_a_fill_costs_what_it_fills_whatever_is_under_way(stage_with, is_full):
    costs = []
    for pushes, chunks in ((1, 64), (4, 256)):
        stage, slots = busy(stage_with, pushes, chunks)
        if is_full:
            stage.way.max_inflight_bytes = 0
        costs.append([calls(lambda layer=layer: stage.fill(slots[0][:32], layer)) for layer in range(1, 41)])  # noqa: B023
        stage.copies.lost(stage.way)
        stage.finish_all(ChannelBroken("gone"))
        stage.assert_idle()
    small, large = map(sum, costs)
    assert small > 40 * 32
    assert large <= 1.1 * small
    assert max(costs[1]) <= 1.5 * max(costs[0]) + 32, "no single one pays for the others"


def test_an_acknowledgement_costs_what_was_written_whatever_is_under_way(stage_with):
    costs = []
    for pushes, chunks in ((1, 64), (4, 256)):
        stage, slots = busy(stage_with, pushes, chunks)
        for layer in range(1, 65):
            stage.fill(slots[0][:32], layer)
        job = stage.way.jobs[0]
        costs.append(calls(lambda: stage.finish(job)))  # noqa: B023
        stage.copies.lost(stage.way)
        stage.finish_all(ChannelBroken("gone"))
    assert costs[1] <= 1.2 * costs[0]


# ---- offers --------------------------------------------------------------------------------------


def test_only_what_is_here_or_being_filled_is_offered_up_to_the_first_gap(stage):
    stage.reserve([0, 1, 3], MIB)
    assert stage.start([0, 1, 2, 3]) == 2
    assert stage.way.offers[0].keys == [key(0), key(1)]
    assert stage.start([2, 3]) == 0
    assert len(stage.way.offers) == 1
    stage.copies.lost(stage.way)
    stage.assert_idle()


def test_chunks_of_other_sizes_and_tails_are_offers_of_their_own(stage):
    stage.reserve([0, 1], MIB, layers=4)
    stage.reserve([2, 3], 2 * MIB, layers=4, tail_nbytes=1000)
    stage.reserve([4], 2 * MIB, layers=2)
    stage.reserve([5], 2 * MIB, layers=2, tail_nbytes=500)
    assert stage.start(list(range(6))) == 6
    seen = [
        ([key(n) for n in range(6)].index(o.keys[0]), len(o.keys), o.nbytes, o.layers, o.tail_nbytes)
        for o in stage.way.offers
    ]
    assert seen == [(0, 2, MIB, 4, 0), (2, 2, 2 * MIB, 4, 1000), (4, 2, 2 * MIB, 2, 500)]
    for offer in stage.way.offers:
        stage.grant(offer)
    assert [item.remote.nbytes for push in stage.copies.of(stage.way) for item in push.items] == [
        MIB,
        MIB,
        2 * MIB,
        1000,
        2 * MIB,
        500,
    ]
    stage.copies.lost(stage.way)
    stage.assert_idle()


def test_a_tail_alone(stage):
    slots = stage.reserve([0], MIB, layers=4, tail_nbytes=4000)
    stage.fill(slots, 0, 4, seal=True)
    stage.start([0])
    (offer,) = stage.way.offers
    assert (offer.nbytes, offer.tail_nbytes) == (4000, 4000)
    stage.grant(offer)
    stage.finish_all()
    assert stage.over == [(1, True)]
    stage.assert_idle()
    assert stage.store.index.census()[0] == {}, "a tail is for one reader, and that was the push"


def test_all_shards_of_a_chunk_go_in_one_push(stage):
    slots = stage.reserve([0, 1], MIB, shards=3)
    assert stage.start([0, 1], shards=3) == 2
    stage.grant(stage.way.offers[0], [1])
    assert stage.holds() == 3, "what was not granted is held no longer"
    stage.fill(slots, 0, 1, seal=True)
    jobs = stage.finish_all()
    assert [piece.local for job in jobs for piece in job.pieces] == [slot.offset for slot in slots[3:]]
    assert stage.over == [(1, True)]
    stage.assert_idle()


def test_an_offer_waits_until_the_way_is_usable(stage):
    stage.reserve([0], MIB)
    stage.way.is_usable = False
    stage.start([0])
    assert not stage.way.sent
    stage.copies.ready(FakePeerTier("c"))
    assert not stage.way.sent
    stage.way.is_usable = True
    stage.copies.ready(stage.way)
    stage.copies.ready(stage.way)
    assert len(stage.way.offers) == 1
    stage.copies.lost(stage.way)


def test_a_chunk_of_fewer_bytes_than_layers_is_not_pushed(stage):
    """Some of its slices would be empty, and no channel writes nothing."""
    stage.reserve([0], MIB)
    stage.reserve([1], 3, layers=5)
    assert stage.start([0, 1]) == 1
    assert stage.way.offers[0].keys == [key(0)]
    stage.copies.lost(stage.way)


# ---- grants --------------------------------------------------------------------------------------

A = Slot(1 << 30, MIB, 1)
B = Slot((1 << 30) + MIB, MIB, 1)


@pytest.mark.parametrize(
    ("indices", "slots"),
    [
        ([2], [A]),
        ([0, 0], [A, B]),
        ([0], [A, B]),
        ([], [A]),
        ([0, 1], [A, Slot(B.offset, MIB - 1, 1)]),
    ],
    ids=["index", "twice", "more", "unnamed", "smaller"],
)
def test_a_grant_that_is_none_ends_the_push(stage, indices, slots):
    """The peer believes that it gave room away: it must hear at once that nobody will use it."""
    sources = stage.reserve([0, 1], MIB)
    stage.fill(sources, 0, 1, seal=True)
    stage.start([0, 1])
    with pytest.raises(ProtocolError):
        stage.granted(stage.way, Granted(1, indices, slots))
    assert not stage.way.jobs
    assert stage.way.farewells == [Release(1, False)]
    assert stage.over == [(1, False)]
    stage.grant(stage.way.offers[0])
    stage.assert_idle()


def test_an_offer_is_granted_once(stage):
    stage.reserve([0], MIB)
    stage.start([0])
    stage.grant(stage.way.offers[0])
    with pytest.raises(ProtocolError, match="twice"):
        stage.grant(stage.way.offers[0])
    stage.copies.lost(stage.way)
    stage.assert_idle()


def test_what_another_peer_says_of_a_push_does_not_matter(stage):
    """Even if it has the name of the tier, as a peer may that is called like a disk."""
    other = FakePeerTier(stage.way.name)
    stage.reserve([0], MIB)
    stage.start([0])
    stage.granted(other, stage.grants(stage.way.offers[0]))
    stage.copies.stopped(other, 1, "")
    stage.copies.lost(other)
    stage.copies.stopped(stage.way, 99, "")
    (push,) = stage.copies.of(stage.way)
    assert (push.state, push.items) == ("queued", [])
    stage.copies.lost(stage.way)


# ---- failures ------------------------------------------------------------------------------------


def test_a_source_that_was_filled_before_it_was_given_up_is_whole(stage):
    slots = stage.reserve([0], MIB, layers=2)
    stage.start([0])
    stage.fill(slots, 0, 2)
    chunk = stage.store.at(slots[0])
    stage.store.abort([chunk])
    stage.copies.changed([chunk])
    stage.grant(stage.way.offers[0])
    stage.finish_all()
    assert stage.over == [(1, True)]
    stage.assert_idle()


def test_a_write_that_fails_when_all_is_sent_is_counted_and_nothing_is_complete(stage):
    slots = pushed(stage, [0], 16 * MIB, layers=16)
    stage.fill(slots, 0, 16, seal=True)
    assert len(stage.way.jobs) == 2
    stage.finish(error=WriteRefused("not granted"))
    assert stage.counters["jobs_failed"] == 1
    assert not stage.way.farewells
    stage.finish()
    assert stage.way.farewells == [Release(1, False)]
    assert stage.over == [(1, False)]


def test_what_is_logged_of_a_failed_copy_keeps_no_memory_mapped(stage, caplog):
    """Who keeps log records, as a queue handler does, would keep the copy, its tier and the arena's mapping."""
    slots = pushed(stage, [0], 16 * MIB, layers=16)
    stage.fill(slots, 0, 16, seal=True)
    stage.finish(error=WriteRefused("not granted"))
    [args] = [record.args for record in caplog.records if "failed" in record.msg]
    assert [type(arg) for arg in args] == [str, str]


def test_of_a_transfer_under_way_what_a_peer_has_is_across_and_what_went_to_another_arena_is_not(stage):
    within = FakePeerTier("arenas")
    within.kind = "arenas"
    slots = stage.reserve([0], 20 * MIB, layers=20)
    for way in (stage.way, within):
        stage.start([0], transfer=TRANSFER, way=way)
        stage.granted(way, stage.grants(way.offers[0]))
    stage.fill(slots, 0, 20, seal=True)
    stage.finish()
    for job in within.jobs[:2]:
        stage.copies.done(within, job.job, None)
    del within.jobs[:2]
    assert stage.copies.copied_bytes(TRANSFER, "peer") == 8 * MIB
    assert stage.copies.copied_bytes("another", "peer") == 0
    assert stage.counters["arenas_stored_bytes"] == 16 * MIB
    stage.copies.lost(within)
    for job in within.jobs:
        stage.copies.done(within, job.job, ChannelBroken(""))
    stage.finish_all()
    stage.assert_idle()


def test_nothing_is_left_of_a_peer_that_is_gone(stage):
    """Others come instead, for as long as the node lives."""
    way = FakePeerTier("c")
    slots = stage.reserve([0], 4096)
    stage.start([0], way=way)
    stage.granted(way, stage.grants(way.offers[-1]))
    stage.fill(slots, seal=True)
    job = way.jobs.pop().job
    stage.copies.lost(way)
    job.start_ns, job.end_ns = 1, 2
    stage.copies.done(way, job, ChannelBroken(""))
    stage.copies.pump()
    left = weakref.ref(way)
    del way
    gc.collect()
    assert left() is None
