"""The disk tier against a model, and its rules: bytes, the cap, many calls at once. Folders and threads are real."""

import contextlib
import ctypes
import mmap
import os
import random
import tempfile
from collections import OrderedDict
from pathlib import Path

import pytest
from disk_bed import MIB, Bed, disk_image, is_file, is_root, key, kv_content, small_disk, without_direct_io
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from steps import lines_run
from traced import traced

from pdx.store import store_tier
from pdx.store.disk import chunk_file, folder
from pdx.store.disk.files import THREADS
from pdx.store.tier import Job, Part
from pdx.testing import tier_stage

CHARGE = 40_960  # of the cap, for a chunk of 32 KiB: a header, the bytes, and perhaps a list of its blocks


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
