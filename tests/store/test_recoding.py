"""Chunks of a disk or a remote store that are written anew in another form: there is the old one, or the new one."""

from __future__ import annotations

import errno
import functools
import os
import random

import pytest
from disk_bed import KV_BYTES, MIB, KvBed, closing_all, content, is_file, key, kv

from pdx.errors import TierError
from pdx.memory.form import Form
from pdx.store import chunk_format
from pdx.store.codecs.codec import LOSSLESS, NONE
from pdx.store.disk import chunk_file
from pdx.store.health import MAX_ERRORS

FORM = Form("int8", "bf16", (1, 4, 16, 2, 64))  # pages of 16 KiB: 16 in a chunk, 4 in a slice
CHARGE = chunk_file.disk_bytes(KV_BYTES, 4)


@pytest.fixture
def make(tmp_path):
    with closing_all(functools.partial(KvBed, tmp_path, slot_bytes=KV_BYTES, limit_bytes=16 * MIB)) as make_bed:
        yield make_bed


def until_over(bed, handle):
    while not handle.is_over:
        bed.turn()
    bed.settle()
    return handle


def recode(bed, numbers, codec, to=None, told=None):
    pairs = [(key(number), key(number if to is None else number + to)) for number in numbers]
    told = [] if told is None else told
    return until_over(bed, bed.tier.recode(pairs, codec, 1, lambda *each: told.append(each)))


def account_is_true(bed):
    assert bed.tier.is_idle
    files = bed.kept
    assert sorted(bed.tier.keys()) == [file.key for file in files]
    assert all(bed.tier.find([file.key], 1) for file in files)
    assert bed.tier.num_chunks == len(files) == len(bed.files)
    assert bed.tier.used_bytes == sum(file.charge for file in files)
    assert bed.disk_bytes <= bed.tier.used_bytes <= bed.limit_bytes


def nothing_is_left(bed):
    """Of what was under way: all that is there can be removed, and each chunk stored anew."""
    account_is_true(bed)
    bed.tier.evict(bed.tier.keys())
    bed.settle()
    assert (bed.tier.used_bytes, bed.files) == (0, [])
    for number in (*range(8), *range(101, 104)):
        assert bed.store(number)


def test_files_are_encoded_and_decoded_in_place(bed):
    for number in range(6):
        assert bed.store(number)
    before, times = bed.tier.used_bytes, {number: bed.path(number).stat().st_mtime_ns for number in range(6)}
    told = []
    handle = recode(bed, range(6), LOSSLESS, told=told)
    assert (handle.total, handle.done, handle.failed) == (6, 6, {})
    assert sorted(told) == [(key(number), None) for number in range(6)]
    assert bed.tier.used_bytes < 0.75 * before
    account_is_true(bed)
    assert all(bed.coded(number) for number in range(6))
    assert {number: bed.path(number).stat().st_mtime_ns for number in range(6)} == times, "the order of use"
    assert recode(bed, range(6), LOSSLESS).done == 6, "they are in that form already"
    for number in range(6):
        assert bed.load(number) is None
    recode(bed, range(6), NONE)
    assert bed.tier.used_bytes == before
    bed.restart()
    account_is_true(bed)
    for number in range(6):
        assert bed.load(number) is None


def test_what_does_not_shrink_stays_as_it_is(make):
    bed = make(content=content)
    assert bed.store(1)
    assert recode(bed, [1], LOSSLESS).done == 1
    assert bed.coded(1) == 0
    account_is_true(bed)
    assert bed.load(1) is None


def test_a_chunk_that_was_pinned_since_it_was_asked_is_not_replaced_with_a_loss(bed):
    for number in (1, 2, 3):
        assert bed.store(number)
    told, pairs = {}, [(key(number), key(number + 100)) for number in (1, 2, 3)]
    bed.tier.pin([key(2)], pinned=True, share=1.0)  # before it is begun …
    handle = bed.tier.recode(pairs, str(FORM), 1, told.__setitem__)
    bed.tier.pin([key(3)], pinned=True, share=1.0)  # … and after
    until_over(bed, handle)
    bed.tier.pin([key(2), key(3)], pinned=False, share=1.0)
    bed.settle()
    assert {number: error and error.kind for number, error in told.items()} == {
        key(1): None,
        key(2): "pinned",
        key(3): "pinned",
    }
    assert [bed.has(number) for number in (1, 2, 3, 101, 102, 103)] == [False, True, True, True, False, False]
    nothing_is_left(bed)


def test_what_is_not_there_or_would_meet_another_is_told(bed):
    for number in (1, 101):
        assert bed.store(number)
    assert recode(bed, [7], LOSSLESS).failed == {"missing": 1}
    assert recode(bed, [1], str(FORM), to=100).failed == {"busy": 1}
    assert bed.load(1) is None
    assert bed.load(101) is None
    nothing_is_left(bed)


