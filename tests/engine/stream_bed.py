"""A node and toy engines whose streams lag, and what can be asked of them. Fixtures are in conftest.py."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from typing import Any

import forked
import msgspec
from lagging_streams import LaggingStreams
from node_harness import MIB, NodeProcess, NodeThread
from toy_engine import Request, ToyEngine

from pdx.config import NodeConfig, private_folder, socket_path
from pdx.testing.waiting import wait_until


class FakeGpuNode(NodeProcess):
    """A node whose process has the fake driver, with its arena on the fake GPU."""

    def __init__(self, config: NodeConfig, *flags: str) -> None:
        self.config = config
        self.address = config.address
        path = socket_path(config.address)
        private_folder(path.parent)
        program = ["-P", "-m", "fake_cuda", *flags, "-m", "pdx.node"]
        with open(f"{path}.log", "ab") as log:
            self.process = forked.Popen(
                [*program, msgspec.json.encode(config).decode()], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )


class Bed:
    """A node, and engines whose streams lag. `log` has what workers told the node, and what their kernels did.

    The node has a process of its own where it `is_killed`, or has a GPU: memory of another's.
    """

    def __init__(self, address: str, *, on_gpu: bool, is_killed: bool) -> None:
        self.address = address
        self.on_gpu = on_gpu
        self.is_killed = is_killed
        self.nodes: list[Any] = []
        self.made: list[tuple[ToyEngine, list[LaggingStreams]]] = []
        self.log: list[Any] = []

    @property
    def node(self) -> Any:
        return self.nodes[-1]

    def start_node(self, *flags: str, **settings: Any) -> None:
        config = NodeConfig(
            **{"address": self.address, "arena_bytes": 8 * MIB, "gpu": "0" if self.on_gpu else "", **settings}
        )
        if self.on_gpu:
            self.nodes.append(FakeGpuNode(config, *flags))
            self.node.wait_ready()
        else:
            self.nodes.append(NodeProcess.ready(config) if self.is_killed else NodeThread(config))

    def engine(
        self, *, lag_s: float = 0.001, lags: bool = True, gpus: Sequence[str] = ("0",), **settings: Any
    ) -> ToyEngine:
        """An engine with a rank on each of `gpus`."""
        streams = [LaggingStreams(lag_s, gpu) for gpu in gpus] if lags else []
        for each in streams:
            each.log = self.log
        if streams:
            settings |= {"streams": streams[0], "more_streams": streams[1:], "shards": len(streams)}
        try:
            engine = ToyEngine(self.address, f"toy-{len(self.made)}", **settings)
        except BaseException:
            for each in streams:
                each.close()
            raise
        self.made.append((engine, streams))
        return engine

    def told(self, kind: type) -> list[Any]:
        return [entry for entry in self.log if isinstance(entry, kind)]

    def wait_sealed(self, count: int) -> None:
        wait_until(lambda: self.node.status().chunks.get("sealed", 0) == count, what=f"{count} chunks are sealed")

    def wait_at_rest(self) -> None:
        def at_rest() -> bool:
            status = self.node.status()
            return set(status.chunks) <= {"sealed"} and not status.leases and not status.transfers

        wait_until(at_rest, what="nobody holds anything")

    def counted(self, reason: str) -> int:
        return self.node.status().counters.get(f"degraded_{reason}", 0)

    def close(self) -> None:
        for _, streams in self.made:
            for stream in (stream for each in streams for stream in each.made):
                stream.gate.set()
        for engine, _ in self.made:
            engine.close()
        for node in self.nodes:
            node.close()
        for _, streams in self.made:
            for each in streams:
                each.close()


def streams_of(engine: ToyEngine) -> LaggingStreams:
    assert engine.streams is not None
    return engine.streams


def tokens(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(count)]


def saved(engine: ToyEngine, prompt: list[int], params: Any = None, step: int = 1000) -> Request:
    """A request whose prompt was computed; what its gathers still have to do is queued."""
    request = Request(f"saved-{id(prompt)}", prompt, params)
    assert engine.admit(request) == set()
    while request.num_computed < len(prompt):
        engine.step((request, min(step, len(prompt) - request.num_computed)))
    return request


def check_loaded(engine: ToyEngine, prompt: list[int], count: int) -> None:
    """Another request finds `count` tokens of this prompt, and they are what was computed."""
    again = Request(f"again-{id(engine)}-{count}", prompt)
    assert engine.admit(again) == set()
    assert again.num_computed == count
    engine.check_cache(again, count)
    engine.finish(again)
