"""Each fault of a disk costs a miss and a counter. The faults are real but for those that a test's name calls fake."""

import array
import contextlib
import errno
import fcntl
import os
import shutil

import pytest
from disk_bed import MIB, Bed, is_root, key, small_disk
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdx.errors import TierError
from pdx.store import chunk_format
from pdx.store.disk import chunk_file
from pdx.store.disk.index import FULL_S
from pdx.store.health import PAUSE_S

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
