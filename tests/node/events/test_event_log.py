"""The log of events over a real store: whoever applies what it tells has what is there."""

import random

import pytest
from events_bed import EventsBed, key, names, random_step
from hypothesis import given
from hypothesis import strategies as st

from pdx.node.events import log
from pdx.node.events.log import Place
from pdx.store.history import Cause
from pdx.store.lifecycle import State


@pytest.fixture
def bed(tmp_path):
    beds = []

    def make(**settings):
        beds.append(EventsBed(tmp_path, **settings))
        return beds[-1]

    yield make
    for each in beds:
        each.close()


class Picture:
    """What one knows who applies changes."""

    def __init__(self):
        self.where = {}

    def apply(self, changes):
        for change in changes:
            for each in change.keys:
                tiers = self.where.setdefault(each, set())
                (tiers.add if change.is_stored else tiers.discard)(change.tier)
                if not tiers:
                    del self.where[each]


def told(batch):
    return [(change.tier, change.is_stored, list(change.keys)) for change in batch.changes]


def test_a_key_is_stored_when_its_last_shard_is_sealed(bed):
    bed = bed()
    bed.log.follow("me")
    first, second = bed.reserve([key(1)], shards=2)[key(1)]
    bed.seal([first])
    assert bed.log.turn() is None
    bed.seal([second])
    assert told(bed.log.turn()) == [("host", True, [key(1)])]
    bed.store.delete([key(1)])
    assert told(bed.log.turn()) == [("host", False, [key(1)])]


def test_nobody_follows_and_nothing_is_noted(bed):
    bed = bed()
    bed.put(key(1))
    bed.disk.put(key(1))
    assert (bed.log.turn(), bed.store.index.changed_keys, bed.disk.changed) == (None, None, None)
    assert bed.log.since(bed.log.seq) is None


def test_what_is_deleted_while_it_is_read_is_gone_at_once(bed):
    bed = bed()
    bed.log.follow("me")
    bed.put(key(1))
    bed.log.turn()
    lease = bed.store.lease([*bed.store.index.of(key(1))], 1, 10.0)
    bed.store.delete([key(1)])
    assert told(bed.log.turn()) == [("host", False, [key(1)])]
    bed.store.release(lease, 1)
    assert bed.log.turn() is None


def test_a_tail_that_is_for_one_request_is_never_told_of(bed):
    bed = bed()
    bed.log.follow("me")
    bed.put(key(1), tail_nbytes=100, transfer="transfer-0123456789")
    assert bed.store.index.of(key(1))[0].state is State.SEALED
    assert bed.log.turn() is None


def test_arenas_of_gpus_are_tiers_of_their_own(bed):
    bed = bed(gpus=["GPU-a", "GPU-b"])
    bed.log.follow("me")
    bed.put(key(1), shards=2, arenas=(1, 2))
    assert told(bed.log.turn()) == [("GPU-a", True, [key(1)]), ("GPU-b", True, [key(1)])]
    bed.put(key(1), shards=2)
    assert told(bed.log.turn()) == [("host", True, [key(1)])]
    (of_gpu,) = (chunk for chunk in bed.store.index.of(key(1)) if chunk.slot.arena == 2)
    bed.store.pools[2].drop(of_gpu, Cause.BY_CONTROLLER)
    assert told(bed.log.turn()) == [("GPU-a", False, [key(1)]), ("GPU-b", False, [key(1)])]


def test_names_that_are_told_later_are_told_again(bed):
    bed = bed()
    bed.log.follow("me", names=True)
    bed.put(key(1))
    assert list(bed.log.turn().changes[0].named) == []
    bed.store.name(bed.store.index.of(key(1)), key(9), names(1, 2), 16)
    (change,) = bed.log.turn().changes
    assert (change.tier, change.is_stored, list(change.keys)) == ("host", True, [key(1)])
    (named,) = change.named
    assert (named.key, named.parent, named.blocks, named.block_tokens) == (key(1), key(9), names(1, 2), 16)


def test_the_ring_gives_what_it_has_and_says_when_it_has_not(bed):
    bed = bed(ring_keys=3)
    bed.log.follow("me")
    start = bed.log.seq
    for number in range(5):
        bed.disk.put(key(number))
        bed.log.turn()
    assert [batch.seq for batch in bed.log.since(start + 2)] == [start + 3, start + 4, start + 5]
    assert bed.log.since(bed.log.seq) == []
    assert bed.log.since(start + 1) is None
    assert bed.log.since(bed.log.seq + 1) is None


def test_numbers_of_a_node_that_starts_again_are_higher(bed):
    first = bed()
    first.log.follow("me")
    for number in range(100):
        first.disk.put(key(number))
        first.log.turn()
    second = log.EventLog(first.store, first.tiers, [""], first.env, born_at=1000.2)
    assert second.seq > first.log.seq


def test_events_have_the_time_of_the_host_also_after_it_was_set(bed, monkeypatch):
    first, at = bed(), 1e9
    monkeypatch.setattr(log.time, "time", lambda: at)
    own = log.EventLog(first.store, first.tiers, [""], first.env)
    own.follow("me")
    at = 2e9
    first.disk.put(key(1))
    assert own.turn().ts == 2e9


def test_tiers_have_vllms_media_and_what_other_hosts_have_is_remote(bed):
    bed = bed(gpus=("GPU-a",))
    bed.remote.is_shared = True
    cpu, gpu = Place("CPU", "LOCAL"), Place("GPU", "LOCAL")
    disk, remote = Place("STORAGE", "LOCAL"), Place("STORAGE", "REMOTE")
    assert bed.log.places() == {"host": cpu, "GPU-a": gpu, "disk": disk, "remote": remote}


@pytest.mark.parametrize("gpus", [(), ("GPU-a",)])
@given(seed=st.integers(0, 1 << 30))
def test_who_comes_at_any_time_and_hears_all_has_what_is_there(tmp_path_factory, seed, gpus):
    rng = random.Random(seed)
    bed = EventsBed(tmp_path_factory.mktemp("bed"), slots=6, gpus=gpus)
    try:
        for _ in range(rng.randrange(20)):
            random_step(bed, rng)
        bed.log.follow("me")
        picture, feed = Picture(), bed.log.snapshot()
        for _ in range(rng.randrange(40)):
            random_step(bed, rng)
            if rng.random() < 0.5 and (batch := bed.log.turn()):
                picture.apply(batch.changes)
            if rng.random() < 0.2:
                if batch := bed.log.turn():  # a piece is told as it is when all changes were
                    picture.apply(batch.changes)
                picture.apply(next(feed, []))
        if batch := bed.log.turn():
            picture.apply(batch.changes)
        for piece in feed:
            picture.apply(piece)
        assert picture.where == bed.truth()
    finally:
        bed.close()
