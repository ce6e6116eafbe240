"""What tests of tiers below memory do with a toy engine and its node."""

from __future__ import annotations

import itertools
import random

from node_harness import NodeThread
from toy_engine import CHUNK, Request, ToyEngine

import pdx
from pdx.testing.waiting import wait_until

CHUNKS = 3
_numbers = itertools.count()


def tokens(seed: int, chunks: int = CHUNKS) -> list[int]:
    """A prompt of so many chunks and a bit."""
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(chunks * CHUNK + 2)]


def run(engine: ToyEngine, prompt: list[int]) -> int:
    """A request from its question to its end; how many of its tokens were loaded."""
    request = Request(f"request-{next(_numbers)}", prompt)
    assert engine.admit(request) == set()
    found = request.num_computed
    engine.step((request, len(prompt) - found))
    engine.check_cache(request, len(prompt))
    engine.finish(request)
    return found


def forget(node: NodeThread) -> None:
    """Somebody takes all the room of what memory has."""
    wait_until(lambda: set(node.status().chunks) <= {"sealed"}, what="nothing is written")
    wait_until(lambda: not any(tier.copies for tier in node.status().tiers), what="nothing is stored")
    wait_until(lambda: not node.status().leases, what="nobody holds anything")
    with pdx.connect(node.address) as client, client.reserve("filler", node.config.arena_bytes):
        assert "sealed" not in client.status().chunks


def stored(node: NodeThread, count: int) -> None:
    def has_stored() -> bool:
        counters = node.status().counters
        return counters.get("disk_stored", 0) + counters.get("remote_stored", 0) >= count

    wait_until(has_stored, what="all are stored")
