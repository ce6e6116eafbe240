"""The disk tier against a model, and its rules one by one. The folders are real; threads are the tier's own."""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import random
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
from disk_bed import MIB, Bed, closing_all, disk_image, is_file, is_root, key, kv_content, small_disk, without_direct_io
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from steps import lines_run
from traced import traced

from pdx.errors import ArenaFull
from pdx.memory.keys import named_key
from pdx.store import store_tier
from pdx.store.disk import chunk_file, files, folder, pins
from pdx.store.disk.files import SILENT_S, THREADS
from pdx.store.disk.index import MAX_SPARED
from pdx.store.health import SILENT
from pdx.store.tier import Job, Part
from pdx.testing import tier_stage
from pdx.wire.status import COUNTING

CHARGE = 40_960  # of the cap, for a chunk of 32 KiB: a header, the bytes, and perhaps a list of its blocks


@pytest.fixture
def make(tmp_path):
    with closing_all(functools.partial(Bed, tmp_path)) as make_bed:
        yield make_bed


# ---- bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lossless"])
@pytest.mark.parametrize(("nbytes", "layers"), [(5000, 7), (9 * MIB + 1, 3)])
def test_what_is_loaded_by_way_of_the_page_cache_is_what_was_stored(make, monkeypatch, nbytes, layers, codec):
    """Also where a system call does less than it was asked for."""
    write, read = os.pwrite, os.preadv
    without_direct_io(monkeypatch)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, buffers[0][:MIB], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:MIB]], offset))
    bed = make(limit_bytes=64 * MIB, slot_bytes=nbytes, slots=2, codec=codec, content=kv_content)
    assert bed.store(7, nbytes=nbytes, layers=layers)
    file = bed.of(7)
    assert (file.coded > 0) == (codec == "lossless")
    assert bed.disk_bytes <= bed.tier.used_bytes == file.charge
    bed.restart()
    [held] = bed.tier.find([key(7)], 1)
    assert (held.nbytes, held.layers) == (nbytes, layers)
    assert bed.tier.used_bytes == file.charge
    assert bed.load(7, nbytes=nbytes, layers=layers) is None


@is_root
def test_the_cap_is_kept_where_blocks_are_not_of_4_kib(tmp_path):
    """It counted blocks of 4 KiB: 1.24 of the cap was taken where files grow by 64 KiB."""
    with (
        disk_image(tmp_path / "tier", 64 * MIB, "-b 4096 -O bigalloc -C 65536"),
        contextlib.closing(Bed(tmp_path, limit_bytes=8 * MIB, slot_bytes=(100 << 10) + 1, slots=2)) as bed,
    ):
        assert bed.block_bytes == 65_536
        for number in range(100):
            assert bed.store(number)
        assert 0.9 * bed.limit_bytes < bed.disk_bytes <= bed.tier.used_bytes <= bed.limit_bytes
        used = bed.tier.used_bytes
        bed.restart()
        assert bed.tier.used_bytes == used
        assert bed.load(99) is None


