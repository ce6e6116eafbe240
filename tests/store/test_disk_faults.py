"""Each fault of a disk costs a miss and a counter. The faults are real but for those that a test's name calls fake."""

import array
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import subprocess
import threading
import time

import pytest
from disk_bed import MIB, Bed, is_root, key, small_disk
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traced import traced

from pdx.config import NodeConfig
from pdx.errors import ConfigError, TierError
from pdx.store import chunk_format, store_tier
from pdx.store.disk import chunk_file, tier
from pdx.store.disk.files import SILENT_S, THREADS
from pdx.store.disk.index import FULL_S
from pdx.store.disk.tier import JOIN_S, DiskTier
from pdx.store.health import MAX_ERRORS, PAUSE_S
from pdx.store.tier import Job, Part
from pdx.store.tier_setup import open_below

_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10


@pytest.fixture
def bed(tmp_path):
    bed = Bed(tmp_path)
    yield bed
    bed.close()


@contextlib.contextmanager
def immutable(path):
    """Nothing can be made or removed in this folder, not even by root."""
    fd = os.open(path, os.O_RDONLY)

    def put(bit):
        flags = array.array("l", [0])
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        flags[0] = flags[0] & ~_IMMUTABLE | bit
        fcntl.ioctl(fd, _SET_FLAGS, flags)

    try:
        try:
            put(_IMMUTABLE)
        except OSError as error:
            pytest.skip(f"no immutable folders here: {error}")
        yield
        put(0)
    finally:
        os.close(fd)


def lost(bed, number, kind):
    """The load of a chunk fails so; afterwards it is not there, and others are."""
    error = bed.load(number)
    assert isinstance(error, TierError)
    assert error.kind == kind
    assert bed.counters[f"disk_{kind}"] == 1
    assert not bed.has(number)
    assert not os.path.lexists(bed.file(number))
    assert bed.tier.used_bytes == bed.charge * len(bed.files)
    assert bed.store(number)
    assert bed.load(number) is None


# ---- reading --------------------------------------------------------------------------------


def test_whatever_keeps_a_file_from_being_verified_is_said_as_of_the_disk(bed):
    """A probe that meets it has the disk stay in doubt, and warns."""
    assert bed.store(1)
    path = bed.file(1)
    shutil.copy(path, bed.file(2))
    with pytest.raises(TierError, match="another chunk"):
        chunk_file.verify(bed.file(2), is_direct=False)
    shutil.rmtree(path.parent)
    with pytest.raises(FileNotFoundError):
        chunk_file.verify(path, is_direct=False)
    path.parent.write_bytes(b"")
    with pytest.raises(TierError, match="cannot be read: Not a directory") as raised:
        chunk_file.verify(path, is_direct=False)
    assert raised.value.kind == "read_failed"


def test_a_node_that_starts_finds_what_is_whole_removes_what_is_broken_and_leaves_what_no_tier_wrote(
    bed, tmp_path, monkeypatch
):
    for number in range(1, 6):
        assert bed.store(number)
    bed.close_tier()
    os.truncate(bed.file(1), 0)
    os.truncate(bed.file(2), 36_863)
    bed.file(3).rename(tmp_path / "elsewhere")
    bed.file(3).symlink_to(tmp_path / "elsewhere")
    bed.file(6).with_suffix(".partial").write_bytes(b"")
    in_their_places = [bed.file(7), bed.file(8).with_suffix(".partial")]
    others = [bed.root / "01" / bed.file(9).name, *(bed.root / name / "notes.txt" for name in ("", "ab", "lost+found"))]
    mine = [*(folder / "mine" for folder in in_their_places), *others]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    real = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("lost+found"):  # a disk's own, which its user may not read
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    bed.open()
    assert [number for number in range(1, 10) if bed.has(number)] == [4, 5]
    assert [bed.load(number) for number in (4, 5)] == [None, None]
    kinds = {kind: bed.counters[f"disk_{kind}"] for kind in ("truncated", "corrupt", "unfinished", "foreign")}
    assert kinds == {"truncated": 2, "corrupt": 2, "unfinished": 2, "foreign": 2}
    assert bed.tier.used_bytes == 2 * bed.charge + sum(folder.stat().st_blocks * 512 for folder in in_their_places)
    assert not any(os.path.lexists(bed.file(number)) for number in (1, 2, 3))
    assert (tmp_path / "elsewhere").exists(), "the link is removed, and not what it leads to"
    assert all(path.read_text() == "mine" for path in mine)
    assert [bed.store(number) for number in (7, 8, 9)] == [False, False, True]


