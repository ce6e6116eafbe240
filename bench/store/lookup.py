"""What tiers below memory cost a lookup: `python -m pdx.bench.store.lookup`.

Three nodes are asked in turns for a prompt of 512 chunks: one with an arena alone, which has all of them; one with a
disk and a real Redis (`redis-server`) below, whose arena has all of them, too; and one of which a third lies in the
arena at first, a third on the disk and a third in the Redis alone. The engine computes so fast that nothing is worth a
load, once the node has measured a tier: lookups that are timed find what is in the arena, search the tiers for the
others, and change nothing. `apart_hits` says how many are in the arena then. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from pdx.bench.harness.nodes import ATTACH_S, Asking, one_node
from pdx.bench.harness.report import console
from pdx.bench.store.paying import redis
from pdx.client.api import connect
from pdx.client.connection import Connection
from pdx.errors import NodeUnavailable
from pdx.memory.keys import KEY_BYTES
from pdx.testing.waiting import wait_until
from pdx.wire.messages import VERSION, Admit, Fill, Hello, Ping, Release

CHUNKS = 512
CHUNK_BYTES = 16 << 10
ARENA_BYTES = 64 << 20
ROUNDS = 400
MEASURED = 8  # chunks that come from the disk before the lookups: what was not measured is loaded
FAST_S = 1e-9  # to compute a chunk


class Engine:
    """Two processes of an engine, as far as the node can tell."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self.address = address
        pair = []
        for kind in ("worker", "scheduler"):
            hello = Hello(VERSION, os.getpid(), kind, engine="bench", layout=bytes(KEY_BYTES))
            connection = stack.enter_context(Connection(address, hello))
            if not connection.attach(ATTACH_S):
                raise NodeUnavailable(f"the node at {address} does not answer within {ATTACH_S:g} s")
            connection.chunk_s = FAST_S  # heartbeats say it, too
            pair.append(Asking(connection))
        self.worker, self.scheduler = pair

    def counter(self, name: str) -> int:
        with connect(self.address, timeout_s=ATTACH_S) as node:
            return node.status().counters.get(name, 0)

    def has_disk(self) -> bool:
        with connect(self.address, timeout_s=ATTACH_S) as node:
            return node.status().tiers[0].chunks > 0

    def seal(self, keys: Sequence[bytes]) -> None:
        slots = self.scheduler.admit("", Admit(list(keys), CHUNK_BYTES, 4)).granted_slots
        self.worker.call(Fill(slots, layers=4, seal=True))

    def load(self, keys: Sequence[bytes]) -> None:
        """Have these brought to the arena."""

        self.worker.call(Ping())  # a pace that is not known: whatever is there is loaded

        def is_here() -> bool:
            answer = self.scheduler.admit("", Admit(list(keys), lease_s=1.0, wait_s=5.0))
            if answer.lease:
                self.scheduler.call(Release(answer.lease))
            return answer.hits == len(keys)

        wait_until(is_here, "all of it is loaded")

    def look(self, name: str, keys: Sequence[bytes]) -> int:
        """One timed lookup; how many it found."""
        answer = self.scheduler.admit(name, Admit(list(keys), lease_s=20.0))
        if answer.lease:
            self.scheduler.call(Release(answer.lease))
        return answer.hits


@contextlib.contextmanager
def life(disk: str, remote: str) -> Iterator[Engine]:
    """A node from its start to its end."""
    settings = {"disks": [disk]} if disk else {}
    with one_node(ARENA_BYTES, remote=remote, **settings) as address, ExitStack() as stack:
        yield Engine(address, stack)


def main() -> None:
    """Measure, and say the ratios."""
    if shutil.which("redis-server") is None:
        sys.exit("redis-server is not installed")
    keys = [os.urandom(KEY_BYTES) for _ in range(CHUNKS)]
    third = CHUNKS // 3
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdx-bench-", dir=Path.cwd()))
        Path(folder).chmod(0o700)
        remote = f"redis://127.0.0.1:{stack.enter_context(redis(Path(folder)))}"
        with life("", remote) as engine:
            engine.seal(keys)
            wait_until(lambda: engine.counter("remote_stored") == CHUNKS, "all is in the Redis")
        with life(f"{folder}/apart", remote) as engine:
            engine.load(keys[third : 2 * third])
            wait_until(lambda: engine.counter("disk_stored") == third, "a third is on the disk")
        engines = {
            "arena alone": stack.enter_context(life("", "")),
            "all in the arena, disk and Redis below": stack.enter_context(life(f"{folder}/all", remote)),
            "a third each": stack.enter_context(life(f"{folder}/apart", remote)),
        }
        for name, engine in engines.items():
            if name == "a third each":
                wait_until(engine.has_disk, "the disk's index is read")
                engine.load(keys[: third + MEASURED])
            else:
                engine.seal(keys)
            engine.worker.call(Ping(chunk_s=FAST_S))
        apart = [engines["a third each"].look("", keys) for _ in range(ROUNDS)]  # until the node has measured all tiers
        for _ in range(ROUNDS):
            found = {name: engine.look(name, keys) for name, engine in engines.items()}
        if list(found.values()) != [CHUNKS, CHUNKS, apart[-1]]:
            raise RuntimeError(f"the chunks lie elsewhere: {found} hits, {apart[0]} to {apart[-1]} before")
        medians = {name: statistics.median(engine.scheduler.times[name]) for name, engine in engines.items()}
        loads = engines["a third each"].counter("loads_not_worth")
    first = medians["arena alone"]
    for name, median in medians.items():
        console.print(f"{name}: {median * 1e6:.0f} µs, {median / first:.2f} times")
    figures = {
        "below": medians["all in the arena, disk and Redis below"] / first,
        "apart": medians["a third each"] / first,
    }
    print(
        json.dumps(
            {"bench": "lookup", "arena_us": first * 1e6, **figures, "apart_hits": apart[-1], "loads_not_worth": loads}
        )
    )


if __name__ == "__main__":
    main()
