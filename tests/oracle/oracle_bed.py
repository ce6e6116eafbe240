"""Engines with an exact oracle on one node, and what tests of them begin and end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exact_engine import Engine, Shape, check_nothing_left, tokens
from node_harness import NodeProcess, NodeThread

from pdx.testing.waiting import wait_until

HISTORY = 1024  # tokens: four chunks
CHUNKS = HISTORY // 256
CHUNK = 64  # tokens, where the kind matters: windows and local parts are longer
both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


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


def of(kind: str, **shape: Any) -> dict[str, Any]:
    """The shape of an engine whose steps end where chunks end, since states are there alone."""
    return {"kind": kind, "budget": 256, "extra": {"chunk_tokens": CHUNK}, **shape}


def written(bed: OracleBed, **shape: Any) -> list[int]:
    """The beginning of a prompt, which the store has."""
    history = bed.tokens(HISTORY)
    writer = bed.engine("writer", **shape)
    writer.ask("w", history + bed.tokens(50, "w"), 2)
    bed.settled()
    return history


def reader_of(bed: OracleBed, **shape: Any) -> Any:
    """An engine that has computed a prompt: it knows how long that takes, and has told so."""
    reader = bed.engine("reader", **shape)
    reader.ask("warm", bed.tokens(300, "warm"), 2)
    return reader


def found(engine: Any, name: str, prompt: list[int], count: int, **settings: Any) -> int:
    """How many tokens of a prompt were not computed, whose answer is right."""
    before = engine.runner.computed
    engine.ask(name, prompt, count, **settings)
    return len(prompt) + count - 1 - int(engine.runner.computed - before)


def read_by_another(bed: OracleBed, *prompts: list[int], **shape: Any) -> None:
    """What the store has is right."""
    fresh = bed.engine("fresh", **shape)
    for number, prompt in enumerate(prompts):
        fresh.ask(f"again {number}", prompt + bed.tokens(30, "again"), 8)