@pytest.mark.parametrize(("layers", "nbytes"), [(1, 0), (0, 4096)])
def test_a_file_whose_name_says_no_bytes_or_no_slices_is_no_tiers(bed, layers, nbytes):
    """There would be room for no bytes, which is none, or nothing to wait for."""
    assert bed.store(1)
    bed.close_tier()
    path = bed.file(1).with_name(f"{key(2).hex()}-0-{layers}-{nbytes}.chunk")
    path.write_bytes(bytes(chunk_format.header_bytes(layers) + nbytes))
    bed.open()
    assert bed.tier.keys() == [key(1)]
    assert bed.counters["disk_foreign"] == 1
    assert path.exists()


@pytest.mark.long  # the suite of tiers flips some
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found_and_costs_a_miss_or_nothing(bed, data):
    assert bed.has(1) or bed.store(1)
    size = bed.file(1).stat().st_size
    used = 24 + chunk_format._PREFIX.unpack(bed.file(1).read_bytes()[:24])[2]  # what follows is empty up to 4 KiB
    at = data.draw(st.one_of(st.integers(0, used - 1), st.integers(4096, size - 1)))
    restart = data.draw(st.booleans())
    with bed.file(1).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << data.draw(st.integers(0, 7))]))
    if restart:
        bed.restart()
    assert bed.load(1).kind in ("corrupt", "truncated", "outdated")
    assert not bed.has(1)
    assert bed.files == []
    assert bed.tier.used_bytes == 0


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["fifo", "link"])
def test_what_is_no_file_is_not_read(bed, make):
    assert bed.store(1)
    bed.file(1).unlink()
    make(bed.file(1))
    lost(bed, 1, "corrupt")


def test_a_folder_that_is_gone_costs_misses_and_comes_back_with_the_next_store(bed):
    assert bed.store(1)
    bed.file(1).unlink()
    bed.file(1).parent.rmdir()
    lost(bed, 1, "missing")


# ---- a disk that reads nothing, or does not answer -------------------------------------------


def fail_reads(patch, fake=errno.EIO, *, only=None):
    """Reading fails from now on, or reading files with `only` in their names; the numbers of the calls that did."""
    real, failed = os.preadv, []

    def failing(fd, *args):
        if only is not None and only not in os.readlink(f"/proc/self/fd/{fd}"):
            return real(fd, *args)
        failed.append(fd)
        raise OSError(fake, os.strerror(fake))

    patch.setattr(os, "preadv", failing)
    return failed


@pytest.mark.parametrize(("fake", "kind"), [(errno.EIO, "read_failed"), (errno.EPERM, "denied")])
def test_a_fake_read_error_costs_a_miss_and_no_file(bed, monkeypatch, fake, kind):
    assert bed.store(1)
    assert bed.store(2)
    with monkeypatch.context() as patch:
        fail_reads(patch, fake)
        assert bed.load(1).kind == kind
    assert bed.counters[f"disk_{kind}"] == 1
    assert not bed.has(1), "whoever waits for it would have it loaded at once again"
    assert bed.load(2) is None
    bed.now += PAUSE_S
    assert bed.load(1) is None
    assert bed.tier.used_bytes == 2 * bed.charge


def test_a_shard_that_fails_by_a_fake_error_again_and_again_while_others_are_read_is_removed(bed, monkeypatch):
    for shard in range(2):
        assert bed.store(1, shard, shards=2)
    assert bed.store(2)
    fail_reads(monkeypatch, only=f"{key(1).hex()}-0-")
    assert bed.load(1, 0).kind == "read_failed"
    bed.now += PAUSE_S
    assert bed.load(1, 0).kind == "read_failed"
    assert bed.file(1).exists(), "nothing else was read meanwhile: it may be the disk"
    assert bed.load(1, 1, at=2) is None
    assert not bed.has(1, 2), "whoever waits for it would have both loaded at once again"
    bed.now += PAUSE_S
    assert bed.has(1, 2)
    assert bed.load(1, 0).kind == "read_failed"
    assert bed.files == [bed.file(2)]
    assert bed.tier.used_bytes == bed.charge
    assert bed.tier.status().state == "ok"


