"""`pdx node` and the `pdx` command itself, against a real node."""

from __future__ import annotations

import io
import json
import os
import signal

import msgspec
import pytest
from click.testing import CliRunner
from node_harness import arenas_of
from rich.console import Console

from pdx.cli.main import main
from pdx.cli.node import end_node, follow
from pdx.cli.options import said
from pdx.cli.tables import duration, size, table, to_json, view
from pdx.client.api import connect
from pdx.config import node_settings
from pdx.errors import NodeError, NodeUnavailable
from pdx.transports.channel import Availability
from pdx.wire.status import COUNTING, ArenaStatus, AttachedStatus, NodeStatus, PeerStatus, TierStatus


def pdx(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("arguments", [["fly"], ["node", "--force"], ["node", "--json"]])
def test_a_usage_error(arguments):
    assert pdx(*arguments).exit_code == 2


def test_status_as_json_and_as_tables(start_here):
    node = start_here()
    result = pdx("node", "--status", "--json", "--node", node.address)
    assert result.exit_code == 0, result.output
    status = json.loads(result.output)
    assert status["arena_bytes"] >= 8 << 20
    assert status["attached"] == [], "who asks is not listed"
    with connect(node.address) as client, client.reserve("kept", 5000) as chunk:
        chunk.seal()
        result = pdx("node", "--status", "--json", "--node", node.address)
    assert [each["kind"] for each in json.loads(result.output)["attached"]] == ["client"]
    result = pdx("node", "--status", "--node", node.address)
    assert result.exit_code == 0, result.output
    assert node.address in result.output
    assert "sealed" in result.output


def test_stop_ends_a_node_and_waits_until_nothing_of_it_is_left(node, monkeypatch):
    assert arenas_of(node.address)
    result = pdx("node", "--stop", "--node", node.address)
    assert result.exit_code == 0, result.output
    assert f"process {node.pid}" in result.output
    assert "8.0 MiB" in result.output
    assert node.process.wait(0) == 0
    assert not arenas_of(node.address)
    assert not os.path.exists(node.address.removeprefix("ipc://"))
    monkeypatch.setattr("pdx.cli.node.ANSWER_S", 0.1)
    again = pdx("node", "--stop", "--node", node.address)
    assert again.exit_code == 1
    assert "no node answers" in again.output


def test_stop_asks_before_it_takes_a_node_from_its_engines(node, attach):
    attach(node, kind="worker", engine="abcdefghij")
    result = pdx("node", "--stop", "--node", node.address)
    assert result.exit_code == 1
    assert f"worker abcdefgh (process {os.getpid()})" in result.output
    assert "--force" in result.output
    with connect(node.address) as client:
        assert client.status().pid == node.pid
    result = pdx("node", "--stop", "--force", "--node", node.address)
    assert result.exit_code == 0, result.output
    assert node.process.wait(0) == 0


def test_a_node_that_does_not_end_is_named(node, monkeypatch):
    told = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda pidfd, number: told.append(number))  # nor does it hear that
    with pytest.raises(NodeError, match=f"process {node.pid} has not ended"):
        end_node(node.address, force=False, timeout_s=0.0)
    assert told == [signal.SIGTERM]


def shown_of(status, width=200):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(status, "ipc:///run/node.sock"))
    return console.export_text()


