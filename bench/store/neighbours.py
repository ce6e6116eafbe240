"""What others cost a client of a remote store: `python -m pdx.bench.store.neighbours`, with a real Redis.

A client asks a node for short prompts that lie in the Redis (`redis-server`) alone, behind a relay: by itself, and
beside a second client. `long`: the relay lets 8 MB/s through, and the second client's prompts have 80 MiB, which is
more than comes within the node's deadline. `strange`: the store is 150 ms away, and the second client asks for 200
prompts a second that nobody has stored, and does not wait for the answers. A figure is the share of the prompts that
were found whole. Neither client says how fast it computes, so that the first waits for what the node finds. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pdx.bench.harness.nodes import ATTACH_S, Asking, one_node
from pdx.bench.harness.report import show_rows
from pdx.bench.store.paying import redis
from pdx.bench.systems.line import UNLIMITED, Relay
from pdx.client.api import connect
from pdx.client.connection import Connection
from pdx.errors import NodeUnavailable
from pdx.memory.keys import KEY_BYTES
from pdx.testing.waiting import wait_until
from pdx.wire.messages import VERSION, Admit, Fill, Hello, Release

CHUNK_BYTES = 256 << 10
SHORT = 2  # chunks of a short prompt
LONG = 320  # of a long one: 80 MiB
LONGS = 3
PROMPTS = 40  # short ones of each kind
ARENA_BYTES = 640 << 20
RATE = 8e6  # bytes per second
DELAY_S = 0.15
STRANGERS_S = 1 / 200
STRANGE = 10  # chunks of a strange prompt
WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """Of one client's prompts those that were found, by itself and beside others."""

    what: str
    alone: float
    beside: float
    ratio: float
    alone_ms: float  # median until the answer
    beside_ms: float
    others_per_s: float  # requests of the second client meanwhile


class Client:
    """An engine of one shard, as far as the node can tell. `Asking` is for one thread: each has a client of its own."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        pair = []
        for kind in ("worker", "scheduler"):
            hello = Hello(VERSION, os.getpid(), kind, engine=f"bench{id(self)}", layout=bytes(KEY_BYTES))
            connection = stack.enter_context(Connection(address, hello))
            if not connection.attach(ATTACH_S):
                raise NodeUnavailable(f"the node at {address} does not answer within {ATTACH_S:g} s")
            pair.append(Asking(connection))
        self.worker, self.scheduler = pair

    def seal(self, keys: Sequence[bytes]) -> None:
        slots = self.scheduler.admit("", Admit(list(keys), CHUNK_BYTES, 4)).granted_slots
        self.worker.call(Fill(slots, layers=4, seal=True))

    def look(self, keys: Sequence[bytes], wait_s: float = WAIT_S) -> int:
        """How many leading ones are there, or come in time."""
        answer = self.scheduler.admit("look", Admit(list(keys), lease_s=1.0, wait_s=wait_s))
        if answer.lease:
            self.scheduler.call(Release(answer.lease))
        return answer.hits


def prompts(count: int, chunks: int) -> list[list[bytes]]:
    """So many that share nothing."""
    return [[os.urandom(KEY_BYTES) for _ in range(chunks)] for _ in range(count)]


def store(url: str, what: Sequence[Sequence[bytes]]) -> None:
    """Put these prompts there, and nowhere else."""
    with one_node(ARENA_BYTES, remote=url) as address, ExitStack() as stack:
        client = Client(address, stack)
        stored = 0
        for keys in what:
            client.seal(keys)
            stored += len(keys)
            wait_until(lambda stored=stored: counter(address, "remote_stored") == stored, "it is stored")  # type: ignore[misc]


def counter(address: str, name: str) -> int:
    with connect(address, timeout_s=ATTACH_S) as node:
        return node.status().counters.get(name, 0)


def found(client: Client, some: Sequence[Sequence[bytes]]) -> tuple[float, float]:
    """The share of these prompts that was found whole, and the median of the answers in milliseconds."""
    client.scheduler.times.clear()
    hits = sum(client.look(keys) == len(keys) for keys in some)
    return hits / len(some), 1e3 * statistics.median(client.scheduler.times["look"])


@contextlib.contextmanager
def other(address: str, step: Callable[[Client, int], None], every_s: float) -> Iterator[list[int]]:
    """A second client repeats `step`, once in so many seconds; it is told how often it has, and the list has that."""
    is_over, count = threading.Event(), [0]

    def run() -> None:
        with ExitStack() as stack:
            client, started_at = Client(address, stack), time.monotonic()
            while not is_over.is_set():
                step(client, count[0])
                count[0] += 1
                time.sleep(max(0.0, started_at + count[0] * every_s - time.monotonic()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        time.sleep(1.0)  # it has begun
        yield count
    finally:
        is_over.set()
        thread.join()


def measure(
    what: str, url: str, shorts: Sequence[Sequence[bytes]], step: Callable[[Client, int], None], every_s: float
) -> Row:
    """Half of the short prompts alone, and half beside the second client."""
    with one_node(ARENA_BYTES // 2, remote=url) as address, ExitStack() as stack:
        with connect(address, timeout_s=ATTACH_S) as node:
            wait_until(lambda: node.status().tiers[0].is_up, "the store answers")
        client = Client(address, stack)
        alone, alone_ms = found(client, shorts[:PROMPTS])
        with other(address, step, every_s) as count:
            before, started_at = count[0], time.monotonic()
            beside, beside_ms = found(client, shorts[PROMPTS:])
            others_per_s = (count[0] - before) / (time.monotonic() - started_at)
        ratio = beside / alone if alone else 0.0
        return Row(what, alone, beside, round(ratio, 3), round(alone_ms), round(beside_ms), round(others_per_s, 1))


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.neighbours", description="Clients of one store.")
    parser.add_argument("what", nargs="*", default=["long", "strange"], help="long, strange; default: both")
    chosen = parser.parse_args(arguments)
    if shutil.which("redis-server") is None:
        parser.error("redis-server is not installed")
    longs = prompts(LONGS, LONG)
    shorts = {what: prompts(2 * PROMPTS, SHORT) for what in chosen.what}

    def ask_long(client: Client, count: int) -> None:
        client.look(longs[count % LONGS])

    def ask_strange(client: Client, count: int) -> None:
        client.look(prompts(1, STRANGE)[0], wait_s=0.0)

    rows = []
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder, redis(Path(folder)) as port:
        relay = Relay(port)
        try:
            store(f"redis://127.0.0.1:{port}", [*longs, *(keys for some in shorts.values() for keys in some)])
            for what, some in shorts.items():
                relay.rate, relay.delay_s = (RATE, 0.0) if what == "long" else (UNLIMITED, DELAY_S)
                step, every_s = (ask_long, 0.0) if what == "long" else (ask_strange, STRANGERS_S)
                rows.append(measure(what, f"redis://127.0.0.1:{relay.port}", some, step, every_s))
        finally:
            relay.close()
    show_rows(rows, "Prompts that a client found in a remote store, by itself and beside another")
    print(json.dumps({"bench": "neighbours", "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