def test_a_disk_that_reads_nothing_by_a_fake_error_keeps_its_files_and_is_tried_again(bed, monkeypatch, caplog):
    for number in range(8):
        assert bed.store(number)
    with monkeypatch.context() as patch:
        failed = fail_reads(patch)
        assert [bed.load(number).kind for number in range(MAX_ERRORS)] == ["read_failed"] * MAX_ERRORS
        for _ in range(3):
            assert not any(bed.has(number) for number in range(8))
            assert not bed.store(9)
            bed.settle()
            assert bed.tier.status().state == "paused: reads failed"
            assert len(failed) <= MAX_ERRORS
            failed.clear()
            bed.now += PAUSE_S
    assert not bed.has(7), "a probe is made, which no request waits for"
    bed.settle()
    assert bed.tier.status().state == "ok"
    bed.now += PAUSE_S
    assert [bed.load(number) for number in range(8)] == [None] * 8
    assert sum("cannot be read" in one.message for one in caplog.records) == 1


def test_loads_that_wait_when_a_disk_begins_to_fail_are_not_tried(bed, monkeypatch):
    for number in range(3 * THREADS):
        assert bed.store(number)
    may_fail = threading.Semaphore(MAX_ERRORS)
    failed = fail_reads(monkeypatch)
    failing = os.preadv

    def late(*args):
        assert may_fail.acquire(timeout=60)
        failing(*args)

    monkeypatch.setattr(os, "preadv", late)
    copies = [bed.start_load(number, at=number % 16) for number in range(3 * THREADS)]
    while bed.tier.status().state == "ok":
        bed.turn()
    may_fail.release(3 * THREADS)
    kinds = [bed.end(copy).kind for copy in copies]
    assert set(kinds) == {"read_failed", "paused"}
    assert kinds.count("read_failed") == len(failed) <= MAX_ERRORS + THREADS
    assert len(bed.files) == 3 * THREADS


class Hang:
    """Calls of `os.preadv` and `os.pwritev` do not return before `end`, as far as it has room for them."""

    def __init__(self, patch, room=1 << 30, names=("preadv", "pwritev")):
        self.room = room
        self.begun = threading.Semaphore(0)
        self.num_begun = 0
        self._ended = threading.Event()
        for name in names:
            patch.setattr(os, name, self._late(getattr(os, name)))

    def _late(self, real):
        def call(*args, **settings):
            if self.room:
                self.room -= 1
                self.num_begun += 1
                self.begun.release()
                assert self._ended.wait(60)
            return real(*args, **settings)

        return call

    def end(self):
        self.room = 0
        self._ended.set()


@pytest.fixture
def hang(monkeypatch):
    hangs = []

    def make(**settings):
        hangs.append(Hang(monkeypatch, **settings))
        return hangs[-1]

    yield make
    for one in hangs:
        one.end()


def test_a_disk_that_does_not_answer_is_said_and_keeps_nobody_waiting(bed, hang, caplog):
    for number in range(4):
        assert bed.store(number)
    disk = hang()
    first = bed.start_load(1)
    assert disk.begun.acquire(timeout=60)
    bed.tier.cancel(first)
    bed.now += SILENT_S / 2
    assert bed.has(2)
    assert bed.tier.status().state == "ok"
    bed.now += SILENT_S
    assert not bed.has(2)
    assert bed.tier.status().state == "does not answer"
    assert bed.end(bed.start_load(2, at=3)).kind == "paused"
    assert bed.start_store(9) is None
    assert bed.counters["disk_silent"] == 1
    assert disk.num_begun == 1
    for _ in range(5):
        bed.now += PAUSE_S
        assert not bed.has(2)
    assert disk.begun.acquire(timeout=60)
    assert disk.num_begun == 2, "one more is tried, and no other as long as that is under way"
    disk.end()
    bed.end(first)
    bed.settle()
    assert bed.tier.status().state == "ok"
    assert bed.load(2) is None
    assert bed.store(9)
    assert len(bed.files) == 5
    assert sum("does not answer" in one.message for one in caplog.records) == 1


