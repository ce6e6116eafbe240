"""The benches of tiers below memory, without engines: what they are asked, what stands beside the engines, and what
becomes of the times."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdx.bench.harness.nodes import one_node
from pdx.bench.store import history, lookup, paying, queueing
from pdx.bench.systems.pdx import PdxWith
from pdx.bench.systems.system import Bed
from pdx.client.api import connect

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
BED = Bed(Path("model"), "tiny", (), {}, Path("logs"), 64, "1GiB")


@pytest.fixture
def started(monkeypatch):
    """The systems that would have been started with engines, and which of them were ended."""
    started, ended = {}, []

    def start(system, bed):
        started[system.name] = bed
        system.node = f"node of {system.name}"
        return SimpleNamespace(url=f"url of {system.name}", close=lambda: ended.append(system.name))

    monkeypatch.setattr(PdxWith, "start", start)
    for module in (history, queueing):
        monkeypatch.setattr(module, "make_bed", lambda *args, **settings: BED)
    yield started
    assert sorted(ended) == sorted(started), "what was started is ended"


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("module", [paying, queueing, history])
def test_it_says_what_it_takes(module, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        module.main(["--help"])
    name = module.__name__
    assert f"python -m {name}" in capsys.readouterr().out
    assert f"`python -m {name}" in module.__doc__


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (paying, ["--tokens", "many"]),
        (queueing, []),
        (queueing, ["folder", "--rounds", "x"]),
        (history, ["--turns", "x"]),
        (history, ["--points", "1024"]),
        (history, ["--points", "1024+128,"]),
        (history, ["--points", "0+128"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(started, module, arguments, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        module.main(arguments)
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
    assert not started


@pytest.mark.parametrize(("module", "arguments"), [(paying, [[]]), (lookup, [])])
def test_without_a_redis_it_says_so(module, arguments, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        module.main(*arguments)


# ---- histories ------------------------------------------------------------------------------


def test_histories_are_measured_at_the_points_that_are_named(started, monkeypatch, capsys):
    asked = []

    async def measure(url, served_name, points, turns):
        asked.append((url, served_name, points, turns))
        return [history.Row(*point, 10.0, 2.0, 5.0) for point in points]

    monkeypatch.setattr(history, "measure", measure)
    history.main(["--points", "64+16,128+32", "--turns", "3"])
    assert asked == [("url of pdx-both-history", "tiny", [(64, 16), (128, 32)], 3)]
    found = last_line(capsys)
    assert (found["bench"], [row["history"] for row in found["rows"]]) == ("history", [64, 128])


def test_histories_on_a_disk_have_one_engine_with_little_memory(started, monkeypatch, capsys):
    async def measure(url, node, served_name, points, turns):
        assert (url, node) == ("url of pdx-both-disk", "node of pdx-both-disk")
        assert (points, turns) == ([(64, 16)], history.TURNS)
        return [history.DiskRow(64, 16, 10.0, 2.0, 5.0, 4)]

    monkeypatch.setattr(history, "measure_disk", measure)
    history.main(["--points", "64+16", "--disk", "/cache"])
    assert started["pdx-both-disk"].arena == f"{80 * history.KIB_PER_TOKEN * 5 // 4}KiB"
    assert last_line(capsys)["disk"] is True


# ---- queues ---------------------------------------------------------------------------------


def test_ratios_are_those_of_the_medians(started, monkeypatch, capsys):
    async def measure(systems, served_name, rounds, busy_tokens):
        names = ("ahead", "early", "turn")
        assert systems == {name: (f"url of pdx-both-{name}", f"node of pdx-both-{name}") for name in names}
        assert (rounds, busy_tokens) == (2, 7)
        times = {"ahead": 1.0, "early": 2.0, "turn": 3.0}
        return [
            queueing.Row(name, turn, times[name], 2 * times[name], times[name], 1.0, 0, 0)
            for name in systems
            for turn in range(rounds)
        ]

    monkeypatch.setattr(queueing, "measure", measure)
    queueing.main(["/cache", "--rounds", "2", "--busy", "7"])
    found = last_line(capsys)
    assert [found[f"{name}_all_s_ratio"] for name in ("early", "turn")] == [2.0, 3.0]
    assert len(found["rows"]) == 6
    assert set(found["rows"][0]) == {field.name for field in fields(queueing.Row)}


def test_what_is_forgotten_is_in_memory_no_more():
    with one_node(64 << 20) as address:
        with connect(address, timeout_s=20) as client:
            with client.reserve("known", 24 << 20) as chunk:  # more than is left beside what takes its room
                chunk.seal()
            assert client.lookup(["known"]) == 1
        queueing.forget(address)
        with connect(address) as client:
            assert client.lookup(["known"]) == 0
            assert sum(client.status().chunks.values()) == 0
            assert paying.counter(address, "evicted") == 1
            assert paying.counter(address, "no such counter") == 0


# ---- a Redis beside them --------------------------------------------------------------------


@needs_redis
def test_a_redis_answers_and_is_gone_afterwards(tmp_path):
    with paying.redis(tmp_path) as port, socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(b"PING\r\n")
        assert client.recv(64) == b"+PONG\r\n"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 10)


@needs_redis
def test_lookups_by_way_of_a_disk_and_a_redis(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in (("CHUNKS", 24), ("ROUNDS", 30), ("MEASURED", 4), ("ARENA_BYTES", 8 << 20)):
        monkeypatch.setattr(lookup, name, value)
    lookup.main()
    found = last_line(capsys)
    assert found["bench"] == "lookup"
    assert min(found["arena_us"], found["below"], found["apart"]) > 0
    assert 8 <= found["apart_hits"] <= 24
    assert list(tmp_path.iterdir()) == []
