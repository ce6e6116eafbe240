"""Chunks that a push holds: filled, sealed or given up meanwhile, their memory stays as it is until nobody reads it."""

import pytest

from pdx.errors import StaleSlot
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.store.claim import Claim
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.telemetry.env import Env

WRITER = 1
GRANULES = 4
KEY, OTHER = b"key", b"other"


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path / "arena", GRANULES * GRANULE_BYTES) as made:
        yield made


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def store(arena, now):
    return Store(arena, Env(lambda: now[0]))


def reserve(store, *keys, granules=1, **settings):
    settings = {"layers": 2, "owner": WRITER, "deadline": 100.0, "writers": [WRITER], **settings}
    return store.reserve(Claim(keys=keys, nbytes=granules * GRANULE_BYTES, **settings))


def held(store, **settings):
    """A chunk that is being filled and read by a push."""
    _, slots, _ = reserve(store, KEY, **settings)
    (chunk,) = store.index.known(KEY, 1)
    store.hold([chunk])
    store.fill(slots, 0, 1, WRITER)
    return chunk


def is_free(store):
    return store.index.census() == ({}, {}, 0) and store.free_bytes == GRANULES * GRANULE_BYTES


ENDS = {
    "lets go": lambda store, now, chunk: store.let_go([chunk]),
    "dies": lambda store, now, chunk: store.end_session(WRITER),
    "is aborted and lets go": lambda store, now, chunk: (store.abort([chunk]), store.let_go([chunk])),
    "is aborted and seals": lambda store, now, chunk: (store.abort([chunk]), store.seal([chunk])),
    "is late and dies": lambda store, now, chunk: (now.__setitem__(0, 1e9), store.expire(), store.end_session(WRITER)),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_writer_that_ends_while_its_chunk_is_read_leaves_it_to_the_reader(store, arena, now, end):
    chunk = held(store)
    ENDS[end](store, now, chunk)
    assert chunk.state is State.RETIRED
    assert arena.is_current(chunk.slot)
    assert store.index.known(KEY, 1) is None
    with pytest.raises(StaleSlot):
        store.fill([chunk.slot], 1, 1, WRITER)
    _, slots, full = reserve(store, KEY, OTHER, b"third", b"fourth", partial=True)
    assert full
    assert chunk.slot.offset not in {slot.offset for slot in slots}
    store.unhold([chunk])
    assert not arena.is_current(chunk.slot)
    store.end_session(WRITER)
    assert is_free(store)


def test_a_quarantined_chunk_is_not_freed_by_its_reader(store, arena):
    chunk = held(store)
    store.abort([chunk])
    store.unhold([chunk])
    assert chunk.state is State.QUARANTINED
    assert arena.is_current(chunk.slot)
    store.let_go([chunk])
    assert is_free(store)


def test_a_chunk_that_is_still_being_filled_stays_when_its_reader_ends(store):
    chunk = held(store)
    store.unhold([chunk])
    assert chunk.state is State.FILLING
    store.fill([chunk.slot], 1, 1, WRITER)
    store.seal([chunk])
    assert store.find([KEY], 1) == [(chunk,)]
    assert reserve(store, OTHER, granules=GRANULES)[2] is False, "it can be evicted as any other"


def test_a_sealed_chunk_is_not_evicted_while_it_is_read(store):
    chunk = held(store)
    store.fill([chunk.slot], 1, 1, WRITER)
    store.seal([chunk])
    store.hold([chunk])
    store.unhold([chunk])
    assert reserve(store, OTHER, granules=GRANULES) == ([], [], True)
    store.delete([KEY])
    assert chunk.state is State.RETIRED
    store.unhold([chunk])
    assert is_free(store)


def test_a_tail_is_freed_when_its_last_reader_ends_and_not_before_it_is_sealed(store):
    chunk = held(store, tail_nbytes=100)
    store.unhold([chunk])
    assert chunk.state is State.FILLING
    store.hold([chunk])
    store.fill([chunk.slot], 1, 1, WRITER)
    store.seal([chunk])
    store.unhold([chunk])
    assert is_free(store)


def test_known_needs_every_shard(store):
    reserve(store, KEY, writers=[WRITER, 2])
    reserve(store, OTHER)
    assert [chunk.shard for chunk in store.index.known(KEY, 2)] == [0, 1]
    assert store.index.known(OTHER, 2) is None
    assert store.index.known(b"nothing", 1) is None