def test_a_disk_that_removes_many_files_one_after_the_other_answers(bed, monkeypatch):
    for number in range(8):
        assert bed.store(number)
    turns, reached, real = threading.Semaphore(0), threading.Semaphore(0), os.unlink

    def slow(*args, **settings):
        reached.release()
        assert turns.acquire(timeout=60)
        real(*args, **settings)

    monkeypatch.setattr(os, "unlink", slow)
    assert bed.tier.evict([key(number) for number in range(8)]) == 8
    try:
        for _ in range(8):
            assert reached.acquire(timeout=60)
            bed.now += 0.6 * SILENT_S
            assert bed.tier.status().state == "ok", "no system call takes so long"
            turns.release()
        bed.settle()
    finally:
        turns.release(8)
    assert not bed.files


def test_a_disk_whose_one_call_never_returns_is_used_again_when_others_do(bed, hang):
    for number in range(4):
        assert bed.store(number)
    disk = hang(room=1)
    hung = bed.start_load(1)
    assert disk.begun.acquire(timeout=60)
    bed.now += 2 * SILENT_S
    assert not bed.has(2)
    bed.now += PAUSE_S
    while not bed.has(2):
        bed.turn()
    assert bed.end(bed.start_load(2, at=3)) is None
    assert bed.tier.status().state == "ok"
    assert hung.number not in bed.over


def test_what_waits_for_a_disk_that_does_not_answer_is_given_up(bed, hang):
    for number in range(THREADS + 4):
        assert bed.store(number)
    disk = hang()
    loads = [bed.start_load(number, at=number) for number in range(THREADS + 4)]
    for _ in range(THREADS):
        assert disk.begun.acquire(timeout=60)
    stored = bed.start_store(99, at=15)
    bed.now += 2 * SILENT_S
    assert not bed.has(1)
    assert [bed.end(copy).kind for copy in [*loads[THREADS:], stored]] == ["paused"] * 5
    assert not any(copy.number in bed.over for copy in loads[:THREADS]), "the disk may still write there"
    disk.end()
    assert [bed.end(copy) for copy in loads[:THREADS]] == [None] * THREADS


def test_what_was_deleted_is_removed_when_a_disk_answers_again(bed, hang):
    """It was to make room for a store that was given up; the next node would find it."""
    bed.limit_bytes = (THREADS + 1) * bed.charge
    bed.restart()
    for number in range(THREADS + 1):
        assert bed.store(number)
    disk = hang()
    loads = [bed.start_load(number, at=number) for number in range(1, THREADS + 1)]
    for _ in loads:
        assert disk.begun.acquire(timeout=60)
    stored = bed.start_store(99, at=15)
    assert bed.tier.evict([key(0)]) == 0, "it is the oldest, and not found any more"
    bed.now += 2 * SILENT_S
    assert not bed.has(1)
    assert bed.end(stored).kind == "paused"
    disk.end()
    assert [bed.end(copy) for copy in loads] == [None] * THREADS
    bed.settle()
    assert not bed.file(0).exists()
    assert bed.tier.used_bytes == THREADS * bed.charge
    assert bed.store(0), "and is stored anew"


def test_nothing_waits_for_a_disk_that_reads_and_whose_writes_do_not_return(bed, hang):
    assert bed.store(1)
    used_ns = bed.file(1).stat().st_mtime_ns
    disk = hang(names=["pwritev", "utime"])
    copies = [bed.start_store(number, at=number) for number in range(2, THREADS + 1)]
    for _ in copies:
        assert disk.begun.acquire(timeout=60)
    bed.now += 2 * SILENT_S
    assert not bed.has(1)
    bed.now += PAUSE_S
    while not bed.has(1):
        bed.turn()
    for _ in range(3):
        assert bed.end(bed.start_load(1, at=15)) is None, "that it was loaded is written later"
    assert not bed.tier.takes_stores
    assert bed.tier.status().state == "writes do not return"
    assert bed.start_store(20, at=12) is None
    slot = bed.slot(12)
    bed.tier.store(Job(99, [Part(key(20), 0, 4, 0, 4, slot)], slot.nbytes))
    while 99 not in bed.over:
        bed.turn()
    assert bed.over[99].kind == "paused", "what was admitted before keeps no memory, either"
    disk.end()
    assert [bed.end(copy) for copy in copies] == [None] * len(copies)
    assert bed.tier.status().state == "ok"
    assert bed.store(20)
    bed.restart()
    assert bed.file(1).stat().st_mtime_ns > used_ns


