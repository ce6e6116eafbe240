"""A host: a node that engines start, and engines by vLLM's own command line."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import psutil
from cases import completion, text
from engine_process import Server
from http_client import post
from node_harness import NodeProcess
from pair import ENGINE_ENV, ENGINE_FLAGS

import pdx
from pdx.cli.ports import free_ports
from pdx.errors import NodeError
from pdx.testing.waiting import wait_until
from pdx.wire.status import NodeStatus


class Host:
    """A host's node address and the engines on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/reuse.sock"
        self.servers: list[Server] = []

    def serve(self, name: str, model: Path, *flags: str, cores: str = "0", **settings: Any) -> Server:
        """An engine by the documented line; without vLLM's own prefix cache, so that every hit is the node's."""
        (port,) = free_ports(1)
        connector = {
            "kv_connector": "PdxConnector",
            "kv_connector_module_path": "pdx.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"node": self.address, "arena": "256MiB", "lookup_s": 30.0, **settings},
        }
        command = [
            *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--kv-transfer-config", json.dumps(connector), "--port", str(port)),
            *("--no-enable-prefix-caching", *ENGINE_FLAGS, *flags),
        ]
        env = {**ENGINE_ENV, "VLLM_CPU_OMP_THREADS_BIND": cores}
        server = Server(command, port, self.folder / f"{name}.log", env)
        self.servers.append(server)
        return server

    def status(self) -> NodeStatus:
        with pdx.connect(self.address, timeout_s=10) as node:
            return node.status()

    def workers(self) -> int:
        return sum(process.kind == "worker" for process in self.status().attached)

    def sealed(self) -> int:
        return self.status().chunks.get("sealed", 0)

    def disk_chunks(self) -> int:
        disk = self.status().tiers[0]
        assert disk is not None
        return disk.chunks

    def wait_attached_again(self, killed: int) -> None:
        """Until all of the engine's processes are attached to a node that one of them has started."""

        def is_attached() -> bool:
            try:
                status = self.status()
            except NodeError:
                return False
            return status.pid != killed and {"scheduler", "worker"} <= {each.kind for each in status.attached}

        wait_until(is_attached, timeout_s=60, what="the engine has a node again")

    def wait_saving(self, server: Server) -> None:
        """Until the engine puts what it computes into the store: all of its processes are attached then."""
        server.wait_ready()
        prompts = itertools.count(4000)

        def saves() -> bool:
            before = self.sealed()
            post(server.url, *completion(text(next(prompts), 300), max_tokens=1))
            return self.sealed() > before

        wait_until(saves, timeout_s=30, what=f"{server.log.name} saves")
        wait_until(lambda: self.status().chunks.keys() <= {"sealed"}, timeout_s=30, what="all shards are sealed")

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "pdx.node" in command and any(self.address in part for part in command):
                process.terminate()
                process.wait(10)


def hit_tokens(server: Server) -> float:
    """Prompt tokens that the engine took from the connector, by its own account."""
    return server.metric("vllm:external_prefix_cache_hits_total")


def is_storing(node: NodeProcess) -> bool:
    """Whether a chunk is on its way to the disk."""
    with pdx.connect(node.address) as client:
        [disk] = client.status().tiers
        return bool(disk.copies)
