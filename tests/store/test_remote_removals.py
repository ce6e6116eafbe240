"""What is deleted is not in the remote store any more, whoever put it there, and whatever is under way."""

import pytest
from remote_bed import key

from pdx.store.health import MAX_ERRORS, PAUSE_S
from pdx.store.remote.catalog import NOT_THERE_S


@pytest.fixture
def bed(over_memory):
    return over_memory().opened()


def gone(bed, memory, names=()):
    """Nothing but these is there, when all is removed that was to be."""
    bed.settle()
    return memory.names() == sorted(names)


def doubted(bed, memory):
    """It does not answer, and is left alone."""
    memory.fails = "timeout"
    while not bed.counters["remote_paused"]:
        bed.end(bed.start("load", 0))


def test_what_another_node_has_put_there_is_removed(over_memory, bed, memory):
    assert [bed.store(1, shard, shards=2) for shard in (0, 1)] == [None, None]
    other = over_memory().opened()
    assert other.tier.evict([key(1), key(2)], 2) == 0, "it does not know"
    assert gone(other, memory)


def test_all_shards_that_this_node_has_put_there_are_removed(bed, memory):
    """Where nobody knows any more how many there were."""
    assert [bed.store(1, shard, shards=3) for shard in (0, 1, 2)] == [None] * 3
    assert bed.tier.evict([key(1)]) == 1
    assert gone(bed, memory)
    assert bed.counters["remote_removed"] == 1


def test_an_answer_from_before_it_was_deleted_does_not_count(bed, memory, gate):
    assert bed.store(1) is None
    answer = gate("heads", memory, behind=True)
    assert bed.tier.seeks([key(1)], 1)
    assert answer.arrived.acquire(timeout=30)
    bed.tier.evict([key(1)])
    assert not bed.tier.find([key(1)], 1)
    bed.until(lambda: bed.counters["remote_removed"])
    answer.open()
    assert gone(bed, memory)
    assert not bed.tier.find([key(1)], 1)
    bed.now += NOT_THERE_S + 0.1
    assert bed.sought([1]) == 0


def test_what_is_being_removed_is_neither_looked_for_nor_stored(bed, memory, gate):
    assert bed.store(1) is None
    remove = gate("remove", memory)
    bed.tier.evict([key(1)])
    assert bed.sought([1]) == 0
    assert bed.store(1) == "left out"
    assert "being deleted" in bed.tier.history.why(key(1)).text
    remove.open()
    assert gone(bed, memory)


def test_what_is_deleted_while_the_store_does_not_answer_is_removed_when_it_does(bed, memory):
    assert [bed.store(number) for number in range(3)] == [None] * 3
    doubted(bed, memory)
    assert bed.tier.evict([key(0), key(1)]) == 0, "nobody knows what is there"
    bed.tier.tick()
    memory.fails = ""
    assert len(memory.names()) == 3
    bed.now += PAUSE_S
    bed.tier.tick()
    bed.until(lambda: bed.tier.status().is_up)
    bed.tier.tick()
    assert gone(bed, memory, [f"v3/{key(2).hex()}-0"])


def test_what_cannot_be_removed_is_tried_again(bed, memory, gate, caplog):
    assert bed.store(1) is None
    memory.fails = "denied"
    bed.tier.evict([key(1)])
    bed.until(lambda: bed.counters["remote_denied"])
    memory.fails = ""
    assert "is removed later" in caplog.text
    remove = gate("remove", memory)
    bed.tier.tick()
    assert bed.store(2) is None
    assert not remove.arrived.acquire(blocking=False), "not at once"
    assert bed.tier.evict([key(2)]) == 1
    assert bed.sought([1]) == 0, "it is not found meanwhile"
    bed.now += PAUSE_S
    remove.open()
    bed.tier.tick()
    assert gone(bed, memory)


def test_a_store_from_which_nothing_may_be_removed_is_used_on(bed, memory):
    assert [bed.store(number) for number in (1, 2)] == [None, None]
    memory.fails = "denied"
    bed.tier.evict([key(1)])
    for count in range(1, MAX_ERRORS + 1):
        bed.until(lambda count=count: bed.counters["remote_denied"] == count)
        bed.now += PAUSE_S
        bed.tier.tick()
    memory.fails = ""
    assert bed.sought([2]) == 1
    assert not bed.counters["remote_paused"]


def test_what_is_not_removed_by_the_end_is_said(bed, memory, caplog):
    assert bed.store(1) is None
    doubted(bed, memory)
    bed.tier.evict([key(1)])
    bed.tier.close()
    assert "1 chunks that were deleted may still be in" in caplog.text


def test_what_is_deleted_while_it_is_written_is_removed_when_that_is_over(bed, memory, gate):
    write, remove = gate("write", memory), gate("remove", memory)
    copy = bed.start("store", 1, at=1)
    assert write.arrived.acquire(timeout=30)
    bed.tier.evict([key(1)])
    bed.tier.tick()
    assert bed.load(2).kind == "missing"
    assert not remove.arrived.acquire(blocking=False), "it is being written"
    remove.open()
    write.open()
    bed.end(copy)
    assert gone(bed, memory)
