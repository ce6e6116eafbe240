"""The benches of a disk, with next to no data."""

import json

import pytest
from click.testing import CliRunner

from pdx.bench.store import count, disk, kills


@pytest.mark.long
def test_the_tier_is_compared_with_plain_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(disk, "TOTAL_BYTES", 2 << 20)
    monkeypatch.setattr(disk, "CHUNK_MIB", (1,))
    monkeypatch.setattr(disk, "ROUNDS", 1)
    disk.main(str(tmp_path))
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["operation"], row["chunk_mib"]) for row in rows] == [("write", 1), ("read", 1), ("replace", 1)]
    assert all(row["ratio"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_node_that_is_killed_while_it_writes(tmp_path):
    done = CliRunner().invoke(kills.main, [str(tmp_path), "--kills", "2", "--chunks", "6000"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["written"] > 0
    assert found["read"] >= 2
    assert [found[name] for name in ("wrong", "bad_files", "most_bytes_above_the_cap")] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_node_that_counts_its_files(tmp_path):
    done = CliRunner().invoke(count.main, [str(tmp_path), "--files", "600"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["files"], found["counted"]) == (600, 600)
    assert 0 < found["longest_stop_s"] < found["taken_s"]
    assert list(tmp_path.iterdir()) == []
