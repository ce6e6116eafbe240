"""Two nodes with a disk each, and engines that hash blocks as vLLM does: where controllers look up, move and clear."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peers_harness import Cluster, disk_pair
from raw_engine import CHUNK_BYTES, Engine

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

    def __init__(self, cluster: Cluster, undo: contextlib.ExitStack) -> None:
        self.cluster = cluster
        self.engines = {name: Engine(self.address(name), layout=LAYOUT, shape=SHAPE) for name in NODES}
        for engine in self.engines.values():
            undo.callback(engine.close)

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


@contextlib.contextmanager
def bed(place: Path, **settings: Any) -> Iterator[Bed]:
    """Two nodes, until the end of the block."""
    place.chmod(0o700)
    with disk_pair(place, NODES, **settings) as cluster, contextlib.ExitStack() as undo:
        yield Bed(cluster, undo)
