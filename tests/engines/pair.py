"""A node, a prefiller, a decoder and a proxy, as real processes."""

from __future__ import annotations

import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from cases import MODEL, completion, text
from engine_process import Server, free_port, wait_until
from http_client import post

import pdx
from pdx.config import NodeConfig
from pdx.messages import NodeStatus
from pdx.node.start import start

ENGINE_FLAGS = [
    "--served-model-name", MODEL, "--enforce-eager", "--max-model-len", "4096", "--dtype", "float32",
    "--max-num-batched-tokens", "384", "--disable-uvicorn-access-log",
]  # fmt: skip
ENGINE_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
ARENA_BYTES = 256 << 20


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
        prompts = itertools.count(5000)
        wait_until(lambda: self.hands_over(text(next(prompts), 300)), 30, "prompts are handed over")

    def hands_over(self, prompt: str) -> bool:
        """Whether the decoder computes next to nothing of this prompt, by its own account."""
        before = self.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
        self.post(*completion(prompt, max_tokens=2))
        return self.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute") - before <= 2

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
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if "pdx.node" in (process.info["cmdline"] or [])
            and self.node_address in json.dumps(process.info["cmdline"])
        ]
