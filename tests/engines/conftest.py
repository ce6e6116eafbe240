"""One plain engine for the expected answers, then a prefiller, a decoder and a proxy around one node.

Never more than two engines at a time: the machines that run these tests have two cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp  # noqa: F401 - fail early where the proxy could not run
import pytest
from cases import CASES, MODEL
from engine_process import Server, free_port, wait_until
from http_client import post

import pdx
from pdx.config import NodeConfig
from pdx.messages import NodeStatus
from pdx.node.start import start

pytest.importorskip("vllm")

ENGINE_FLAGS = [
    "--served-model-name", MODEL, "--enforce-eager", "--max-model-len", "4096", "--dtype", "float32",
    "--max-num-batched-tokens", "384", "--disable-uvicorn-access-log",
]  # fmt: skip
ENGINE_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
ARENA_BYTES = 256 << 20


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private folder with a short path, for sockets and logs."""
    folder = tmp_path_factory.mktemp("e")
    folder.chmod(0o700)
    return folder


def make_tiny(folder: Path, seed: int) -> Path:
    from pdx.testing.tiny_llama import make_model

    make_model(folder, layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, seed=seed)
    return folder


@pytest.fixture(scope="session")
def model(workplace: Path) -> Path:
    return make_tiny(workplace / "model", seed=0)


@pytest.fixture(scope="session")
def expected(workplace: Path, model: Path) -> dict[str, Any]:
    """What a plain engine answers to every case."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    server = Server([*command, "--port", str(port), *ENGINE_FLAGS], port, workplace / "plain.log", ENGINE_ENV)
    try:
        server.wait_ready()
        return {name: post(server.url, path, body) for name, (path, body) in CASES.items()}
    finally:
        server.stop()


class Pair:
    """A node, a prefiller, a decoder and a proxy."""

    def __init__(self, workplace: Path, model: Path) -> None:
        self.workplace = workplace
        self.model = model
        self.node_address = f"ipc://{workplace}/node.sock"
        self.control = f"ipc://{workplace}/proxy.sock"
        # Short deadlines, so that tests can outlast them.
        self.node_config = NodeConfig(
            address=self.node_address,
            arena_bytes=ARENA_BYTES,
            proxy=self.control,
            report_s=0.2,
            max_lease_s=3.0,
            reserve_s=3.0,
        )
        self.node = start(self.node_config)
        port = free_port()
        command = [sys.executable, "-m", "pdx.cli.main", "proxy", "--port", str(port), "--control", self.control]
        self.proxy = Server(command, port, workplace / "proxy.log")
        self.prefill = self.serve("prefill", core=0)
        self.decode = self.serve("decode", core=1)

    def serve(self, role: str, core: int) -> Server:
        port = free_port()
        options = ["--node", self.node_address, "--arena", str(ARENA_BYTES), "--proxy", self.control]
        command = [sys.executable, "-m", "pdx.cli.main", "serve", role, str(self.model), *options]
        env = {**ENGINE_ENV, "VLLM_CPU_OMP_THREADS_BIND": str(core)}
        return Server([*command, "--port", str(port), *ENGINE_FLAGS], port, self.workplace / f"{role}.log", env)

    def wait_ready(self) -> None:
        for server in (self.prefill, self.decode):
            server.wait_ready()
        wait_until(self.is_attached, 30, "both engines are attached")
        wait_until(self.proxy.is_healthy, 10, "the proxy serves")

    def status(self) -> NodeStatus:
        with pdx.connect(self.node_address, timeout_s=10) as node:
            return node.status()

    def is_attached(self) -> bool:
        kinds = sorted(process.kind for process in self.status().attached if process.kind != "client")
        return kinds == ["scheduler", "scheduler", "worker", "worker"]

    def is_at_rest(self) -> bool:
        """Nothing is being filled, leased, transferred or held back."""
        status = self.status()
        busy = {state: count for state, count in status.chunks.items() if state != "sealed"}
        return not busy and not status.leases and not status.transfers

    def wait_at_rest(self, timeout_s: float = 5.0) -> None:
        wait_until(self.is_at_rest, timeout_s, "the arena's counters are back at rest")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return post(self.proxy.url, path, body)

    def post_all(self, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
        with ThreadPoolExecutor(len(cases)) as pool:
            return list(pool.map(lambda case: self.post(*case), cases))

    def close(self) -> None:
        for server in (self.proxy, self.prefill, self.decode):
            server.stop()
        for process in self.node_processes():
            process.terminate()
            process.wait(10)
        self.node.wait(10)

    def node_processes(self) -> list[Any]:
        import psutil

        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if "pdx.node" in (process.info["cmdline"] or [])
            and self.node_address in json.dumps(process.info["cmdline"])
        ]


@pytest.fixture(scope="session")
def pair(workplace: Path, model: Path, expected: dict[str, Any]) -> Iterator[Pair]:
    """Built after the plain engine has ended."""
    pair = Pair(workplace, model)
    try:
        pair.wait_ready()
        yield pair
    finally:
        pair.close()
