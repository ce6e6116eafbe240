"""What a disk tier finds in its folder when a node starts, and what that means to the other tiers of the node."""

import contextlib
import errno
import os
import subprocess
import threading

import pytest
from disk_bed import MIB, Bed, closing_all, is_root, key, small_disk
from traced import traced

from pdx.config import NodeConfig
from pdx.errors import ConfigError
from pdx.memory.keys import named_key
from pdx.store import chunk_format, store_tier
from pdx.store.disk import folder
from pdx.store.disk.files import SILENT_S
from pdx.store.disk.tier import DiskTier
from pdx.store.health import PAUSE_S, SILENT
from pdx.store.tier_setup import open_below
from pdx.testing import tier_stage
from pdx.wire.status import COUNTING


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


# ---- several disks -------------------------------------------------------------------------


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
