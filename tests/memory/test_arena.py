"""The arena file: its layout, its modes, and what a stale or forged slot looks like."""

import ctypes
import errno
import mmap
import os
import stat
from pathlib import Path

import pytest

from pdx.errors import ArenaTooSmall, NodeUnavailable, StaleSlot
from pdx.memory import arena as arena_module
from pdx.memory.arena import GRANULE_BYTES, NEVER, Arena, memory_limit, round_up
from pdx.memory.slot import Slot

NBYTES = 16 * GRANULE_BYTES


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path / "arena", NBYTES) as made:
        yield made


def test_two_mappings_share_bytes_and_generations(arena):
    arena.generations[3] = 7
    slot = Slot(3 * GRANULE_BYTES, 100, 7)
    with Arena.open(arena.path, NBYTES) as other:
        other.view(slot)[:] = b"x" * 100
        assert bytes(arena.view(slot)) == b"x" * 100
        assert len(other.view(slot)) == 100
        arena.generations[3] += 1
        with pytest.raises(StaleSlot):
            other.check(slot)


def test_readers_see_how_many_slices_are_filled(arena):
    slot, last = Slot(3 * GRANULE_BYTES, 100, 0), Slot(15 * GRANULE_BYTES, 100, 0)
    with Arena.open(arena.path, NBYTES) as other:
        assert (other.filled_slices(slot), other.filled_slices(last)) == (0, 0)
        arena.filled[3], arena.filled[15] = 80, NEVER
        assert (other.filled_slices(slot), other.filled_slices(last)) == (80, NEVER)
        assert not any(other.generations), "a table of their own"


@pytest.mark.parametrize(
    "slot",
    [
        Slot(0, 1, 1),
        Slot(1, 1, 0),
        Slot(GRANULE_BYTES - 1, 1, 0),
        Slot(0, NBYTES + 1, 0),
        Slot(NBYTES, 1, 0),
        Slot(NBYTES, 0, 0),
        Slot(NBYTES - GRANULE_BYTES, GRANULE_BYTES + 1, 0),
        Slot(1 << 47, 1 << 47, 0),
    ],
)
def test_a_slot_that_is_not_one_is_stale(arena, slot):
    """CVE-2026-103764: an offset from the wire was used before it was checked."""
    assert not arena.is_current(slot)
    with pytest.raises(StaleSlot):
        arena.view(slot)


def test_only_this_user_may_open_it(tmp_path):
    mask = os.umask(0)
    try:
        with Arena.create(tmp_path / "arena", NBYTES) as arena:
            assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
    finally:
        os.umask(mask)


def test_a_file_that_is_there_is_never_taken_over(tmp_path):
    (tmp_path / "arena").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        Arena.create(tmp_path / "arena", NBYTES)
    (tmp_path / "link").symlink_to(tmp_path / "arena")
    with pytest.raises(NodeUnavailable):
        Arena.open(tmp_path / "link", NBYTES)


def test_a_file_of_another_size_is_not_the_arena(arena):
    with pytest.raises(NodeUnavailable, match="expected"):
        Arena.open(arena.path, NBYTES * 2)


def test_a_file_that_is_gone_is_a_node_that_is_gone_or_somebody_has_removed_it(tmp_path):
    with pytest.raises(NodeUnavailable, match="the node's own /dev/shm.*start the node anew"):
        Arena.open(tmp_path / "nothing", NBYTES)


def test_an_arena_larger_than_its_file_system_says_what_to_do(tmp_path):
    with pytest.raises(ArenaTooSmall, match="--arena.*--shm-size"):
        Arena.create(tmp_path / "arena", 1 << 46)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("own", "limits", "found"),
    [
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/pod/a\n", {"pod/a/memory.max": "max\n", "pod/memory.max": "4096\n"}, 4096),
        ("0::/seen/by/the/host\n", {"memory.max": "8192\n"}, 8192),
        ("9:name=x:/\n4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "7\n", "memory.max": "9\n"}, 7),
        ("4:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "7\n"}, None),
        (None, {}, None),
    ],
)
def test_the_memory_limit_of_a_container(tmp_path, own, limits, found):
    if own is not None:
        (tmp_path / "cgroup").write_text(own)
    for name, text in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert memory_limit(tmp_path / "groups", tmp_path / "cgroup") == found


def test_an_arena_larger_than_its_container_may_be_says_what_to_do(tmp_path, monkeypatch):
    """Else the kernel would end the node without a word."""
    monkeypatch.setattr(arena_module, "memory_limit", lambda: NBYTES)  # its tables are too much
    with pytest.raises(ArenaTooSmall, match="--arena.*--memory"):
        Arena.create(tmp_path / "arena", NBYTES)
    assert not list(tmp_path.iterdir())


def test_views_outlive_the_arena_object(tmp_path):
    arena = Arena.create(tmp_path / "arena", NBYTES)
    view = arena.view(Slot(0, GRANULE_BYTES, 0))
    view[:5] = b"alive"
    arena.close()
    arena.close()
    assert bytes(view[:5]) == b"alive"
    view.release()


def test_populating_changes_no_byte(arena):
    arena.data[5:9] = b"kept"
    arena.populate_in_background().join()
    assert bytes(arena.data[5:9]) == b"kept"
    assert sum(arena.data[:4096]) == sum(b"kept")


def test_sizes_are_rounded_up_to_granules(tmp_path):
    assert [round_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    with Arena.create(tmp_path / "arena", 5000) as arena:
        assert arena.nbytes == 8192
        assert arena.path.stat().st_size == 8192 + 2 * (8 + 2)
        assert arena.nbytes % mmap.PAGESIZE == 0


def test_tables_begin_at_a_page_where_pages_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)
    with Arena.create(tmp_path / "arena", (1 << 16) + 1) as arena:
        assert arena.nbytes == 2 << 16


def test_another_node_of_this_address_spares_an_arena_that_is_being_made(tmp_path, monkeypatch):
    path = tmp_path / "x.arena"
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: Arena.remove_left(path))
    with Arena.create(path, NBYTES):
        assert path.exists()


def test_what_a_killed_node_left_is_removed_and_what_a_living_one_has_is_not(tmp_path):
    path = tmp_path / "x.arena"
    arena = Arena.create(path, NBYTES)
    Arena.remove_left(path)
    assert path.exists()
    arena.close()
    Arena.remove_left(path)
    assert not path.exists()
    Arena.remove_left(path)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a file of another user")
def test_a_file_of_another_user_is_passed_over(tmp_path):
    path = tmp_path / "x.arena"
    path.write_bytes(b"")
    os.chown(path, 65_534, 65_534)
    Arena.remove_left(path)
    assert path.exists()


def test_a_process_cannot_make_its_view_of_generations_writable(arena):
    with Arena.open(arena.path, NBYTES) as other:
        generations = (ctypes.c_char * 8).from_buffer_copy(other.generations[:1])
        assert bytes(generations) == bytes(8)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        maps = Path("/proc/self/maps").read_text().splitlines()
        rows = [line.split() for line in maps if str(arena.path) in line]
        (span,) = [row[0] for row in rows if row[1].startswith("r--")]
        first, last = (int(part, 16) for part in span.split("-"))
        assert libc.mprotect(first, last - first, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES


@pytest.mark.parametrize("base", [1, 12345, (1 << 31) - 1])
def test_generations_begin_where_they_are_told_to(tmp_path, base):
    with Arena.create(tmp_path / "a", NBYTES) as made, Arena.open(made.path, NBYTES) as other:
        made.begin_generations(base)
        assert set(other.generations) == {base}
        assert set(made.data) == {0}