@pytest.mark.parametrize("says", [1024, 1 << 20])
def test_files_are_charged_what_they_take_where_a_fake_file_system_says_larger_blocks(tmp_path, monkeypatch, says):
    """As NFS and CephFS do: a file of 36 KiB was charged four megabytes there."""
    real = tuple(os.statvfs(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((says, says, *real[2:])))
    assert folder.block_bytes(tmp_path) == min(says, 4096)


@pytest.mark.parametrize("block_bytes", [512, 1024, 4096, 65_536, 1 << 20])
@pytest.mark.parametrize("nbytes", [1, 4096, 100 << 10, 33 << 20, 1 << 30])
def test_a_file_is_charged_whole_blocks_and_a_list_of_them(nbytes, block_bytes):
    charge = chunk_file.disk_bytes(nbytes, 4, block_bytes=block_bytes)
    blocks = -(-(nbytes + 4096) // block_bytes)
    assert charge % block_bytes == 0
    listed = blocks * chunk_file._LISTED_BYTES // min(block_bytes, 4096) if blocks > chunk_file._INLINE else 0
    assert blocks + listed <= charge // block_bytes <= blocks * 1.03 + 9


@pytest.mark.parametrize("is_older_first", [True, False])
def test_of_two_disks_with_a_named_chunk_the_newer_one_wins(tmp_path, monkeypatch, is_older_first):
    """One of them was left out for a life of the node, in which a client wrote the chunk anew."""
    monkeypatch.setattr(tier_stage, "key", lambda number: named_key(str(number)))
    with closing_all(Bed) as make:
        (tmp_path / "old").mkdir(), (tmp_path / "new").mkdir()
        old, new = (make(tmp_path / name) for name in ("old", "new"))
        for bed in (old, new):
            for number in range(8):
                assert bed.store(number, 0, shards=2)
                assert bed.store(number, 1, shards=2)
            bed.close_tier()
        for path in old.files:
            os.utime(path, (1, 1))
        for bed in (old, new):
            bed.open(wait=False)
        old.tier.siblings, new.tier.siblings = [new.tier], [old.tier]
        first, then = (old, new) if is_older_first else (new, old)
        while not first.is_counted:
            first.turn()
        assert not any(first.has(number, 2) for number in range(8)), "the other one may have newer ones"
        assert "another disk" in first.tier.why_not(named_key("1"))
        while not then.is_counted:
            then.turn()
        old.settle()
        assert [new.has(number, 2) for number in range(8)] == [True] * 8
        assert not any(old.has(number, 2) for number in range(8))
        assert old.files == []
        assert old.tier.named_at == new.tier.named_at == {}


def test_a_disk_whose_files_are_not_told_hides_no_named_chunks_of_others_for_long(tmp_path, monkeypatch):
    """It may have newer ones; that it had them is known when it answers again."""
    monkeypatch.setattr(tier_stage, "key", lambda number: named_key(str(number)))
    real, arrived, opened = os.scandir, threading.Event(), threading.Event()

    def scandir(path):
        if path == new.root:
            arrived.set()
            assert opened.wait(60)
        return real(path)

    with closing_all(Bed) as make:
        (tmp_path / "old").mkdir(), (tmp_path / "new").mkdir()
        old, new = (make(tmp_path / name) for name in ("old", "new"))
        for bed in (old, new):
            assert bed.store(1)
        assert new.store(2)
        for bed in (old, new):
            bed.close_tier()
        os.utime(old.file(1), (1, 1))
        monkeypatch.setattr(os, "scandir", scandir)
        new.open(wait=False)
        assert arrived.wait(60)
        old.open(wait=False)
        old.tier.siblings, new.tier.siblings = [new.tier], [old.tier]
        while not old.is_counted:
            old.turn()
        assert old.store(2)
        assert [old.has(1), old.has(2)] == [False, True], "what was stored since is the newest there can be"
        assert new.tier.status().state == COUNTING
        new.now += SILENT_S + 1
        assert [old.has(1), old.has(2)] == [True, True]
        assert (new.tier.status().state, new.tier.status().is_up) == (SILENT, False)
        assert new.counters["disk_silent"] == 1
        opened.set()
        while not new.is_counted:
            new.turn()
        old.settle()
        new.settle()
        assert [old.has(1), new.has(1)] == [False, True]
        assert [old.has(2), new.has(2)] == [True, False]
        assert new.tier.status().is_up


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


def cached_bytes(path):
    """Of a file, in the page cache. A read that is not to wait has the kernel read ahead, and may find that."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        memory = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(memory), ctypes.c_size_t(len(mapped)), pages) == 0
        del memory  # else it cannot be unmapped
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_the_page_cache_has_no_copy(make):
    bed = make(limit_bytes=64 * MIB, slot_bytes=MIB, slots=2)
    assert bed.store(1, nbytes=MIB)
    assert bed.load(1, nbytes=MIB) is None
    assert cached_bytes(bed.file(1)) == 0
    assert bed.file(1).read_bytes()
    assert cached_bytes(bed.file(1)) > MIB, "that is seen"


def test_a_file_system_without_direct_io_is_said(make, monkeypatch, caplog):
    without_direct_io(monkeypatch)
    bed = make()
    assert bed.store(1)
    assert bed.load(1) is None
    assert bed.tier.status().state == "by way of the page cache"
    assert bed.tier.status().is_up
    assert "no direct I/O" in caplog.text
    assert bed.counters["disk_not_direct"] == 1


# ---- the cap --------------------------------------------------------------------------------


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


def test_a_file_that_makes_room_is_written_anew_unless_it_is_read(make, gate):
    bed = make()
    bed.limit_bytes = 2 * bed.charge
    bed.restart()
    assert bed.store(1)
    assert bed.store(2)
    with bed.file(1).open("rb") as first:
        assert bed.store(3)
        assert is_file(first, bed.file(3))
    whole = bed.file(2).read_bytes()
    reading = gate("read")
    load = bed.start_load(2)
    assert reading.arrived.acquire(timeout=60)
    with bed.file(2).open("rb") as second:
        assert bed.end(bed.start_store(4)) is None
        assert second.read() == whole
    assert not bed.has(2)
    reading.open()
    assert bed.end(load).kind == "missing"  # or all of it, had it been opened before
    bed.settle()
    assert [number for number in (1, 2, 3, 4) if bed.has(number)] == [3, 4]
    assert bed.load(3) is None
    with bed.file(3).open("rb") as first:
        assert bed.store(5)
        assert is_file(first, bed.file(5)), "once it was read it is no one's any more"


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


@pytest.mark.parametrize("is_direct", [True, False])
def test_no_file_has_its_name_before_its_bytes_are_on_the_disk(make, monkeypatch, is_direct):
    """What a machine without power leaves follows from this order, which nothing but the disk may change."""
    if not is_direct:
        without_direct_io(monkeypatch)
    bed = make(limit_bytes=2 * CHARGE)
    calls = []
    for name in ("pwritev", "ftruncate", "utime", "fdatasync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, _name=name, _real=real, **kw: (calls.append(_name), _real(*args, **kw))[1]
        )
    for number in range(4):
        assert bed.store(number)
        assert [calls.pop(), calls.pop()] == ["rename", "fdatasync"], "the last is written in place of the first"
        assert "fdatasync" not in calls
        assert "pwritev" in calls
        calls.clear()


@is_root
@pytest.mark.parametrize(
    "policy", ["lru", *(pytest.param(each, marks=pytest.mark.long) for each in ("s3fifo", "gittins"))]
)
def test_the_cap_holds_at_every_moment(tmp_path, policy):
    """The file system is exactly as large as the cap (and the lock): one byte more would be an error of the disk."""
    random_ = random.Random(policy)
    with (
        small_disk(tmp_path / "tier", MIB // 2 + 8192) as folder,
        contextlib.closing(Bed(folder.parent, limit_bytes=MIB // 2, slots=8, policy=policy)) as bed,
    ):
        copies = []
        for _ in range(600):
            number = random_.randrange(200)
            bed.tier.use([tier_stage.key(number)])
            nbytes = random_.choice([100, 5000, 12_288])  # these take exactly their charge
            copies.append(bed.start_store(number, at=len(copies) % 8, nbytes=nbytes, layers=1))
            assert bed.tier.used_bytes <= MIB // 2
            if len(copies) == 8:
                for copy in copies:
                    if copy is not None:
                        bed.end(copy)
                copies.clear()
        bed.settle()
        assert bed.counters["disk_full"] == 0
        assert bed.counters["disk_stored"] > 100
        assert bed.counters["disk_removed"] > 50
        assert bed.disk_bytes <= bed.tier.used_bytes <= MIB // 2


# ---- many at once ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["write", "remove"])
def test_loads_have_a_thread_whatever_is_stored_or_removed(bed, gate, what):
    assert all(bed.store(number) for number in range(9))
    busy = gate(what)
    for number in range(8):
        if what == "write":
            bed.start_store(20 + number, at=number)
        else:
            bed.tier.evict([key(number)])
    for _ in range(THREADS - 1):
        assert busy.arrived.acquire(timeout=60)
    assert bed.end(bed.start_load(8, at=10)) is None
    assert not busy.arrived.acquire(blocking=False)


def test_what_was_forgotten_is_stored_anew_when_its_old_file_is_gone(bed, gate):
    assert bed.store(1)
    remove = gate("remove")
    assert bed.tier.evict([key(1)]) == 1
    assert remove.arrived.acquire(timeout=60)
    slot = bed.slot(3)
    bed.put(slot, bytes(slot.nbytes))
    copy = bed.copy([key(1)])
    assert list(bed.tier.admit(copy).keys) == [0]
    bed.tier.store(Job(copy.number, [Part(key(1), 0, 4, 0, 4, slot)], slot.nbytes))
    assert not bed.has(1)
    remove.open()
    assert bed.end(copy) is None
    assert bed.has(1)
    assert bed.file(1).read_bytes()[4096:] == bytes(slot.nbytes)
    assert bed.tier.used_bytes == bed.charge


def test_where_too_much_was_forgotten_nothing_from_before_is_written(bed, monkeypatch):
    monkeypatch.setattr(store_tier, "MAX_FORGOTTEN", 2)
    copies = [bed.copy([key(number)]) for number in (1, 9)]
    assert [bed.granted(copy) for copy in copies] == [[0], [0]]
    bed.tier.evict([key(number) for number in range(1, 5)])
    for number, copy in zip((1, 9), copies, strict=True):
        assert bed.end(bed.give("store", copy, number, 0, bed.slot(0))) is None
    assert bed.files == []
    assert bed.store(1), "what comes afterwards is stored"


def test_copies_that_are_over_leave_nothing(bed):
    with traced() as held:
        for _ in range(3000):
            bed.granted(copy := bed.copy([key(1)]))
            bed.tier.copy_ended(copy)
        assert held() < 20_000


def test_what_is_evicted_before_it_is_read_is_a_miss_and_no_fault(bed, gate):
    assert bed.store(1)
    read = gate("read")
    copy = bed.start_load(1)
    assert read.arrived.acquire(timeout=60)
    assert bed.tier.evict([key(1)]) == 1
    while bed.file(1).exists():
        bed.turn()
    read.open()
    assert bed.end(copy).kind == "missing"
    assert bed.counters["disk_missing"] == 0


def test_what_was_forgotten_is_gone_when_the_tier_is_closed(bed, gate):
    """A client's name says nothing of the bytes: the old ones must not come back after a restart."""
    for number in range(12):
        assert bed.store(number)
    remove = gate("remove")
    for number in range(12):
        assert bed.tier.evict([key(number)]) == 1
    assert remove.arrived.acquire(timeout=60)
    remove.open()
    bed.close_tier()
    assert bed.files == []
    bed.open()
    assert not any(bed.has(number) for number in range(12))


def test_a_call_costs_as_much_with_many_stores_under_way_as_with_few(make, gate):
    bed = make(limit_bytes=600 * CHARGE, slots=2)
    assert [bed.store(number) for number in (900, 901)] == [True, True]
    write, copies, costs = gate("write"), {}, []
    for first, count in ((0, 10), (100, 200)):
        copies |= {number: bed.start_store(number) for number in range(first, first + count)}
        with lines_run() as lines:
            bed.tier.evict([key(first), key(900 + len(costs))])
            bed.tier.cancel(copies[first + 1])
            copies[first + count] = bed.start_store(first + count)
            bed.tier.status()
        costs.append(len(lines))
    assert costs[1] <= 1.1 * costs[0]
    write.open()
    ends = {number: bed.end(copy) for number, copy in copies.items()}
    assert [number for number, error in ends.items() if error is not None] == [0, 1, 100, 101]


# ---- starting -------------------------------------------------------------------------------


def test_the_index_is_read_while_the_node_serves(bed, gate):
    for number in range(3):
        assert bed.store(number)
    bed.close_tier()
    salvage = gate("salvage", folder)
    bed.open(wait=False)
    assert salvage.arrived.acquire(timeout=60)
    assert not bed.has(1)
    assert bed.tier.why_not(key(1)) == "has not counted its files yet"
    assert bed.start_store(9) is None  # until it is known how much is there
    assert bed.counters["disk_not_counted"] == 1
    bed.tier.evict([key(2)])
    bed.tier.changed = {}
    salvage.open()
    while not bed.is_counted:
        bed.turn()
    assert set(bed.tier.changed) == {key(number) for number in range(3)}
    bed.settle()
    assert bed.load(1) is None
    assert bed.tier.why_not(key(2)) == ""
    assert not bed.has(2)
    assert not bed.file(2).exists()
    assert bed.store(9)


# ---- the model ------------------------------------------------------------------------------


class DiskMachine(RuleBasedStateMachine):
    """The model is the order of use, each chunk's size, and what requests that wait want; the tier must agree after
    each rule."""

    numbers = st.integers(0, 15)

    @initialize(limit=st.integers(1, 10))
    def start(self, limit):
        self.folder = tempfile.TemporaryDirectory()
        self.bed = Bed(Path(self.folder.name), limit_bytes=limit * 24_576, slot_bytes=16 << 10)
        self.model = OrderedDict()  # number -> bytes
        self.queue = {}  # request -> numbers
        self.bed.wanted = {}
        self.bed.restart()

    def charge(self, nbytes):
        return chunk_file.disk_bytes(nbytes, 4)

    def path(self, number):
        return self.bed.file(number, nbytes=self.model[number])

    @rule(number=numbers, nbytes=st.sampled_from([4, 1000, 8192, 16 << 10]))
    def store(self, number, nbytes):
        is_stored = self.bed.store(number, nbytes=nbytes)
        if number in self.model:
            assert not is_stored
            self.model.move_to_end(number)
            return
        turn, lack = self.turn(number), self.charge(nbytes) - self.bed.limit_bytes
        lack += sum(map(self.charge, self.model.values()))
        gone = self.first(lack, lambda other: turn is None or self.turn(other) is None or self.turn(other) > turn)
        assert is_stored == (lack <= sum(self.charge(self.model[other]) for other in gone))
        if is_stored:
            for other in gone:
                del self.model[other]
            self.model[number] = nbytes

    def turn(self, number):
        """The first request that wants it, and where; None: none does."""
        return next(iter(self.bed.wanted.get(key(number), {}).items()), None)

    def order(self):
        """The first one goes first."""
        queue = sorted((turn, number) for number in self.model if (turn := self.turn(number)) is not None)
        return [number for number in self.model if self.turn(number) is None] + [number for _, number in queue[::-1]]

    def first(self, lack, may_go=lambda number: True):
        """Those that go for so many bytes."""
        gone = []
        for number in filter(may_go, self.order()):
            if lack <= sum(self.charge(self.model[other]) for other in gone):
                break
            gone.append(number)
        return gone

    @rule(numbers=st.lists(numbers, min_size=1, max_size=6, unique=True))
    def want(self, numbers):
        request = max(self.queue, default=0) + 1
        self.queue[request] = numbers
        for place, number in enumerate(numbers):
            self.bed.wanted.setdefault(key(number), {})[request] = place
        self.bed.tier.refresh(list(map(key, numbers)))

    @precondition(lambda self: self.queue)
    @rule(last=st.booleans())
    def want_no_more(self, last):
        numbers = self.queue.pop((max if last else min)(self.queue))
        for number in reversed(numbers):
            requests = self.bed.wanted[key(number)]
            del requests[next(iter(requests)) if not last else max(requests)]
            if not requests:
                del self.bed.wanted[key(number)]
                if number in self.model:
                    self.model.move_to_end(number)
        self.bed.tier.refresh(list(map(key, numbers)))

    @rule(number=st.integers(100, 150), count=st.integers(1, 4))
    def crowd_out(self, number, count):
        """What nobody wants comes, and the oldest goes, file by file."""
        for each in range(number, number + count):
            self.store(each, 16 << 10)
            self.agrees()

    @rule(number=numbers)
    def load(self, number):
        assert self.bed.has(number) == (number in self.model)
        if number in self.model:
            self.model.move_to_end(number)
            self.bed.tier.use([key(number)])  # as the request does that it is loaded for
            assert self.bed.load(number, nbytes=self.model[number]) is None

    @rule(numbers=st.lists(numbers, max_size=4))
    def evict(self, numbers):
        there = set(numbers) & self.model.keys()
        assert self.bed.tier.evict([key(number) for number in numbers]) == len(there)
        self.bed.settle()
        for number in there:
            del self.model[number]

    @rule(limit=st.integers(1, 10))
    def restart(self, limit):
        self.bed.limit_bytes = limit * 24_576
        order = sorted(self.model, key=lambda one: (self.path(one).stat().st_mtime_ns, str(self.path(one))))
        self.bed.restart()
        self.bed.settle()
        self.model = OrderedDict((number, self.model[number]) for number in order)
        for number in self.first(sum(map(self.charge, self.model.values())) - self.bed.limit_bytes):
            del self.model[number]

    @invariant()
    def agrees(self):
        if hasattr(self, "model"):
            assert self.bed.files == sorted(map(self.path, self.model))
            assert [each.file.key for each in self.bed.tier._index._order.peek()] == list(map(key, self.order()))
            assert self.bed.disk_bytes <= self.bed.tier.used_bytes <= self.bed.limit_bytes

    def teardown(self):
        if hasattr(self, "bed"):
            self.bed.close()
            self.folder.cleanup()


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
