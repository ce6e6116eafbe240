"""Lookups in a node's index, by how many chunks are in it: one chunk at a time, and a prompt of 128k tokens at once.

One client on the engines' own connection asks a real node, one question after the other, for keys drawn at random from
all that are there. Chunks are as small as chunks get: the node never touches their bytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdx.bench.harness.interrupts import whole
from pdx.bench.harness.nodes import Asking, asking, one_node
from pdx.bench.harness.timing import Spread, spread
from pdx.bench.store.tiers import IDLE_S, check_room
from pdx.wire.messages import Admit, Ping, Release

CHUNK_BYTES = 4 << 10
ROOM_BYTES = 16 << 20
KEY_BYTES = 16
PROMPT_KEYS = 512  # 128k tokens at 256 per chunk
LEASE_S = 30.0
PROMPTS = 10  # one in so many questions is about a whole prompt


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One size of the index."""

    chunks: int
    lookups_per_s: float  # of one chunk that is there, with its lease, one after the other
    keys_per_s: float  # where a prompt of `PROMPT_KEYS` chunks is asked for at once
    ping: Spread  # the way to the node and back, to compare with
    hit: Spread
    miss: Spread
    release: Spread  # of the lease
    prompt: Spread


def measure_index(chunks: int, questions: int) -> IndexRow:
    """Put so many chunks into a node, and ask so many times for each kind of answer.

    :raises NodeUnavailable: the node does not answer. :raises ConfigError: no room in shared memory.
    """
    arena_bytes = chunks * CHUNK_BYTES + ROOM_BYTES
    check_room(arena_bytes)
    with whole(one_node(arena_bytes, exit_when_idle_s=IDLE_S)) as address, asking(address) as client:
        keys = [os.urandom(KEY_BYTES) for _ in range(chunks)]
        for first in range(0, chunks, PROMPT_KEYS):
            client.seal(keys[first : first + PROMPT_KEYS], CHUNK_BYTES)
        _ask(client, keys, max(1, questions // 10))
        client.times.clear()
        _ask(client, keys, questions)
    times = client.times
    return IndexRow(
        chunks=chunks,
        lookups_per_s=round(len(times["hit"]) / sum(times["hit"]), 1),
        keys_per_s=round(min(PROMPT_KEYS, chunks) * len(times["prompt"]) / sum(times["prompt"]), 1),
        ping=spread(times["ping"]),
        hit=spread(times["hit"]),
        miss=spread(times["miss"]),
        release=spread(times["release"]),
        prompt=spread(times["prompt"]),
    )


def _ask(client: Asking, keys: Sequence[bytes], rounds: int) -> None:
    """Every question in each round; that for a prompt in some of them."""
    draw = random.Random(0)
    prompt = min(PROMPT_KEYS, len(keys))

    def hit(name: str, wanted: Sequence[bytes], release: str) -> None:
        found = client.admit(name, Admit(list(wanted), lease_s=LEASE_S))
        if found.hits != len(wanted):
            raise RuntimeError(f"not all of {len(wanted)} chunks are there any more: {found}")
        if release:
            client.timed(release, Release(found.lease))
        else:
            client.call(Release(found.lease))

    for turn in range(rounds):
        client.timed("ping", Ping())
        hit("hit", [draw.choice(keys)], "release")
        client.timed("miss", Admit([os.urandom(KEY_BYTES)], lease_s=LEASE_S))
        if turn % PROMPTS == 0:
            first = draw.randrange(len(keys) - prompt + 1)
            hit("prompt", keys[first : first + prompt], "")