def test_peers_are_shown_with_their_channel_and_what_went_over_it():
    address, rates = "tcp://10.0.0.2:7700", {"tcp": 1.5, "nixl": 2.25}
    peer = PeerStatus("beta", address, "ready", "nixl", rates, 3, 4, 5 << 20, 6 << 30, "it [was] silent")
    apart = "with engine 'e2': num_shards '2' and '[1]'"
    engine = AttachedStatus(5, "scheduler", "", "e1", 0, "both", "", 0, 0.1, apart)
    head = ("alpha", 1, 2, 3.0, 1 << 30, 1 << 30, {}, {}, 0, 7, 0, [engine], {}, "tcp://10.0.0.1:7700", [peer])
    tiers = [
        TierStatus("disk", "/var/cache/pdx", 12, 3 << 30, 100 << 30),
        TierStatus("remote", "s3://b/p", state="timeout: x"),
    ]
    status = NodeStatus(*head, pinned_bytes=9 << 20, tiers=tiers)
    shown = shown_of(status)
    assert "node alpha, ipc:///run/node.sock" in shown
    assert "peers connect to tcp://10.0.0.1:7700" in shown
    assert "7 pins (9.0 MiB)" in shown
    assert "disk /var/cache/pdx: 12 chunks, 3.0 GiB of 100.0 GiB" in shown
    assert "engine e1 shares no chunks with engine 'e2': num_shards '2' and '[1]'" in shown
    row, more = [line for line in shown.splitlines() if "beta" in line]
    assert row.split() == ["beta", "ready", "nixl", "2.25", "3", "4", "5.0", "MiB", "6.0", "GiB"]
    assert more == "peer beta: it [was] silent; tcp 1.50 GB/s"
    assert json.loads(to_json(status))["peers"][0]["channel"] == "nixl"


@pytest.mark.parametrize("width", [60, 80])
def test_numbers_are_never_broken_and_text_is_folded_and_not_lost(width):
    console = Console(width=width, file=io.StringIO())
    row = ("gpu-node-18.cluster.example.org", "123,456,789", "123.4 GiB", "not heard of for 12 s " * 4)
    console.print(table("", ("node", ">chunks", ">bytes", "what is the matter"), [row]))
    lines = console.file.getvalue().splitlines()
    assert {len(line) for line in lines} == {width}
    assert all(words in "".join(lines) for words in ("chunks", "bytes", "123,456,789", "123.4 GiB"))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert "".join(cell[0] for cell in cells) == row[0]
    assert " ".join(cell[3] for cell in cells).split() == row[3].split()


FULL = NodeStatus(
    *("gpu-node-16.example.org", 1, 1234567, 1e6, 64 << 30, 12 << 30, {"sealed": 10**6}, {"sealed": 10**12}, 12, 3, 7),
    attached=[
        AttachedStatus(1234567, "scheduler", "", "3f9c2a7be0", 0, "prefill", "http://10.128.14.201:8100", 128, 12.3),
        AttachedStatus(1234568, "worker", "", "3f9c2a7be0", 1, "prefill", "", 0, 0.2),
    ],
    counters={"degraded_request_without_pdx": 10**9, "landed_bytes": 10**15},
    listen="tcp://10.128.14.201:7700",
    peers=[
        PeerStatus("gpu-node-17", "", "ready", "nixl", {"nixl": 11.25, "tcp": 2.31}, 12, 3, 5 << 30, 123 << 30, ""),
        PeerStatus("gpu-node-18.example.org", "", "closed", "", {}, 0, 0, 0, 0, f"it {'was silent ' * 20}"),
    ],
    arenas=[ArenaStatus("", 32 << 30, 1 << 30), ArenaStatus("GPU-8a7b6c5d-1234-5678-9abc-def012345678", 32 << 30, 0)],
    tiers=[
        TierStatus(
            *("disk", "/var/cache/pdx/a/folder/of/some/length", 123_456, 300 << 30, 400 << 30, "ok", 12, 2.31, 1.97),
            *(True, 123_456, 7890, 5555, 6666, 300 << 30, 310 << 30, 12, 3, 200 << 30, 210 << 30),
        )
    ],
)


def test_a_status_has_its_words_and_numbers_whole_on_a_terminal_of_80():
    shown = shown_of(FULL, width=80)
    assert max(map(len, shown.splitlines())) <= 80
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith(("gpu-node", "3f9c2a7b"))}
    assert rows["gpu-node-17"] == ["gpu-node-17", "ready", "nixl", "11.25", "12", "3", "5.0", "GiB", "123.0", "GiB"]
    assert rows["gpu-node-18.example.org"] == ["gpu-node-18.example.org", "closed", *["0", "0", "0", "B", "0", "B"]]
    assert rows["3f9c2a7b"] == ["3f9c2a7b", "worker", "1", "prefill", "1234568", "0", "0.2", "s"]
    for words in ("10.128.14.201:8100", "channel", "running", "landing", "123456 hits, 7890 misses"):
        assert words in shown