def test_a_disk_that_does_not_answer_keeps_no_node_from_ending(bed, hang, monkeypatch):
    monkeypatch.setattr(tier, "SILENT_JOIN_S", 0.1)
    assert bed.store(1)
    disk = hang()
    bed.start_load(1)
    assert disk.begun.acquire(timeout=60)
    bed.now += 2 * SILENT_S
    begin = time.monotonic()
    bed.close_tier()
    assert time.monotonic() - begin < JOIN_S / 2


# ---- a folder that is not there any more -----------------------------------------------------


def test_a_folder_that_is_gone_is_not_made_again_nor_is_another_written_to_and_is_used_when_it_is_back(bed, caplog):
    """As when its disk is unmounted for a while."""
    for number in range(4):
        assert bed.store(number)
    bed.root.rename(bed.root.with_name("away"))
    assert bed.load(1).kind == "gone"
    assert not bed.store(9)
    bed.tier.evict([key(3)])
    bed.settle()
    assert not bed.root.exists()
    bed.root.mkdir(mode=0o700)
    bed.now += PAUSE_S
    assert not bed.has(2)
    bed.settle()
    assert not bed.store(9)
    assert bed.tier.status().state == "not there", "that is another folder, and nobody has its lock"
    assert not list(bed.root.iterdir())
    assert sum("not there" in one.message for one in caplog.records) == 1
    bed.root.rmdir()
    bed.root.with_name("away").rename(bed.root)
    bed.now += PAUSE_S
    while not bed.has(1):
        bed.turn()
    assert [bed.load(number) for number in range(3)] == [None] * 3
    assert not bed.has(3), "what was forgotten meanwhile is not found again"
    assert bed.store(9)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_folder_in_whose_place_there_is_a_link_is_not_written_to(bed, tmp_path, is_full):
    outside = tmp_path / "outside"
    outside.mkdir()
    assert bed.store(0x0101)
    if is_full:
        bed.limit_bytes = bed.charge
        bed.restart()
    (bed.root / "00").symlink_to(outside)
    assert not bed.store(1)
    assert bed.counters["disk_foreign"] == 1
    assert not list(outside.iterdir())
    assert bed.tier.used_bytes == len(bed.files) * bed.charge
    assert bed.store(0x0102)
    bed.restart()
    assert bed.has(0x0102)


# ---- writing --------------------------------------------------------------------------------


@is_root
def test_a_full_disk_keeps_what_it_has_and_new_chunks_replace_old_ones(tmp_path, caplog):
    with small_disk(tmp_path / "tier", MIB + 4 * 36_864 + 8192) as folder:
        (folder / "of-others").write_bytes(bytes(MIB))
        with contextlib.closing(Bed(folder.parent, limit_bytes=MIB)) as bed:
            assert [bed.store(number) for number in range(6)] == [True, True, True, True, False, True]
            assert bed.counters["disk_full"] == 1
            assert (bed.tier.status().state, bed.tier.status().is_up) == ("full", True)
            assert [bed.has(number) for number in range(6)] == [False, True, True, True, False, True]
            assert all(path.suffix == ".chunk" for path in bed.files)
            assert bed.load(3) is None
            bed.now += FULL_S  # others may have made room
            assert bed.tier.status().state != "full"
            assert [bed.store(number) for number in (6, 7)] == [False, True]
            assert bed.counters["disk_full"] == 2
            assert sum("disk_full" in line for line in caplog.messages) == 2  # a minute lies between them


@is_root
def test_a_disk_that_has_no_room_for_another_folder_gives_that_of_an_old_chunk(tmp_path):
    with (
        small_disk(tmp_path / "tier", 2 * MIB, ",nr_inodes=16") as folder,
        contextlib.closing(Bed(folder.parent)) as bed,
    ):
        assert all(bed.store(number) for number in range(3))
        for number in range(os.statvfs(folder).f_favail):
            (folder / f"of-others-{number}").touch()
        # It is found to be full; the oldest chunk leaves its room to a folder; the next one to a file there.
        assert [bed.store(0x0101) for _ in range(3)] == [False, False, True]
        assert [bed.has(number) for number in range(3)] == [False, False, True]