def test_a_form_that_is_not_for_these_chunks_leaves_them(make):
    bed = make(slot_bytes=40_000)
    assert bed.store(1)
    assert recode(bed, [1], str(FORM), to=100).failed == {"not_encoded": 1}
    assert bed.load(1) is None
    nothing_is_left(bed)


def test_the_cap_holds_meanwhile(make):
    """Where there is no room for both files of a chunk, others make it; the chunk itself does not."""
    bed = make(limit_bytes=4 * CHARGE)
    for number in range(4):
        assert bed.store(number)
    assert recode(bed, [0, 3], LOSSLESS).done == 2
    assert bed.tier.num_chunks == 2
    assert bed.load(0) is None
    account_is_true(bed)


def test_what_cannot_be_read_leaves_no_file_where_another_was_to_make_room(make):
    bed = make(limit_bytes=4 * CHARGE)
    for number in range(4):
        assert bed.store(number)
    with open(bed.path(3), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    assert recode(bed, [3], LOSSLESS).failed == {"corrupt": 1}
    assert [bed.has(number) for number in range(4)] == [False, True, True, False]
    nothing_is_left(bed)


def test_a_chunk_makes_no_room_for_itself(make):
    bed = make(limit_bytes=CHARGE)
    assert bed.store(1)
    assert recode(bed, [1], LOSSLESS).failed == {"busy": 1}
    assert bed.load(1) is None
    nothing_is_left(bed)


def test_a_load_that_comes_to_the_old_file_too_late_reads_the_new_one(bed, gate):
    assert bed.store(1)
    gated = gate("load", chunk_format)
    copy = bed.start_load(1)
    assert gated.arrived.acquire(timeout=60)
    assert until_over_but_loads(bed, bed.tier.recode([(key(1), key(1))], LOSSLESS, 1, print)).done == 1
    while len(bed.files) > 1:
        bed.turn()
    gated.open()
    assert bed.end(copy) is None
    assert bed.bytes_at(bed.slot(1)) == kv(1 << 4, KV_BYTES)
    bed.settle()
    nothing_is_left(bed)
    assert "disk_missing" not in bed.counters


def until_over_but_loads(bed, handle):
    while not handle.is_over:
        bed.turn()
    return handle


def test_what_is_deleted_meanwhile_is_gone(bed, gate):
    for number in (1, 2):
        assert bed.store(number)
    gated = gate("contents")
    handles = [
        bed.tier.recode([(key(1), key(1))], LOSSLESS, 1, print),
        bed.tier.recode([(key(2), key(102))], str(FORM), 1, print),
    ]
    for _ in handles:
        assert gated.arrived.acquire(timeout=60)
    assert bed.tier.evict([key(1), key(2)]) == 2
    gated.open()
    for handle in handles:
        until_over(bed, handle)
    assert [handle.done for handle in handles] == [0, 0]
    assert bed.files == []
    nothing_is_left(bed)


def test_a_file_that_is_being_removed_is_not_written_at_the_same_time(bed, gate):
    assert bed.store(1)
    gated = gate("remove")
    assert until_over_but_loads(bed, bed.tier.recode([(key(1), key(1))], LOSSLESS, 1, print)).done == 1
    assert gated.arrived.acquire(timeout=60)
    handle = until_over_but_loads(bed, bed.tier.recode([(key(1), key(1))], NONE, 1, print))
    assert handle.failed == {"busy": 1}
    gated.open()
    bed.settle()
    assert bed.load(1) is None
    nothing_is_left(bed)


def test_a_file_is_not_overwritten_while_it_is_read_for_another_form(make, gate):
    """It makes room for another chunk meanwhile, and would be written anew for that."""
    bed = make(limit_bytes=2 * CHARGE)
    assert bed.store(1)
    read = gate("preadv", os)
    handle = bed.tier.recode([(key(1), key(1))], LOSSLESS, 1, print)
    assert read.arrived.acquire(timeout=60)
    assert bed.end(bed.start_store(2, at=2)) is None
    read.open()
    until_over(bed, handle)
    assert (handle.failed, bed.counters["disk_corrupt"]) == ({}, 0)
    assert [bed.has(1), bed.has(2)] == [False, True]
    nothing_is_left(bed)
    assert bed.store(1)
    assert bed.store(2)
    with bed.file(1).open("rb") as oldest:
        assert bed.store(3)
        assert is_file(oldest, bed.file(3)), "it is written anew once it is read no more"


def test_it_can_be_cancelled(bed, gate):
    for number in range(10):
        assert bed.store(number)
    gated = gate("contents")
    told = []
    handle = bed.tier.recode(
        [(key(number), key(number)) for number in range(10)], LOSSLESS, 1, lambda *each: told.append(each)
    )
    assert gated.arrived.acquire(timeout=60)
    assert bed.end(bed.start_store(20, at=2)) is None, "it takes not all threads"
    handle.cancel()
    gated.open()
    until_over(bed, handle)
    assert handle.failed == {"cancelled": 10}
    assert len(told) == 10
    for number in range(10):
        assert bed.load(number) is None
    nothing_is_left(bed)


def test_a_disk_that_is_full_leaves_the_old_one(bed, monkeypatch):
    assert bed.store(1)

    def full(*args):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert recode(bed, [1], LOSSLESS).failed == {"full": 1}
        assert bed.load(1) is None
    account_is_true(bed)


@pytest.mark.parametrize("to", [None, 100])
@pytest.mark.parametrize("call", ["rename", "unlink", "fsync"])
def test_whenever_the_node_is_killed_the_next_one_has_the_old_or_the_new(bed, monkeypatch, call, to):
    """Whatever a system call would have done after that has not happened."""
    assert bed.store(1)
    codec = LOSSLESS if to is None else str(FORM)
    pid = os.fork()
    if not pid:  # a copy of this process, of one thread, does what a thread of the tier does, and dies
        source = bed.of(1)
        path = chunk_file.path_of(bed.root, source)
        monkeypatch.setattr(os, call, lambda *args, **settings: os._exit(0))
        from pdx.memory.slot import Slot
        from pdx.store.tier import Part

        found, used_ns = chunk_file.contents(path, source, lambda: False, is_direct=False)
        new = key(1 if to is None else 101)
        part = Part(new, 0, 4, 0, 4, Slot(0, KV_BYTES, 0))
        target = chunk_file.path_of(bed.root, chunk_file.ChunkFile(new, 0, 4, KV_BYTES))
        chunk_file.write(target, part, found, lambda: False, codec=codec, used_ns=used_ns)
        chunk_file.remove(path)
        os._exit(0)
    os.waitpid(pid, 0)
    bed.restart()
    bed.settle()
    account_is_true(bed)
    is_old, is_new = bed.has(1), to is not None and bed.has(101)
    assert is_old or is_new
    if is_old:
        assert bed.load(1) is None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_whatever_is_under_way_at_once_no_wrong_byte_is_read_and_the_account_is_true(make, seed):
    bed = make(limit_bytes=10 * CHARGE)
    random_ = random.Random(seed)
    for _ in range(20):
        copies, handles = [], []
        form = random_.choice(["", LOSSLESS])
        for at in range(10):
            number = random_.randrange(8)
            if (what := random_.random()) < 0.35:
                copies.append((number, at, bed.start_store(number, at=at, form=form)))
            elif what < 0.6 and bed.has(number):
                copies.append((number, at, bed.start_load(number, at=at)))
            elif what < 0.9:
                codec = random_.choice([LOSSLESS, NONE])
                handles.append(bed.tier.recode([(key(number), key(number))], codec, 1, print))
            elif what < 0.95:
                bed.tier.evict([key(number)])
            elif copies and copies[-1][2] is not None:
                bed.tier.cancel(copies[-1][2])
        for number, at, copy in copies:
            error = bed.end(copy) if copy is not None else None
            assert error is None or error.kind in ("cancelled", "busy", "missing")
            if copy is not None and error is None:
                assert bed.bytes_at(bed.slot(at)) == kv(number << 4, KV_BYTES)
        for handle in handles:
            until_over_but_loads(bed, handle)
        bed.settle()
        assert bed.disk_bytes <= bed.tier.used_bytes <= bed.limit_bytes
    bed.settle()
    account_is_true(bed)
    assert bed.counters["disk_corrupt"] == bed.counters["disk_failed"] == 0
    before = bed.tier.used_bytes
    bed.restart()
    assert bed.tier.used_bytes == before
    nothing_is_left(bed)


# ---- a store that nodes share ----------------------------------------------------------------


def zeros(number, shard, nbytes):
    return bytes(nbytes)


def test_what_no_arena_of_this_node_could_take_is_not_decoded(over_memory, memory):
    """An encoded object of a few bytes may stand for any number of them."""
    large, small = (
        over_memory(slot_bytes=nbytes, slots=4, codec=LOSSLESS, content=zeros).opened()
        for nbytes in (8 * MIB, MIB // 4)
    )
    assert large.store(1) is None
    [name] = memory.names()
    before = memory.chunks[name]
    assert len(before) < MIB
    handle = small.tier.recode([(key(1), key(1))], NONE, 1, print)
    while not handle.is_over:
        small.turn()
    assert handle.failed == {"too_large": 1}
    assert memory.chunks[name] == before


def test_a_store_that_takes_no_other_form_is_read_on(over_memory, memory, monkeypatch):
    bed = over_memory().opened()
    assert all(bed.store(number) is None for number in range(MAX_ERRORS))

    def refuse(name, data):
        raise TierError("asked to", "denied")

    monkeypatch.setattr(memory, "write", refuse)
    assert recode(bed, range(MAX_ERRORS), LOSSLESS).failed == {"denied": MAX_ERRORS}
    assert bed.sought(range(MAX_ERRORS)) == MAX_ERRORS
    assert not bed.counters["remote_paused"]
