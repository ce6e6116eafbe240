"""What a node asks of a remote store, and what it knows of one by that; and what it keeps there in a real Redis."""

import pytest
from remote_bed import connections, key

from pdx.memory.slot import Slot
from pdx.store.chunk_format import packed
from pdx.store.health import MAX_ERRORS
from pdx.store.remote.catalog import NOT_THERE_S, THERE_S, name_of
from pdx.store.remote.tier import THREADS
from pdx.store.tier import Part
from pdx.testing.waiting import wait_until


@pytest.fixture
def bed(over_memory):
    return over_memory().opened()


def test_what_is_known_is_not_asked_for(bed, memory):
    assert bed.store(0) is None
    assert bed.sought(range(2)) == 1
    memory.asked.clear()
    assert bed.sought(range(2)) == 1
    assert memory.asked == []
    bed.now += NOT_THERE_S + 0.1
    assert bed.tier.find([key(0)], 1)
    bed.now += THERE_S
    assert not bed.tier.find([key(0)], 1)


def test_what_is_known_is_bounded(bed, monkeypatch):
    """What was found first is forgotten first, and asked for again."""
    monkeypatch.setattr("pdx.store.remote.catalog.MAX_KNOWN", 4)
    assert [bed.store(number) for number in range(6)] == [None] * 6
    assert bed.sought(range(3)) == 3
    assert bed.sought(range(3, 6)) == 3
    assert bed.tier.keys() == [key(number) for number in range(2, 6)]
    assert not bed.tier.find([key(0)], 1)
    asked = bed.counters["remote_hits"]
    assert bed.sought(range(2)) == 2
    assert bed.counters["remote_hits"] == asked + 2


def test_many_that_seek_the_same_ask_once(bed, memory):
    assert bed.store(0) is None
    memory.asked.clear()
    keys = [key(number) for number in range(4)]
    assert all(bed.tier.seeks(keys[at:], 1) for at in (0, 1, 0, 3))
    assert bed.sought(range(4)) == 1
    assert memory.asked == [4]


def test_what_waits_for_a_thread_is_asked_for_by_one_call(bed, memory, gate):
    """A store that is far away answers as many at once as ask, and those of one client do not keep others waiting."""
    assert [bed.store(number) for number in range(40)] == [None] * 40
    memory.asked.clear()
    heads = gate("heads", memory)
    strangers = [[key(number * 16 + at + 30_000) for at in range(16)] for number in range(100)]
    assert all(bed.tier.seeks(keys, 1) for keys in strangers)
    keys = [key(number) for number in range(41)]
    assert bed.tier.seeks(keys, 1)
    heads.open()
    bed.until(lambda: bed.tier.find(keys[:1], 1))
    assert len(memory.asked) <= THREADS + -(-97 * 16 // memory.most) + THREADS, "not one for each"
    bed.settle()
    assert len(bed.tier.find(keys, 1)) == 40
    assert max(memory.asked) <= memory.most + memory.batch


def test_questions_are_bounded(bed, monkeypatch):
    """What is over the bound is missing, and counts."""
    monkeypatch.setattr("pdx.store.remote.catalog.MAX_SOUGHT", 64)
    keys = [key(number + 20_000) for number in range(64 + 5)]
    assert sum(bed.tier.seeks([name], 1) for name in keys) == 64
    assert bed.counters["remote_not_asked"] == 5
    bed.settle()
    assert not any(bed.tier.seeks([name], 1) for name in keys[:64]), "all were answered"
    assert all(bed.tier.seeks([name], 1) for name in keys[64:]), "there is room for others again"


# ---- in Redis -------------------------------------------------------------------------------


def test_first_loads_find_connections_open(beds, redis):
    """What a connection takes to be made would count as what the store takes, by which loads pay or do not."""
    beds(redis.url).opened()
    assert connections(redis) >= THREADS


def test_what_is_too_old_is_not_found(beds, redis):
    bed = beds(redis.url, ttl_s=1.0).opened()
    assert bed.store(0) is None

    def is_gone():
        bed.now += NOT_THERE_S + THERE_S
        return bed.sought([0]) == 0

    wait_until(is_gone, what="it is older than a second", timeout_s=20.0)
    assert bed.load(0).kind == "missing"


def test_a_value_of_another_type_costs_itself_alone(beds, redis):
    """A list, say, where a chunk should be."""
    bed = beds(redis.url).opened()
    assert [bed.store(number) for number in (0, 1, 3)] == [None] * 3
    lists = range(4, 4 + MAX_ERRORS)
    for number in lists:
        assert bed.store(number) is None
        assert bed.sought([number]) == 1
    for number in (2, *lists):
        redis.put_list(f"v3/{key(number).hex()}-0")
    assert bed.sought(range(4)) == 2
    assert {bed.load(number).kind for number in lists} == {"truncated"}
    assert not {f"v3/{key(number).hex()}-0" for number in lists}.intersection(redis.names()), "they are removed"
    assert bed.tier.status().is_up, "the store is not to blame"
    assert bed.counters["remote_failed"] == bed.counters["remote_paused"] == 0
    assert bed.store(2) is None, "it takes the place of what is there"
    assert bed.load(2) is None


def test_an_object_that_says_it_has_no_bytes_is_no_chunk(bed, memory):
    """There would be room for none."""
    part = Part(key(1), 0, 1, 0, 1, Slot(0, 0, 0))
    memory.chunks[name_of(key(1), 0)] = bytes(packed(part, memoryview(b""), "none", lambda: False).head)
    assert bed.sought([1]) == 0
    assert bed.store(1) is None
    assert bed.load(1) is None
