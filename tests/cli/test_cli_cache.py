"""`pdx cache verify` over the files of a real disk tier."""

import json
import os

import pytest
from click.testing import CliRunner
from disk_bed import Bed

from pdx.cli.main import main
from pdx.store.disk import folder
from pdx.store.disk.scrub import scrub


@pytest.fixture
def bed(tmp_path):
    bed = Bed(tmp_path)
    assert all(bed.store(number) for number in range(8))
    yield bed
    bed.close()


def verify(bed, *flags):
    return CliRunner().invoke(main, ["cache", "verify", str(bed.root), *flags])


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_all_is_well_beside_a_node_that_has_the_folder(bed):
    done = verify(bed)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "8 chunks are good (288.0 KiB), 0 bad"


@pytest.mark.parametrize("is_direct", [True, False])
def test_each_kind_of_damage_is_named(bed, monkeypatch, is_direct):
    monkeypatch.setattr(folder, "takes_direct", lambda root: is_direct)
    files = [bed.file(number) for number in range(8)]
    flip(files[0], 30)  # the header
    flip(files[1], 4096)  # the first slice
    flip(files[2], 4096 + bed.slot_bytes - 1)  # the last
    os.truncate(files[3], 4096 + 100)
    files[4].write_bytes(files[5].read_bytes())
    (files[6].parent / "letter.txt").write_text("mine")
    done = verify(bed, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report == {
        "good": 3,
        "nbytes": 3 * (4096 + bed.slot_bytes),
        "bad": {"corrupt": 4, "truncated": 1},
        "left": 5,
        "foreign": 1,
    }
    done = verify(bed)
    assert f"{files[4]} is the file of another chunk" in done.stdout
    assert f"{files[3]} has 4196 bytes, not {4096 + bed.slot_bytes}" in done.stdout
    done = verify(bed, "--remove")
    assert done.exit_code == 0
    assert sorted(bed.files) == sorted([files[5], files[6], files[6].parent / "letter.txt", files[7]])
    assert verify(bed).exit_code == 0
    assert bed.load(1).kind == "missing"  # to the node that is a miss


def test_links_and_folders_are_neither_followed_nor_removed(bed, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("not a chunk")
    bed.file(0).unlink()
    bed.file(0).symlink_to(victim)
    bed.file(1).unlink()
    bed.file(1).mkdir()
    done = verify(bed, "--json")
    assert json.loads(done.stdout)["bad"] == {"corrupt": 2}
    done = verify(bed, "--remove")
    assert victim.read_text() == "not a chunk"
    assert not bed.file(0).is_symlink()
    assert done.exit_code == 1
    assert f"{bed.file(1)} is not a file; {bed.file(1)} cannot be removed: Is a directory" in done.stdout
    bed.file(1).rmdir()


def test_a_file_that_a_node_replaces_meanwhile_is_not_called_bad(bed, monkeypatch):
    """What goes under another name has other bytes than the name says that it was opened by."""
    path, real = bed.file(0), os.preadv
    inode = path.stat().st_ino

    def preadv(fd, buffers, offset):  # by several threads, but each file by one
        count = real(fd, buffers, offset)
        if os.fstat(fd).st_ino == inode and path.exists():
            buffers[-1][:1] = b"?"
            path.rename(path.with_suffix(".partial"))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    found = []
    report = scrub(bed.root, found.append)
    assert (report.good, report.bad) == (7, {})
    assert found == [None] * 8


def test_what_is_no_folder_is_said(tmp_path):
    done = CliRunner().invoke(main, ["cache", "verify", str(tmp_path / "nowhere")])
    assert done.exit_code == 1
    assert f"{tmp_path / 'nowhere'} cannot be listed: No such file or directory" in done.output
