"""A node and toy engines whose streams lag, and what can be asked of them. Fixtures are in conftest.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_harness import GpuNode
from lagging_streams import LaggingStreams
from node_harness import MIB, NodeProcess, NodeThread
from toy_engine import ToyEngine

from pdx.config import NodeConfig


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
            self.nodes.append(GpuNode(config, *flags))
            self.node.wait_ready()
        else:
            self.nodes.append(NodeProcess.ready(config) if self.is_killed else NodeThread(config))

    def engine(
        self, *, lag_s: float = 0.001, lags: bool = True, gpus: Sequence[str] = ("0",), **settings: Any
    ) -> ToyEngine:
        """An engine with a rank on each of `gpus`."""
        streams = [LaggingStreams(lag_s, gpu, self.log) for gpu in gpus] if lags else []
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
