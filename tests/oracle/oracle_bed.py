"""Engines with an exact oracle on one node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exact_engine import Engine, Shape, check_nothing_left, tokens
from node_harness import NodeProcess, NodeThread

from pdx.testing.waiting import wait_until


class OracleBed:
    """Engines on one node. At its end nothing is left of their requests."""

    def __init__(self, model: Path, node: NodeProcess | NodeThread, name: str) -> None:
        """`name`: beds of the same name have the same tokens."""
        self.node: Any = node
        self._model, self._name = model, name
        self._before = node.status()
        self.engines: list[Engine] = []

    def tokens(self, count: int, seed: Any = 0) -> list[int]:
        """Some tokens that no other bed has, the same for the same seed."""
        return tokens(count, (self._name, seed))

    def counted(self, counter: str) -> int:
        """How far a counter of the node has come since the bed was made."""
        return self.node.status().counters.get(counter, 0) - self._before.counters.get(counter, 0)

    def forget_counts(self) -> None:
        """The node is another one from now on."""
        self._before = self.node.status()

    def engine(self, name: str, **shape: Any) -> Engine:
        """An engine of this shape."""
        engine = Engine(name, self._model, self.node.address, Shape(**shape))
        self.engines.append(engine)
        return engine

    def stored(self, chunks: int) -> None:
        """Wait until so many chunks were sealed since the bed was made."""
        wait_until(lambda: self.counted("sealed") >= chunks, what=f"{chunks} chunks are sealed")

    def settled(self) -> None:
        """Wait until the node holds nothing but chunks that are sealed: all that engines have computed is there."""
        wait_until(self._holds_nothing, what="no lease is left, and no chunk that nobody fills")

    def close(self) -> None:
        """Let the engines step until nothing is left, and end them."""
        try:
            for engine in self.engines:
                engine.run()
            check_nothing_left(self.engines)
            self.settled()
        finally:
            for engine in self.engines:
                engine.close()

    def _holds_nothing(self) -> bool:
        status = self.node.status()
        return not status.leases and not status.transfers and set(status.chunks) <= {"sealed", "evicting"}
