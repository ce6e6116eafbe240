"""Which files a disk can find, and which it gives up first: by policy, beside what is pinned, in memory, or wanted."""

from __future__ import annotations

import errno
import os
import time

import pytest
from disk_bed import key
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_models import POLICIES, ROOM
from steps import lines_run

from pdx.errors import ArenaFull, ConfigError
from pdx.store.disk import files, pins
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.index import MAX_SPARED, FileIndex
from pdx.telemetry.env import Env

FILE_BYTES = ChunkFile(b"", 0, 1, 4096).charge


def never(one):
    return False


def put(index, number, shards=1, before=None):
    """As a tier that stores it; whether it had room, or has made some."""
    files = [ChunkFile(key(number), shard, 1, 4096) for shard in range(shards)]
    lack = index.shortfall(shards * FILE_BYTES)
    gone, _ = index.oldest(lack, 0, never, key(number))
    if lack > sum(file.charge for file in gone):
        return False
    index.remove(gone)
    index.used_bytes -= sum(file.charge for file in gone)
    for file in files:
        index.add(file, None if before is None else key(before))
    return True


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_goes_from_its_end(policy):
    """Its chunks are stored from its beginning on, and what leads up to one of them is told."""
    index = FileIndex(ROOM * FILE_BYTES, Env(), policy=policy)
    for number in range(ROOM):
        put(index, number, before=number - 1 if number else None)
    index.refresh([key(number) for number in range(ROOM)])  # their copy is over
    for number in range(100, 103):
        put(index, number)
    assert [number for number in range(ROOM) if key(number) in index] == list(range(ROOM - 3))


# ---- pins ---------------------------------------------------------------------------------


def filled(count):
    index = FileIndex(1 << 40, Env())
    for number in range(count):
        index.add_oldest(ChunkFile(number.to_bytes(16, "big"), 0, 4, 4096))
    return index


def test_a_search_for_room_looks_at_no_pinned_file():
    """Its cost is the same with a hundred times as many."""

    def lines(count):
        index = filled(count)
        for one in index.keys():  # noqa: SIM118 - no dict
            index.pin(one, 1)
        with lines_run() as counted:
            found = index.oldest(1, 1, never)
        assert found == ([], [])
        return len(counted)

    assert lines(1000) == lines(10)


def test_pins_change_what_goes_first_and_not_what_is_found():
    index = filled(4)
    keys = index.keys()
    charge = index.of(keys[0])[0].charge
    index.pin(keys[3], 1)
    index.pin(keys[3], 1)
    assert index.pinned_bytes == charge
    assert sorted(index.keys()) == sorted(keys)
    assert {file.key for file in index.some()} == set(keys)
    assert all(one in index and index.held(one, 1) is not None for one in keys)
    index.use(keys)
    assert keys[3] not in {file.key for file in index.oldest(1 << 30, 0, never)[0]}
    index.add(ChunkFile(keys[3], 1, 4, 4096))
    assert index.pinned_bytes == 2 * charge
    assert index.held(keys[3], 2) is not None
    index.pin(keys[3], -1)
    assert index.pinned_bytes == 2 * charge
    index.pin(keys[3], -1)
    assert (index.pinned_bytes, dict(index.pins)) == (0, {})
    assert keys[3] in {file.key for file in index.oldest(1 << 30, 0, never)[0]}
    index.pin(keys[3], 1)
    index.remove(index.of(keys[3]))
    assert keys[3] not in index
    assert (index.pinned_bytes, dict(index.pins), index.num_files) == (0, {}, 3)


def test_a_pinned_chunk_in_another_file_is_pinned_still():
    index = FileIndex(1 << 40, Env())
    old, new = ChunkFile(b"k" * 16, 0, 4, 1000), ChunkFile(b"k" * 16, 0, 4, 500)
    index.add(old)
    index.pin(old.key, 1)
    index.replace(old, new)
    assert (index.of(old.key), index.pinned_bytes, index.nbytes) == ([new], new.charge, new.charge)
    assert index.oldest(1, 0, never) == ([], [])
    index.pin(old.key, -1)
    assert (index.pinned_bytes, index.oldest(1, 0, never)[0]) == (0, [new])


