"""A prefiller, a decoder, a proxy and one or two nodes, as real processes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from cases import MODEL, completion, text
from engine_process import Server
from http_client import post

import pdx
from pdx.cli.ports import free_ports
from pdx.config import NodeConfig
from pdx.node.start import start
from pdx.testing.waiting import wait_until
from pdx.wire.status import NodeStatus

ENGINE_FLAGS = [
    "--served-model-name", MODEL, "--enforce-eager", "--max-model-len", "4096", "--dtype", "float32",
    "--max-num-batched-tokens", "384", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details",
]  # fmt: skip
ENGINE_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
ARENA_BYTES = 256 << 20
SHORT = {"peer_timeout_s": 2.0, "max_lease_s": 3.0, "reserve_s": 3.0}  # so that tests can outlast them


class Pair:
    """A prefiller, a decoder and a proxy; around one node, or (with a channel) each engine with a node of its own."""

    def __init__(
        self, workplace: Path, model: Path, channel: str | None = None, deadlines: Mapping[str, float] = SHORT
    ) -> None:
        """`deadlines`: of the nodes; a test that loads the machine and waits for none of them has the nodes' own."""
        self._deadlines = deadlines
        self.workplace = workplace
        self.model = model
        self.is_wired = channel is not None
        self.control = f"ipc://{workplace}/proxy.sock"
        self.configs = {role: self.config(role, channel) for role in ("prefill", "decode")}
        self.node_address = self.configs["prefill"].address
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}  # by address
        for role in self.configs:
            self.start_node(role)
        port, admin_port = free_ports(2)
        command = [sys.executable, "-m", "pdx.cli.main", "proxy", "--port", str(port), "--control", self.control]
        command += ["--min-split-tokens", "0"]  # every case is about two legs
        command += ["--admin", f"127.0.0.1:{admin_port}", "--debug-headers"]
        self._proxy = command, port, admin_port
        self.proxy = Server(command, port, workplace / "proxy.log", admin_port=admin_port)
        self.prefill = self.serve("prefill", core=0)
        self.decode = self.serve("decode", core=1)

    def serve_anew(self, *options: str) -> None:
        """The proxy is replaced by one that also has these options."""
        self.proxy.stop()
        command, port, admin_port = self._proxy
        self.proxy = Server([*command, *options], port, self.workplace / "proxy.log", admin_port=admin_port)
        self.proxy.wait_ready()

    def config(self, role: str, channel: str | None) -> NodeConfig:
        name = role if channel else "node"
        return NodeConfig(
            address=f"ipc://{self.workplace}/{name}.sock",
            arena_bytes=ARENA_BYTES,
            proxy=self.control,
            name=name if channel else "",
            channels=[channel] if channel else [],
            report_s=0.2,
            **self._deadlines,
        )

    def start_node(self, role: str) -> None:
        """Start the node of this role's engine where none runs."""
        config = self.configs[role]
        node = self.nodes.get(config.address)
        if node is None or node.poll() is not None:
            self.nodes[config.address] = start(config)

    def kill_node(self, role: str) -> None:
        """SIGKILL, and wait until it is gone."""
        node = self.nodes[self.configs[role].address]
        node.kill()
        node.wait(10)

    def join_by(self, channel: str) -> None:
        """Replace both nodes by such that use this channel; their memory is empty, the engines attach again."""
        for role in self.configs:
            self.nodes[self.configs[role].address].terminate()
            self.nodes[self.configs[role].address].wait(10)
            self.configs[role] = self.config(role, channel)
            self.start_node(role)
        self.wait_ready()

    def serve(self, role: str, core: int) -> Server:
        (port,) = free_ports(1)
        options = ["--node", self.configs[role].address, "--proxy", self.control]
        # An engine could not know a wired node's name and channel.
        options += ["--no-start-node"] if self.is_wired else ["--arena", str(ARENA_BYTES)]
        command = [sys.executable, "-m", "pdx.cli.main", "serve", role, str(self.model), *options]
        env = {**ENGINE_ENV, "VLLM_CPU_OMP_THREADS_BIND": str(core)}
        return Server([*command, "--port", str(port), *ENGINE_FLAGS], port, self.workplace / f"{role}.log", env)

    def wait_ready(self) -> None:
        for server in (self.prefill, self.decode):
            server.wait_ready()
        wait_until(self.is_attached, timeout_s=30, what="both engines are attached")
        wait_until(self.proxy.is_healthy, timeout_s=10, what="the proxy serves")
        prompts = itertools.count(5000)
        wait_until(lambda: self.hands_over(text(next(prompts), 300)), timeout_s=30, what="prompts are handed over")

    def hands_over(self, prompt: str) -> bool:
        """Whether the decoder computes next to nothing of this prompt, by its own account."""
        before = self.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
        self.post(*completion(prompt, max_tokens=2))
        return self.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute") - before <= 2

    def status(self, role: str = "prefill") -> NodeStatus:
        """The status of this role's node."""
        with pdx.connect(self.configs[role].address, timeout_s=10) as node:
            return node.status()

    def statuses(self) -> list[NodeStatus]:
        """The status of each node."""
        return [self.status(role) for role in (self.configs if self.is_wired else ["prefill"])]

    def is_attached(self) -> bool:
        kinds = [process.kind for status in self.statuses() for process in status.attached if process.kind != "client"]
        return sorted(kinds) == ["scheduler", "scheduler", "worker", "worker"]

    def is_at_rest(self) -> bool:
        """Nothing is being filled, leased, transferred, pushed or held back."""
        return all(map(_is_at_rest, self.statuses()))

    def wait_at_rest(self, timeout_s: float = 15.0) -> None:
        wait_until(self.is_at_rest, timeout_s=timeout_s, what="the arena's counters are back at rest")

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
        for node in self.nodes.values():
            node.wait(10)

    def node_processes(self) -> list[Any]:
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if "pdx.node" in (process.info["cmdline"] or [])
            and any(config.address in json.dumps(process.info["cmdline"]) for config in self.configs.values())
        ]


def plain_answers(folder: Path, model: Path, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What an engine without PDX answers to these; its log is in `folder`."""
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    server = Server([*command, "--port", str(port), *ENGINE_FLAGS], port, folder / "plain.log", ENGINE_ENV)
    try:
        server.wait_ready()
        return {name: post(server.url, path, body) for name, (path, body) in cases.items()}
    finally:
        server.stop()


def _is_at_rest(status: NodeStatus) -> bool:
    busy = {state: count for state, count in status.chunks.items() if state != "sealed"}
    flowing = [peer for peer in status.peers if peer.pushes or peer.landing]
    return not busy and not flowing and not status.leases and not status.transfers


def wait_prefilling(pair: Pair, answer: Future[Any] | None = None) -> None:
    """Until a prefill is in the middle of its work; through one connection, because it lasts for a moment only. Or
    until there is an answer: the node, on a busy machine, has told of the moment too late."""
    with pdx.connect(pair.node_address) as node:

        def is_under_way() -> bool:
            return bool(node.status().chunks.get("filling")) or (answer is not None and answer.done())

        wait_until(is_under_way, timeout_s=60, what="prefill is under way")