@is_root
def test_the_reserve_of_a_disk_is_left_to_others(tmp_path):
    with small_disk(tmp_path / "tier", 2 * MIB) as folder:
        (folder / "of-others").write_bytes(bytes(MIB))
        left = MIB - 3 * 36_864
        with contextlib.closing(Bed(folder.parent, limit_bytes=MIB, reserve_bytes=left - 4096)) as bed:
            assert [bed.store(number) for number in range(5)] == [True, True, True, False, True]
            disk = os.statvfs(folder)
            assert disk.f_bavail * disk.f_frsize >= left - 2 * 4096  # the folder's own pages
            assert bed.counters["disk_full"] == 1
            assert len(bed.files) == 3


@is_root
def test_a_cap_that_the_disk_does_not_have_is_lowered_and_said(tmp_path, caplog):
    with (
        small_disk(tmp_path / "tier", MIB) as folder,
        contextlib.closing(Bed(folder.parent, limit_bytes=64 * MIB, reserve_bytes=MIB // 4)) as bed,
    ):
        assert bed.tier.limit_bytes == bed.tier.status().limit_bytes == MIB - MIB // 4
        assert bed.counters["disk_cap_lowered"] == 1
        assert f"{folder} is on a disk of 1.0 MiB: the cap of 64.0 MiB is lowered to 0.8 MiB" in caplog.text
        assert all(bed.store(number) for number in range(40))
        assert bed.disk_bytes <= bed.tier.used_bytes <= MIB - MIB // 4
        assert not bed.counters["disk_full"]


def _refuse_to_remove(monkeypatch, *numbers):
    """Files of these chunks can be neither removed nor written anew."""

    unlink, rename = os.unlink, os.rename

    def refuse(path):
        if any(path.name.startswith(key(number).hex()) for number in numbers):
            raise PermissionError(errno.EACCES, "Permission denied")

    def renamed(path, to):
        if path.suffix == ".chunk":
            refuse(path)
        rename(path, to)

    monkeypatch.setattr(os, "unlink", lambda path: refuse(path) or unlink(path))
    monkeypatch.setattr(os, "rename", renamed)


@pytest.mark.parametrize("when", ["it lies there", "it makes room", "it is stored", "it was damaged"])
def test_what_is_forgotten_is_not_found_again_when_its_file_cannot_be_removed(bed, monkeypatch, when):
    """A client's name says nothing of the bytes: the old ones must not come back under it. Nor is what is broken loaded
    again and again."""
    with monkeypatch.context() as patch:
        if when == "it is stored":
            _refuse_to_remove(patch, 1)
            copy, call = bed.start_store(1), bed.next_call()  # the file is there, and the control loop has not heard
            bed.tier.evict([key(1)])
            call()
            assert bed.end(copy) is None
        else:
            bed.limit_bytes = 2 * bed.charge
            bed.restart()
            assert [bed.store(1), bed.store(2)] == [True, True]
            _refuse_to_remove(patch, 1)
        if when == "it lies there":
            assert bed.tier.evict([key(1)]) == 1
        elif when == "it makes room":
            copy = bed.start_store(3)
            bed.tier.evict([key(1)])
            assert bed.end(copy).kind == "denied"
        elif when == "it was damaged":
            os.truncate(bed.file(1), 5000)
            assert bed.load(1).kind == "truncated"
        bed.settle()
        assert not bed.has(1)
        assert bed.file(1).exists()
        assert bed.tier.used_bytes == len(bed.files) * bed.charge, "the file still takes its part of the cap"
    assert bed.store(1)
    assert bed.tier.used_bytes == len(bed.files) * bed.charge, "what replaces it counts once"
    assert bed.load(1) is None


def test_an_unfinished_file_counts_beside_an_old_one_of_its_chunk_when_neither_can_be_removed(bed, monkeypatch):
    def failing(*args, **_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert bed.store(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        assert bed.tier.evict([key(1)]) == 1
        bed.settle()
        patch.setattr(os, "rename", failing)
        for _ in range(2):
            assert not bed.store(1)
            assert len(bed.files) == 2
            assert bed.disk_bytes <= bed.tier.used_bytes == 2 * bed.charge
    assert bed.store(1)
    assert bed.files == [bed.file(1)]
    assert bed.tier.used_bytes == bed.charge


@pytest.mark.parametrize("can_remove", [True, False])
def test_a_file_that_was_to_be_written_anew_and_cannot_be_opened_counts_or_is_removed(
    tmp_path, monkeypatch, can_remove
):
    bed = Bed(tmp_path, limit_bytes=4 * MIB // 25)
    assert all(bed.store(number) for number in range(4))
    real = os.open

    def failing(path, *args, **settings):
        if os.fspath(path).endswith(".partial"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **settings)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing)
            if not can_remove:
                _refuse_to_remove(patch, 9)
            assert not bed.store(9)
        assert len(bed.files) == (3 if can_remove else 4)
        assert bed.disk_bytes <= bed.tier.used_bytes == len(bed.files) * bed.charge <= bed.limit_bytes
        assert all(bed.store(number) for number in range(10, 16))
        assert bed.disk_bytes <= bed.tier.used_bytes == len(bed.files) * bed.charge <= bed.limit_bytes
    finally:
        bed.close()


def test_the_older_of_two_files_of_a_chunk_is_removed_when_a_node_starts(bed, monkeypatch):
    """It was forgotten, and could not be removed then; a client has stored other bytes under the name since."""
    with monkeypatch.context() as patch:
        _refuse_to_remove(patch, 1)
        assert bed.store(1, layers=2)
        assert bed.tier.evict([key(1)]) == 1
        bed.settle()
        assert bed.store(1)
    assert bed.tier.used_bytes == 2 * bed.charge
    bed.restart()
    bed.settle()
    assert bed.load(1) is None
    assert bed.files == [bed.file(1)]
    assert (bed.tier.num_chunks, bed.tier.used_bytes) == (1, bed.charge)


def test_a_bug_while_files_are_counted_costs_stores_and_nothing_else(bed, monkeypatch):
    assert bed.store(1)
    bed.close_tier()

    def failing(*args):
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        bed.open(wait=False)
        while not bed.counters["disk_failed"]:
            bed.turn()
    assert not bed.store(2)
    monkeypatch.setattr(store_tier, "MAX_FORGOTTEN", 2)
    with traced() as held:
        for number in range(2000):
            bed.tier.evict([key(number)])
        assert held() < 20_000, "nobody would look whether these were there"


@contextlib.contextmanager
def read_only(folder):
    """The file system of this folder can be read only."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@is_root
@pytest.mark.parametrize("has_lock", [True, False])
def test_a_disk_that_is_read_only_when_a_node_starts_is_read(tmp_path, caplog, has_lock):
    with small_disk(tmp_path / "tier", MIB) as folder, contextlib.closing(Bed(folder.parent)) as bed:
        assert bed.store(1)
        bed.close_tier()
        if not has_lock:
            (folder / "tier.lock").unlink()
        with read_only(folder):
            bed.open()
            assert bed.load(1) is None
            assert not bed.tier.takes_stores
            assert not bed.store(2)
            assert bed.counters["disk_read_only"] == 1
            assert bed.counters["disk_not_direct"] == 0
            assert bed.tier.status().state == "read-only"
            assert sum("read-only" in one.message.lower() for one in caplog.records) == 1
            bed.now += PAUSE_S
            assert not bed.store(2)
            if has_lock:
                with pytest.raises(ConfigError, match="another node"):
                    bed.open()
        bed.now += PAUSE_S
        assert bed.store(2) == has_lock, "a folder that is not this node's alone is never written to"


def test_what_is_wrong_with_each_of_two_disks_is_a_warning(tmp_path, caplog):
    name = key(1).hex()
    for root in (tmp_path / "tier", tmp_path / "other"):
        (root / name[:2]).mkdir(parents=True)
        root.chmod(0o700)
        (root / name[:2] / f"{name}-0-4-32768.chunk").write_bytes(b"short")
    with (
        contextlib.closing(Bed(tmp_path)) as bed,
        contextlib.closing(DiskTier(bed, tmp_path / "other", MIB)) as other,
    ):
        bed.until(lambda: other.is_counted)
    for root in ("tier", "other"):
        assert sum(f"/{root}/" in one.message for one in caplog.records if one.levelname == "WARNING") == 1


@pytest.mark.parametrize("fails", ["another disk", "remote"])
def test_where_one_tier_cannot_be_opened_the_others_are_closed_again(tmp_path, fails):
    with contextlib.closing(Bed(tmp_path)) as bed:
        assert bed.store(1)
        bed.close_tier()
        disks = [str(bed.root)] * (2 if fails == "another disk" else 1)
        remote = "s3://user:secret@host/bucket" if fails == "remote" else ""
        with pytest.raises(ConfigError, match="another node|user or password"):
            open_below(NodeConfig(address="ipc:///none", disks=disks, remote=remote), bed)
        bed.open()
        assert bed.load(1) is None


def test_a_folder_that_nothing_may_be_written_to(bed):
    assert bed.store(1)
    with immutable(bed.file(1).parent):
        bed.limit_bytes = 0
        bed.restart()  # what is there must go, and cannot
        bed.settle()
        assert bed.counters["disk_denied"] == 1
        assert bed.load(1) is None
        assert bed.tier.used_bytes == bed.charge
    bed.limit_bytes = MIB
    bed.restart()
    with immutable(bed.root):
        assert not bed.store(0x0203)
        assert bed.counters["disk_denied"] == 2
    assert bed.store(0x0203)


def test_what_cannot_be_removed_still_counts(bed):
    assert bed.store(1)
    bed.file(1).with_suffix(".partial").write_bytes(bytes(50_000))
    with immutable(bed.root / "00"):
        bed.restart()
        assert bed.tier.used_bytes == bed.charge + bed.file(1).with_suffix(".partial").stat().st_blocks * 512
    bed.restart()
    assert bed.counters["disk_unfinished"] == 2
    assert bed.tier.used_bytes == bed.charge
    assert bed.files == [bed.file(1)]


@pytest.mark.parametrize("call", ["pwritev", "rename", "ftruncate"])
def test_a_fake_write_error_leaves_no_file(bed, monkeypatch, call):
    def failing(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        assert not bed.store(1)
    assert bed.counters["disk_write_failed"] == 1
    assert bed.files == []
    assert bed.tier.used_bytes == 0
    assert bed.store(1)


def test_after_some_write_errors_there_is_a_pause(bed, monkeypatch, caplog):
    assert bed.store(0)
    calls = []

    def fake(*args):
        calls.append(args)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fake)
        assert not any(bed.store(number) for number in range(1, 10))
        assert len(calls) == bed.counters["disk_write_failed"] == MAX_ERRORS
        assert bed.counters["disk_paused"] == 9 - MAX_ERRORS
        assert bed.tier.history.why(key(2)).text.endswith("cannot be written: Input/output error")
        why = "not stored: reads or writes failed, and none are tried for some seconds, 0.0 s ago"
        assert bed.tier.history.why(key(9)).sentence(bed.now) == why
        assert bed.load(0) is None
        bed.now += PAUSE_S
        assert not any(bed.store(number) for number in range(1, 10))
        assert len(calls) == MAX_ERRORS + 1  # one attempt, and the next pause
    bed.now += PAUSE_S
    assert all(bed.store(number) for number in range(1, 5))
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 2  # one of each kind in a minute


def test_an_error_nobody_expected_ends_the_job_and_nothing_else(bed, monkeypatch):
    def failing(*args, **_):
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", failing)
        assert not bed.store(1)
    assert bed.counters["disk_failed"] == 1
    assert bed.store(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        assert bed.load(1).kind == "failed"
    assert not bed.has(1), "it is not asked for again and again"
    bed.now += PAUSE_S
    assert bed.load(1) is None


def test_a_folder_that_cannot_be_listed_by_a_fake_error_is_not_written_to(bed, monkeypatch):
    """What is there is not known then, so the cap could not be kept."""
    assert bed.store(1)

    def failing(path):
        raise OSError(errno.EIO, "Input/output error")

    bed.close_tier()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        bed.open(wait=False)
        while not bed.counters["disk_read_failed"]:
            bed.turn()
    assert not bed.store(2)
    assert not bed.has(1)
    assert bed.tier.why_not(key(1)) == "could not be listed"
    assert not bed.tier.status().is_up
