"""Two nodes with a disk each, and engines that hash blocks as vLLM does: where controllers look up, move and clear."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peers_harness import Cluster
from raw_engine import CHUNK_BYTES, Engine

from pdx.testing.waiting import wait_until
from pdx.wire.hints import Hints
from pdx.wire.tokens import chunk_keys
from pdx.wire.verbs import Model

NODES = ("alpha", "beta")
BLOCK, CHUNK = 4, 16  # tokens
LAYOUT = b"l" * 16
SHAPE = {
    "model": "0123456789abcdef", "block_tokens": str(BLOCK), "chunk_tokens": str(CHUNK), "num_shards": "1",
    "hashing": "sha256", "root": "5a" * 32, "salt_tag": "cache_salt", "vocabulary": "100000",
}  # fmt: skip
MODEL = Model("e" * 16, "", LAYOUT, SHAPE)

_fresh = itertools.count(1)


def prompt(chunks: int = 4, more: int = 3) -> list[int]:
    """Tokens that no other prompt of this process begins with: so many whole chunks, and some more."""
    first = next(_fresh)
    return [first, *range(1, CHUNK * chunks + more)]


class Bed:
    """Nodes by their names, and an engine at each."""

    def __init__(self, place: Path, **settings: Any) -> None:
        place.chmod(0o700)
        of_one = {name: {"disks": [str(place / f"disk-{name}")]} for name in NODES}
        common = {"store": "write-back", "store_window": 1e-9, **settings}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            self.cluster = undo.enter_context(Cluster(place, NODES, of_one=of_one, **common))
            self.cluster.start(*NODES)
            for name in NODES:
                wait_until(lambda name=name: self.disk(name).state == "ok", what="the disk is counted")
            wait_until(lambda: self.cluster.peer("alpha", "beta").state == "ready", what="they know each other")
            self.engines = {name: self.engine(name, undo) for name in NODES}
            self._stack = undo.pop_all()

    def disk(self, name: str) -> Any:
        """The status of a node's disk."""
        return self.cluster[name].status().tiers[0]

    def engine(self, name: str, undo: contextlib.ExitStack, **hello: Any) -> Engine:
        """An engine at a node, until `undo` is left."""
        made = Engine(self.address(name), **{"layout": LAYOUT, "shape": SHAPE, **hello})
        undo.callback(made.close)
        return made

    def address(self, name: str) -> str:
        """Where controllers attach to a node."""
        return self.cluster.address(name)

    @property
    def addresses(self) -> list[str]:
        """Of both."""
        return [self.address(name) for name in NODES]

    def save(self, name: str, tokens: Sequence[int], request: str = "", salt: str = "", **hints: Any) -> list[bytes]:
        """The prompt's chunks are in the node's memory; their bytes."""
        keys = chunk_keys(MODEL, tokens, salt)
        contents = {key: os.urandom(CHUNK_BYTES) for key in keys}
        self.engines[name].save(contents, request=request, hints=Hints(hints.pop("session", ""), **hints), lease_s=9.0)
        return list(contents.values())

    def close(self) -> None:
        """End it all."""
        self._stack.close()


@contextlib.contextmanager
def bed(place: Path, **settings: Any) -> Iterator[Bed]:
    """Two nodes, until the end of the block."""
    made = Bed(place, **settings)
    try:
        yield made
    finally:
        made.close()
