"""No file that is not PDX's own is written or removed, whatever its name and wherever a user points PDX."""

import contextlib
import os
from collections import Counter
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner
from disk_bed import Bed, key

from pdx.cli.main import main
from pdx.cli.processes import Processes
from pdx.errors import ConfigError
from pdx.security.accept_queue import AcceptQueue
from pdx.security.curve_keys import KeyPair
from pdx.security.socket_lock import owned
from pdx.telemetry.trace import switch

TEXT = "years of work\n"
FOLDER = "tier"  # whose files are the user's


def disk(folder: Path) -> None:
    bed = Bed(folder.parent / "another")
    bed.close_tier()
    bed.root = folder
    try:
        bed.open()
        assert bed.store(1)
        bed.tier.pin([key(1)], pinned=True, share=1.0)
    finally:
        bed.close()


def verify(folder: Path) -> None:
    done = CliRunner().invoke(main, ["cache", "verify", str(folder), "--remove"])
    assert done.exit_code
    raise ConfigError(done.output)


def lock(folder: Path) -> None:
    with owned(folder / "node.sock", RuntimeError):
        pass


def listen(folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        AcceptQueue(folder / "node.sock", router, Counter()).close()


def keygen(folder: Path) -> None:
    KeyPair.make().save(folder, "alpha", force=True)


def logs(folder: Path) -> None:
    with Processes(folder) as processes:
        processes.start("proxy", ["true"], is_ready=bool)


@pytest.mark.parametrize(
    ("use", "name", "is_refused"),
    [
        (disk, "direct", False),
        (disk, "tier.lock", True),
        (disk, "tier.pins", False),
        (disk, "ab/notes.txt", False),
        (verify, "direct", True),
        (verify, "tier.lock", True),
        (verify, "ab/notes.chunk", True),
        (lock, "node.sock.lock", True),
        (listen, "node.sock.new", True),
        (keygen, "alpha.key.new", False),
        (keygen, "alpha.key_secret.new", False),
        (lambda folder: switch(folder, True), "on", True),
        (logs, "proxy.log", True),
    ],
)
def test_a_file_of_the_users_stays_as_it_is(tmp_path, monkeypatch, use, name, is_refused):
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o700)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "another").mkdir()
    file.write_text(TEXT)
    os.utime(file, (1, 1))
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) if is_refused else contextlib.nullcontext():
        use(folder)
    assert file.read_text() == TEXT
    assert file.stat().st_mtime == 1


def test_a_copy_by_hard_links_of_a_disks_folder_is_not_written_anew(tmp_path):
    """A file that makes room is written anew in its place; a snapshot (`cp -al`) has the same file."""
    bed = Bed(tmp_path, limit_bytes=40_960)
    try:
        assert bed.store(1)
        kept = tmp_path / "snapshot"
        os.link(bed.file(1), kept)
        before = kept.read_bytes()
        assert bed.store(2)
        assert not bed.has(1)
        assert bed.load(2) is None
        assert kept.read_bytes() == before
    finally:
        bed.close()


def test_a_lock_that_was_made_and_not_yet_written_is_one(tmp_path):
    (tmp_path / "node.sock.lock").touch()
    lock(tmp_path)
    lock(tmp_path)
