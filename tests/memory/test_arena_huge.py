"""Host arenas ask for huge pages before their memory is allocated, because afterwards the kernel has chosen."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from pdx.memory import arena as module
from pdx.memory.arena import GRANULE_BYTES, Arena

MIB = 1 << 20


@pytest.fixture
def advised(monkeypatch):
    """What the kernel was asked for, and how much of the file was allocated then."""
    calls = []
    populate = module._populate

    def recorded(address, nbytes, owner):
        calls.append((nbytes, sum(os.stat(f"/proc/self/fd/{fd}").st_blocks for fd in open_arenas())))
        populate(address, nbytes, owner)

    def open_arenas():
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{fd}").endswith("/huge-arena"):
                    yield fd
            except OSError:
                continue

    monkeypatch.setattr(module, "_populate", recorded)
    return calls


def test_a_new_arena_asks_before_anything_is_allocated(tmp_path, advised):
    with Arena.create(tmp_path / "huge-arena", 8 * MIB) as arena:
        assert advised == [(8 * MIB, 0)]
        assert arena.nbytes == 8 * MIB
        assert os.stat(arena.path).st_blocks * 512 >= 8 * MIB, "all memory is allocated all the same"
        assert bytes(arena.data[:GRANULE_BYTES]) == bytes(GRANULE_BYTES)


def test_a_real_file_system_that_gives_huge_pages_may_give_them_to_arenas(tmp_path):
    """As `/dev/shm` does that is mounted with this option (`pdx doctor` says whether it is), if it has any."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "huge=advise,size=16M", "none", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with Arena.create(tmp_path / "arena", 8 * MIB) as arena:
            arena.populate_in_background().join()
            about = Path("/proc/self/smaps").read_text().partition(str(arena.path))[2]
            assert re.search(r"THPeligible: +(\d)", about).groups() == ("1",)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