def test_words_of_peers_stores_and_engines_steer_no_terminal():
    evil = "\x1b[2J\x9b2J\u202e"
    peer = PeerStatus(evil, evil, "ready", evil, {evil: 1.0}, 1, 1, 1, 1, evil)
    attached = AttachedStatus(5, "scheduler", evil, evil, 0, "both", evil, 0, 0.1, evil)
    head = ("alpha", 1, 2, 3.0, 1 << 30, 1 << 30, {}, {}, 0, 7, 0, [attached], {}, "", [peer])
    shown = shown_of(NodeStatus(*head, tiers=[TierStatus("remote", evil, state=evil)]))
    assert "remote \\x1b[2J\\x9b2J\\u202e; " in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_node_whose_only_channel_does_not_work_does_not_start(place, monkeypatch):
    missing = Availability(False, "NIXL does not import: no module", "pip install 'nixl'")
    monkeypatch.setattr("pdx.transports.nixl.region.NixlRegion.availability", lambda: missing)
    monkeypatch.setattr("pdx.node.daemon.run", lambda config: None)
    address = f"ipc://{place}/node.sock"
    result = pdx("node", "--channel", "nixl", "--node", address)
    assert result.exit_code == 1
    assert "--channel nixl: NIXL does not import: no module; pip install 'nixl' (pdx doctor" in result.output
    assert pdx("node", "--channel", "nixl", "--channel", "tcp", "--node", address).exit_code == 0


@pytest.mark.parametrize("channel", ["pigeon", "inproc"])
def test_a_channel_that_cannot_be_is_one_line_and_status_1(place, channel):
    result = pdx("node", "--channel", channel, "--node", f"ipc://{place}/node.sock")
    assert result.exit_code == 1
    assert f"no channel between nodes is named '{channel}'; there are shm, cuda_ipc, tcp" in result.output


def test_no_node_is_one_line_and_status_1(place, monkeypatch):
    def connect(address):
        raise NodeUnavailable("nobody there")

    monkeypatch.setattr("pdx.client.api.connect", connect)
    result = pdx("node", "--status", "--node", f"ipc://{place}/none.sock")
    assert (result.exit_code, result.output) == (1, "Error: nobody there\n")


def test_sizes_and_durations_read_well():
    assert [size(n) for n in (0, 1023, 1024, 3 << 20, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5.0 TiB"]
    assert [duration(s) for s in (5.9, 65, 7265)] == ["5 s", "1 min 5 s", "2 h 1 min"]


@pytest.mark.parametrize(
    ("arena", "gpus", "settings"),
    [
        (None, [], {"gpu_arena_bytes": 2 << 20}),
        (None, ["0", "1"], {"arena_bytes": 2 << 20, "gpu": "0", "more_gpus": ["1"], "gpu_arena_bytes": 2 << 20}),
        ("8MiB", ["0", "1"], {"arena_bytes": 8 << 20, "more_gpus": ["0", "1"], "gpu_arena_bytes": 2 << 20}),
    ],
)
def test_where_chunks_lie_is_said_by_arena_and_gpu(arena, gpus, settings):
    assert node_settings(said({"arena": arena, "gpus": gpus, "gpu_arena": "2MiB"})) == settings


def test_each_disk_has_a_line_until_its_files_are_counted():
    def with_tiers(*tiers):
        return msgspec.structs.replace(FULL, tiers=[TierStatus(*each) for each in tiers])

    told = [
        with_tiers(("disk a", "/a", 10, 0, 0, COUNTING), ("disk b", "/b", 3, 0, 0, COUNTING), ("remote", "r")),
        with_tiers(("disk a", "/a", 1200, 0, 0, COUNTING), ("disk b", "/b", 5, 0, 0, "ok"), ("remote", "r")),
        with_tiers(("disk a", "/a", 1300, 0, 0, "ok"), ("disk b", "/b", 5, 0, 0, "ok"), ("remote", "r")),
    ]
    reads = iter(told)
    screen = io.StringIO()
    follow(lambda: next(reads), Console(file=screen, force_terminal=True, width=100), pause_s=0.15)
    assert "counting the files of /a" in screen.getvalue()
    assert "1200/?" in screen.getvalue()
    assert next(reads, None) is None
