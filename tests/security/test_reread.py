"""Files that are read again while a process runs: when they are whole, and only if they make sense."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
from connection_stage import settled

from pdx.errors import ConfigError
from pdx.security import reread
from pdx.security.reread import SETTLE_S, Reread
from pdx.security.roster import RosterFile


def test_a_file_in_a_folder_that_is_exchanged_as_a_whole_is_read_again(tmp_path):
    """As Kubernetes mounts a Secret: links to `..data`."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "key").write_text(version)
        settled(tmp_path / version / "key")
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "key").symlink_to("..data/key")
    file = Reread((tmp_path / "key").read_text, str(tmp_path / "key"), what="it")
    assert not file.refresh()
    (tmp_path / "fresh").symlink_to("two")
    (tmp_path / "fresh").rename(tmp_path / "..data")
    assert file.refresh()
    assert file.value == "two"


def test_a_file_from_the_future_is_read_when_it_has_been_the_same_for_a_while(tmp_path, monkeypatch):
    """The clock of a file server may be ahead."""
    path, now = tmp_path / "file", [100.0]
    monkeypatch.setattr(reread.time, "monotonic", lambda: now[0])

    def write(text):
        path.write_text(text)
        os.utime(path, (4e9, 4e9 + len(text)))

    write("one")
    file = Reread(path.read_text, str(path), what="it")
    for text in ("hal", "half a", "whole"):
        write(text)
        assert not file.refresh()
        now[0] += SETTLE_S / 2
        assert not file.refresh()
    now[0] += SETTLE_S
    assert file.refresh()
    assert file.value == "whole"


def test_a_file_that_is_being_written_is_not_read(tmp_path, monkeypatch):
    """Cut off where a node ends it makes sense: the others would be thrown out."""
    path, now_ns = tmp_path / "roster.toml", time.time_ns()
    monkeypatch.setattr(reread.time, "time_ns", lambda: now_ns)
    entries = [f'[nodes.n{number}]\naddress = "ipc:///run/{number}"\n' for number in range(2)]

    def write(text):
        path.write_text(text)
        path.chmod(0o600)
        os.utime(path, ns=(now_ns, now_ns))

    write("".join(entries))
    settled(path)
    counters = Counter[str]()
    file = Reread(lambda: RosterFile.load(path, has_keys=False), str(path), what="it", counters=counters)
    write(entries[0])
    assert not file.refresh()
    write("".join(entries) + "# again")
    assert not file.refresh()
    settled(path)
    assert not file.refresh(), "it says the same"
    assert not counters
    write("[nodes.")
    settled(path)
    assert not file.refresh()
    assert counters == {"reread_failed": 1}
    write(entries[0])
    settled(path)
    assert file.refresh()
    os.utime(path, (2**33, 2**33))  # the clock of whoever wrote it is wrong
    write_at = path.stat().st_mtime_ns
    assert write_at > 2**33
    path.unlink()
    assert not file.refresh()
    with pytest.raises(ConfigError):
        RosterFile.load(path, has_keys=False)
