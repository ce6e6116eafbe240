"""Lookups in a node's index, by how many chunks are in it: one chunk at a time, and a prompt of 128k tokens at once.

One client on the engines' own connection asks a real node, one question after the other, for keys drawn at random from
all that are there. Chunks are as small as chunks get: the node never touches their bytes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdx.bench.harness.interrupts import whole
from pdx.bench.harness.timing import Spread, spread
from pdx.bench.store.tiers import IDLE_S, check_room, one_node
from pdx.client.connection import Connection
from pdx.errors import NodeUnavailable
from pdx.wire.messages import VERSION, Admit, Admitted, Answer, Ask, Fill, Hello, Ping, Release

CHUNK_BYTES = 4 << 10
ROOM_BYTES = 16 << 20
KEY_BYTES = 16
PROMPT_KEYS = 512  # 128k tokens at 256 per chunk
LEASE_S = 30.0
ANSWER_S = 10.0
ATTACH_S = 20.0
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
    with (
        whole(one_node(arena_bytes, exit_when_idle_s=IDLE_S)) as address,
        Connection(address, Hello(VERSION, os.getpid(), "client", name="bench")) as connection,
    ):
        if not connection.attach(ATTACH_S):
            raise NodeUnavailable(f"the node for {chunks:,} chunks does not answer within {ATTACH_S:g} s")
        asked = _Asked(connection)
        keys = asked.fill(chunks)
        asked.all(keys, max(1, questions // 10))
        asked.times.clear()
        asked.all(keys, questions)
    times = asked.times
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


class _Asked:
    """What one attached client has asked, and how long each answer took."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.times: dict[str, list[float]] = {}

    def fill(self, chunks: int) -> list[bytes]:
        """Seal so many chunks; returns their keys."""
        keys = [os.urandom(KEY_BYTES) for _ in range(chunks)]
        for first in range(0, chunks, PROMPT_KEYS):
            reserved = self._connection.call(Admit(keys[first : first + PROMPT_KEYS], CHUNK_BYTES), ANSWER_S)
            if not isinstance(reserved, Admitted) or reserved.full:
                raise RuntimeError(f"the node has no room for chunk {first:,} of {chunks:,}: {reserved}")
            self._connection.call(Fill(reserved.granted_slots, layers=1, seal=True), ANSWER_S)
        return keys

    def all(self, keys: Sequence[bytes], rounds: int) -> None:
        """Every question in each round; that for a prompt in some of them."""
        draw = random.Random(0)
        prompt = min(PROMPT_KEYS, len(keys))
        for turn in range(rounds):
            self._timed("ping", Ping())
            self._hit("hit", [draw.choice(keys)], "release")
            self._timed("miss", Admit([os.urandom(KEY_BYTES)], lease_s=LEASE_S))
            if turn % PROMPTS == 0:
                first = draw.randrange(len(keys) - prompt + 1)
                self._hit("prompt", keys[first : first + prompt], "")

    def _hit(self, name: str, keys: Sequence[bytes], release: str) -> None:
        found = self._timed(name, Admit(list(keys), lease_s=LEASE_S))
        if not isinstance(found, Admitted) or found.hits != len(keys):
            raise RuntimeError(f"not all of {len(keys)} chunks are there any more: {found}")
        if release:
            self._timed(release, Release(found.lease))
        else:
            self._connection.call(Release(found.lease), ANSWER_S)

    def _timed(self, name: str, ask: Ask) -> Answer:
        started_at = time.perf_counter()
        answer = self._connection.call(ask, ANSWER_S)
        self.times.setdefault(name, []).append(time.perf_counter() - started_at)
        return answer