# ---- what the queue wants, whatever the policy ------------------------------------------------

requests = st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True)
kinds = st.sampled_from(["store"] * 6 + ["use", "use", "pin", "unpin", "turn", "leave"])
steps = st.lists(st.tuples(st.just("want"), requests) | st.tuples(kinds, st.integers(0, 15)), min_size=20, max_size=60)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(100))
@given(steps=steps, shards=st.integers(1, 2))
def test_in_a_storm_the_queues_wants_leave_last_and_nothing_is_above_the_cap(policy, steps, shards):
    wanted, queue, limit_bytes = {}, {}, 6 * shards * FILE_BYTES
    index = FileIndex(limit_bytes, Env(), wanted, policy)

    def turn(number):
        return next(iter(wanted.get(key(number), {}).items()), None)

    def stored(number):
        pinned = set(index.pins)
        before = {each for each in range(16) if key(each) in index}
        is_stored = put(index, number, shards)
        gone = {each for each in before if key(each) not in index}
        assert not pinned & set(map(key, gone)), "what is pinned stays"
        may_go = {each for each in before if key(each) not in pinned}
        if turn(number) is not None:
            may_go = {each for each in may_go if turn(each) is None or turn(each) > turn(number)}
        assert is_stored == (len(before) < 6 or bool(may_go)), "whoever may have room has it"
        if gone:
            (victim,) = gone
            others = may_go - gone
            assert victim in may_go
            assert turn(victim) is None or all(turn(each) and turn(each) < turn(victim) for each in others)

    for number in range(6):
        assert put(index, number, shards)
    for what, argument in steps:
        one = argument if what != "want" else -1
        if what == "want":
            request = max(queue, default=0) + 1
            queue[request] = argument
            for place, number in enumerate(argument):
                wanted.setdefault(key(number), {})[request] = place
            index.refresh(list(map(key, argument)))
        elif what in ("turn", "leave") and queue:
            request = (min if what == "turn" else max)(queue)
            for number in (left := queue.pop(request)):
                del wanted[key(number)][request]
                if not wanted[key(number)]:
                    del wanted[key(number)]
            index.refresh(list(map(key, left)))
        elif what == "store" and key(one) not in index:
            stored(one)
        elif what == "use" and key(one) in index:
            index.use([key(one)])
        elif what in ("pin", "unpin") and key(one) in index:
            index.pin(key(one), 1 if what == "pin" else -1)
        assert index.used_bytes == index.nbytes == index.num_files * FILE_BYTES <= limit_bytes
    for request in list(queue):
        del queue[request]
    wanted.clear()
    index.refresh(index.keys())
    index.remove([file for one in index.keys() for file in index.of(one)])  # noqa: SIM118 - no dict
    assert (index.num_files, index.nbytes, index.oldest(1, 1, never)) == (0, 0, ([], []))


