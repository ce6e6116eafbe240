"""The benches of a disk and of loads that pay: with next to no data, and what they are asked."""

import json
import shutil
import socket

import pytest
from click.testing import CliRunner

from pdx.bench.store import count, disk, kills, paying


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tier", "tape"],
        ["--points", "1024"],
        ["--points", "0+128"],
        ["--tier", "disk"],
        ["--tier", "host", "--disk", "folder"],
    ],
)
def test_loads_that_make_no_sense_are_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with pytest.raises(SystemExit, match="^2$"):
        paying.main(arguments)
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_turns_in_which_the_node_learns_do_not_count():
    row = paying._row(100.0, 2000, 0, [(10.0, 90.0), (10.0, 20.0), (10.0, 5.0), (20.0, 5.0), (10.0, 11.0)], 7)
    assert (row.computing_ms, row.hit_ms, row.ratio, row.most, row.learning) == (10.0, 5.0, 0.5, 1.1, "9.00 2.00")
    assert row.loaded_chunks == 7


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_a_redis_answers_and_is_gone_afterwards(tmp_path):
    with paying.redis(tmp_path) as port, socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(b"PING\r\n")
        assert client.recv(64) == b"+PONG\r\n"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 10)
