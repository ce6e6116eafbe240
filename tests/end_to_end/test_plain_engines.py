"""Two plain engines, each with a node of its own, and no proxy: what one has computed, the other's node fetches."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import computed_prompt_tokens, essence
from cases import completion, text
from engine_process import Server
from http_client import post
from pair import ARENA_BYTES, ENGINE_ENV, ENGINE_FLAGS

import pdx
from pdx.cli.ports import free_ports
from pdx.config import NodeConfig, listen_address
from pdx.node.start import start
from pdx.testing.waiting import wait_until
from pdx.wire.status import NodeStatus

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

CHUNK = 256
NAMES = ("one", "two")


class Hosts:
    """What two hosts would have: a node and an engine each, which know each other by a roster."""

    def __init__(self, folder: Path, model: Path) -> None:
        roster = folder / "roster.toml"
        self.configs = {
            name: NodeConfig(
                address=f"ipc://{folder}/{name}.sock",
                name=name,
                arena_bytes=ARENA_BYTES,
                channels=["tcp"],
                roster=str(roster),
                peer_lookup_s=5.0,  # others use the cores of these nodes, too
            )
            for name in NAMES
        }
        entries = [f'[nodes.{name}]\naddress = "{listen_address(self.configs[name])}"\n' for name in NAMES]
        roster.write_text("".join(entries))
        roster.chmod(0o600)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {name: start(self.configs[name]) for name in NAMES}
        self.engines = [self._serve(folder, model, name, core) for core, name in enumerate(NAMES)]

    def _serve(self, folder: Path, model: Path, name: str, core: int) -> Server:
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "pdx.cli.main", "serve", "both", str(model), "--no-start-node"]
        command += ["--node", self.configs[name].address, "--port", str(port), *ENGINE_FLAGS]
        return Server(command, port, folder / f"{name}.log", {**ENGINE_ENV, "VLLM_CPU_OMP_THREADS_BIND": str(core)})

    def wait_ready(self) -> None:
        for engine in self.engines:
            engine.wait_ready()
        wait_until(self._is_ready, timeout_s=30, what="engines are attached, and nodes connected")

    def _is_ready(self) -> bool:
        statuses = [self.status(name) for name in NAMES]
        kinds = [{process.kind for process in status.attached} for status in statuses]
        return all(kind >= {"scheduler", "worker"} for kind in kinds) and all(
            [peer.state for peer in status.peers] == ["ready"] for status in statuses
        )

    def status(self, name: str) -> NodeStatus:
        with pdx.connect(self.configs[name].address, timeout_s=10) as node:
            return node.status()

    def counter(self, name: str, counter: str) -> int:
        return self.status(name).counters.get(counter, 0)

    def given_up(self, name: str) -> int:
        """How often a node fetched nothing because it seemed, or was, slower than computing."""
        counters = self.status(name).counters
        return counters.get("fetches_not_worth", 0) + counters.get("fetches_late", 0)

    def close(self) -> None:
        for engine in self.engines:
            engine.stop()
        for node in self.nodes.values():
            node.send_signal(signal.SIGCONT)
            node.terminate()
            node.wait(10)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("p")
    folder.chmod(0o700)
    made = Hosts(folder, model)
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()


def asked(engine: Server, request: tuple[str, dict[str, Any]]) -> tuple[Any, float]:
    """What an engine answers, and how many tokens of the prompt it computes."""
    before = computed_prompt_tokens(engine)
    answer = essence(post(engine.url, *request))
    return answer, computed_prompt_tokens(engine) - before


@pytest.mark.parametrize("length", [1000, 3000])
@pytest.mark.parametrize("at", [0, 1])
def test_a_prompt_that_the_other_engine_has_had_is_not_computed(hosts: Hosts, at: int, length: int) -> None:
    """Where others have the cores, the channel may be slower than computing for a while: then it is computed, and the
    node says so."""
    first, second = hosts.engines[at], hosts.engines[1 - at]
    seeds = itertools.count(9000 + 10_000 * at + 100 * length)

    def is_fetched() -> bool:
        path, body = request = completion(text(next(seeds), length))
        before = hosts.counter(NAMES[at], "sealed")  # ever, for the arena may be full
        given_up = hosts.given_up(NAMES[1 - at])
        answer, computed = asked(first, request)
        assert computed == length
        wait_until(lambda: hosts.counter(NAMES[at], "sealed") >= before + length // CHUNK, what="all is saved")
        again, computed = asked(second, request)
        is_fetched = computed <= CHUNK + length % CHUNK
        assert is_fetched or hosts.given_up(NAMES[1 - at]) > given_up
        alone, computed = asked(second, (path, {**body, "cache_salt": "alone"}))
        assert computed == length
        assert answer == again == alone
        return is_fetched

    wait_until(is_fetched, timeout_s=120, what="a prompt is fetched")


def test_a_node_that_is_stopped_or_gone_keeps_nobody_waiting(hosts: Hosts) -> None:
    """The last test here: it ends one of the nodes."""
    second, node = hosts.engines[1], hosts.nodes["one"]
    path, body = completion(text(9500, 1000))
    alone = asked(second, (path, {**body, "cache_salt": "alone"}))[0]
    node.send_signal(signal.SIGSTOP)
    assert asked(second, (path, body)) == (alone, 1000)
    node.kill()
    wait_until(lambda: [peer.state for peer in hosts.status("two").peers] != ["ready"], timeout_s=30, what="it is lost")
    path, body = completion(text(9501, 1000))
    alone = asked(second, (path, {**body, "cache_salt": "alone"}))[0]
    assert asked(second, (path, body)) == (alone, 1000)