def test_a_shard_never_takes_the_place_of_another_one_of_its_chunk():
    wanted = {key(0): {1: 0}, key(1): {2: 0}}
    index = FileIndex(2 * FILE_BYTES, Env(), wanted)
    for number in range(2):
        assert put(index, number)
    assert index.oldest(FILE_BYTES, 0, never, key(1)) == ([], [])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_victim_costs_as_much_among_many_files_as_among_few(policy):
    """Of which requests that wait will use half."""

    def lines(count):
        wanted = {}
        index = FileIndex(count * FILE_BYTES, Env(), wanted, policy)
        for number in range(count):
            put(index, number)
        wanted |= {key(number): {1 + number: 0} for number in range(count // 2)}
        index.refresh(index.keys())
        with lines_run() as counted:
            assert put(index, count)
        return len(counted)

    assert lines(900) <= lines(9) + 40  # a sorted list of more than a thousand has parts of that size


# ---- in a tier --------------------------------------------------------------------------------

CHARGE = 40_960  # of the cap, for a chunk of 32 KiB


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_restart_files_go_by_when_they_were_used(make, policy):
    bed = make(limit_bytes=8 * CHARGE, policy=policy)
    now_ns = time.time_ns()
    for number in range(8):
        assert bed.store(number)
        os.utime(bed.file(number), ns=(0, now_ns - (number * 5 % 8) * 10**9))
    bed.restart()
    order = sorted(range(8), key=lambda number: -(number * 5 % 8))
    for number in range(8):
        assert [each for each in order if bed.has(each)] == order[number:]
        assert bed.store(8 + number)


@pytest.mark.parametrize("name", ["age", "idle"])
def test_after_its_time_a_file_is_removed_though_there_is_room_also_after_a_restart(make, name):
    bed = make(policy=f"{name}:3600")
    for number in range(4):
        assert bed.store(number)
    bed.tier.pin([key(2)], pinned=True, share=1.0)
    bed.tier.tick()
    bed.settle()
    for number in (1, 2, 3):
        os.utime(bed.file(number), ns=(0, time.time_ns() - (3600 if number < 3 else 1000) * 10**9))
    bed.restart()
    bed.tier.tick()
    bed.settle()
    assert [number for number in range(4) if bed.has(number)] == [0, 2, 3], "what is pinned stays"
    assert bed.files == sorted(map(bed.file, (0, 2, 3)))
    assert bed.counters["disk_expired"] == 1


def test_a_policy_that_there_is_not_is_refused_by_the_name_of_its_option():
    with pytest.raises(ConfigError, match=r"--disk-policy fifo: no policy is named 'fifo'; there are lru, s3fifo"):
        FileIndex(1 << 20, Env(), policy="fifo")


def test_what_memory_hits_counts_as_used(make):
    """The disk is not asked for it as long as memory has it."""
    bed = make(limit_bytes=4 * CHARGE)
    hit, removed = bed.used, bed.gone
    hit.update([key(0), key(2)])
    for number in range(4):
        assert bed.store(number)
        os.utime(bed.file(number), ns=(0, number * 1000))
    assert bed.load(0) is None
    bed.until(lambda: bed.file(0).stat().st_mtime_ns > 0)  # its file says so now, and not again after the next line
    os.utime(bed.file(0), ns=(0, 3))
    assert bed.store(4)
    assert bed.store(5)
    assert removed == [key(1), key(3)]
    assert sorted(bed.files) == sorted(bed.file(number) for number in (0, 2, 4, 5))
    hit.clear()
    bed.restart()
    bed.limit_bytes = 3 * CHARGE
    bed.restart()
    bed.settle()
    assert sorted(bed.files) == sorted(bed.file(number) for number in (2, 4, 5)), "the order outlives the process"


def test_where_memory_hits_all_of_it_the_oldest_makes_room(make):
    bed = make(limit_bytes=4 * CHARGE)
    bed.is_used, removed, bed.tier.changed = lambda one: True, bed.gone, {}
    for number in range(8):
        assert bed.store(number)
    assert removed == [key(number) for number in range(4)]
    assert [each for each in bed.tier.changed if not bed.tier.holds(each)] == removed
    assert len(bed.files) == 4


def test_a_store_asks_for_few_chunks_whether_memory_hits_them(make):
    asked = []
    bed = make(limit_bytes=100 * CHARGE)
    bed.is_used = lambda one: asked.append(one) or True
    for number in range(100):
        assert bed.store(number)
    assert not asked
    assert bed.store(100)
    assert asked == [key(number) for number in range(MAX_SPARED)]
    assert not bed.has(MAX_SPARED)
    assert all(bed.has(number) for number in range(MAX_SPARED))


def test_the_index_is_bounded(bed, monkeypatch, caplog):
    for number in range(8):
        assert bed.store(number)
        os.utime(bed.file(number), ns=(0, number))
    monkeypatch.setattr(files, "MAX_FILES", 5)
    bed.restart()
    bed.settle()
    assert sorted(bed.files) == sorted(bed.file(number) for number in range(3, 8))
    assert bed.store(8)
    assert [number for number in range(9) if bed.has(number)] == [4, 5, 6, 7, 8]
    assert len(bed.files) == bed.tier.num_chunks == 5
    assert bed.tier.used_bytes == 5 * bed.charge
    assert bed.counters["disk_index_full"] == 4
    assert sum("disk_index_full" in one.message for one in caplog.records) == 1
    copies = [bed.start_store(number, at=number) for number in range(9, 14)]
    assert bed.tier.num_chunks == 0, "each has a place before it is written"
    assert [bed.end(copy) for copy in copies] == [None] * 5
    bed.settle()
    assert len(bed.files) == bed.tier.num_chunks == 5


# ---- pins in a tier ------------------------------------------------------------------------


def pinned(bed):
    return [number for number in range(16) if bed.tier.is_pinned(key(number))]


def test_pins_outlive_the_node_and_end_with_their_chunks(make):
    bed = make(limit_bytes=4 * CHARGE)
    for number in range(4):
        assert bed.store(number)
    bed.tier.pin([key(1), key(2), key(3)], pinned=True, share=1.0)
    bed.tier.pin([key(1), key(2)], pinned=True, share=1.0)
    bed.tier.pin([key(2), key(2)], pinned=False, share=1.0)
    bed.settle()
    bed.tier.evict([key(3)])
    bed.settle()
    assert pins.read(bed.root) == {key(1): 2}, "so that a node that is killed now leaves no others"
    bed.restart()
    assert pinned(bed) == [1]
    bed.tier.pin([key(0)], pinned=True, share=0.5)
    with pytest.raises(ArenaFull, match=f"{3 * bed.charge} bytes would be pinned"):
        bed.tier.pin([key(2)], pinned=True, share=0.5)
    bed.tier.pin([key(0)], pinned=False, share=0.5)
    for number in range(4, 12):
        assert bed.store(number)
    assert bed.has(1)
    bed.tier.pin([key(11)], pinned=True, share=1.0)  # which a thread notes …
    bed.tier.pin([key(1)], pinned=False, share=1.0)
    assert pinned(bed) == [1, 11], "it was pinned twice"
    bed.tier.pin([key(1)], pinned=False, share=1.0)
    bed.tier.evict([key(11)])
    bed.restart()  # at once: what no thread has written is written by then
    assert pinned(bed) == []


def test_a_pin_that_could_not_be_noted_is_noted_with_the_next_one(make, monkeypatch):
    bed = make()
    assert bed.store(1)
    assert bed.store(2)

    def full(fd):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", full)
        bed.tier.pin([key(1)], pinned=True, share=1.0)
        bed.settle()
    assert pins.read(bed.root) == {}
    bed.tier.pin([key(2)], pinned=True, share=1.0)
    bed.settle()
    assert pins.read(bed.root) == {key(1): 1, key(2): 1}


def test_pins_of_what_is_not_there_or_does_not_fit_any_more_are_dropped(make, caplog):
    bed = make()
    for number in range(4):
        assert bed.store(number)
    bed.tier.pin([key(number) for number in range(4)], pinned=True, share=1.0)
    bed.close_tier()
    bed.file(0).unlink()
    bed.limit_bytes = 2 * CHARGE
    bed.open()
    bed.settle()
    kept = pinned(bed)
    assert len(kept) == len(bed.files) == 2
    assert bed.tier.used_bytes == 2 * CHARGE
    assert bed.counters["disk_pins_dropped"] == 1
    assert "cap is smaller" in caplog.text
    assert pins.read(bed.root) == {key(number): 1 for number in kept}
    bed.restart()
    assert pinned(bed) == kept


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", {}),
        (b"pdx pins 1\n" + key(1).hex().encode() + b" 3\n" + key(2).hex().encode() + b" 2", {key(1): 3}),
        (b"pdx pins 1\n" + key(1).hex().encode() + b" 3\nnonsense\n" + key(1).hex().encode() + b" 1\n", {key(1): 1}),
    ],
)
def test_what_a_killed_node_has_left_of_the_pins_is_read(tmp_path, text, found):
    (tmp_path / pins.NAME).write_bytes(text)
    assert pins.read(tmp_path) == found
    pins.write(tmp_path, {key(3): 1})
    assert pins.read(tmp_path) == found | {key(3): 1}
    others = {number.to_bytes(16, "little"): 0 for number in range(40_000)}  # with them it is long: it is written anew
    pins.write(tmp_path, others | {key(3): 0, key(4): 5})
    assert pins.read(tmp_path) == found | {key(4): 5}
    assert (tmp_path / pins.NAME).stat().st_size == 11 + sum(34 + 1 for _ in found) + 35
