"""A node's answers for a prompt of 128k tokens, against a ping: `python -m pdx.bench.node`.

A real node process and one client on the engines' own connection. Chunks are small: the node never touches their
bytes, so their size decides nothing here. Every round times each call once; medians and 99th percentiles over all
rounds. The last line is JSON.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.client.connection import Connection
from pdx.config import NodeConfig
from pdx.memory.arena import Arena
from pdx.node.start import start
from pdx.store.store import Claim, Store
from pdx.wire.messages import VERSION, Abort, Admit, Admitted, Answer, Ask, Fill, Hello, Ping, Release

KEYS = 512  # 128k tokens at 256 per chunk
CHUNK_BYTES = 16 << 10
LAYERS = 32
MISSING = 64  # of a prompt that is nearly all there
FULL_CHUNKS = 4096  # in the arena that is full
ROUNDS = 300
WARMUPS = 20
ANSWER_S = 5.0
INDEX_CHUNKS = 20_000


class Bench:
    """One attached client, and the calls it times."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.times: dict[str, list[float]] = {}

    def timed(self, name: str, body: Ask) -> Answer:
        """To the node and back; notes the time."""
        start_at = time.perf_counter()
        answer = self.call(body)
        self.times.setdefault(name, []).append(time.perf_counter() - start_at)
        return answer

    def call(self, body: Ask) -> Answer:
        """To the node and back."""
        return self._connection.call(body, ANSWER_S)

    def seal(self, keys: list[bytes]) -> Answer:
        """Put chunks under these keys; returns the answer to the reservation."""
        answer = self.call(Admit(keys, CHUNK_BYTES, LAYERS))
        assert isinstance(answer, Admitted)
        assert len(answer.granted) == len(keys)
        self.call(Fill(answer.granted_slots, layers=LAYERS, seal=True))
        return answer


def new_keys(count: int) -> list[bytes]:
    """Keys nobody has seen."""
    return [os.urandom(16) for _ in range(count)]


def with_node(arena_bytes: int, work: Callable[[Bench], None]) -> dict[str, list[float]]:
    """Run `work` against a node of its own."""
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder:
        address = f"ipc://{folder}/run/node.sock"
        process = start(NodeConfig(address=address, arena_bytes=arena_bytes))
        try:
            with Connection(address, Hello(VERSION, os.getpid(), "client", name="bench")) as connection:
                if not connection.attach(20.0):
                    raise RuntimeError("the node does not answer")
                bench = Bench(connection)
                work(bench)
                return bench.times
        finally:
            process.terminate()
            process.wait(10)


def on_fresh_arena(bench: Bench) -> None:
    """Lookups of what is there and what is not, and reservations where room is free."""
    hits = new_keys(KEYS)
    bench.seal(hits)
    for turn in range(-WARMUPS, ROUNDS):
        if turn == 0:
            bench.times.clear()
        misses = new_keys(KEYS)
        bench.timed("ping", Ping())
        found = bench.timed("lookup", Admit(hits, lease_s=30.0))
        assert isinstance(found, Admitted)
        assert found.hits == KEYS
        bench.timed("release", Release(found.lease))
        admitted = bench.timed("admit", Admit(hits, CHUNK_BYTES, LAYERS, lease_s=30.0))
        assert isinstance(admitted, Admitted)
        assert (admitted.hits, admitted.granted) == (KEYS, [])
        bench.call(Release(admitted.lease))
        mixed = Admit(hits[MISSING:] + misses[:MISSING], CHUNK_BYTES, LAYERS, lease_s=30.0)
        admitted = bench.timed("mixed", mixed)
        assert isinstance(admitted, Admitted)
        assert (admitted.hits, len(admitted.granted)) == (KEYS - MISSING, MISSING)
        bench.call(Release(admitted.lease))
        bench.call(Abort(admitted.granted_slots))
        bench.timed("miss", Admit(misses, lease_s=30.0))
        reserved = bench.timed("reserve", Admit(misses, CHUNK_BYTES, LAYERS))
        assert isinstance(reserved, Admitted)
        assert len(reserved.granted_slots) == KEYS
        bench.call(Abort(reserved.granted_slots))


def on_full_arena(bench: Bench) -> None:
    """Reservations that evict as much as they reserve."""
    for _ in range(FULL_CHUNKS // KEYS):
        bench.seal(new_keys(KEYS))
    for turn in range(-WARMUPS, ROUNDS):
        if turn == 0:
            bench.times.clear()
        keys = new_keys(KEYS)
        bench.timed("ping", Ping())
        reserved = bench.timed("evict", Admit(keys, CHUNK_BYTES, LAYERS))
        assert isinstance(reserved, Admitted)
        assert len(reserved.granted_slots) == KEYS
        bench.call(Fill(reserved.granted_slots, layers=LAYERS, seal=True))


def index_bytes() -> float:
    """Python memory of the store per sealed chunk, everything it keeps: index, allocator, eviction order."""
    with tempfile.TemporaryDirectory(prefix="pdx-bench-", dir="/dev/shm") as folder:
        path = Path(folder) / "arena"
        with Arena.create(path, INDEX_CHUNKS * 4096) as arena:
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            store = Store(arena)
            for number in range(0, INDEX_CHUNKS, 500):
                keys = [(number + index).to_bytes(16, "little") for index in range(500)]
                _, slots, _ = store.reserve(Claim(keys=keys, nbytes=4096, layers=LAYERS, owner=1, writers=[1]))
                store.seal(store.fill(slots, 0, LAYERS, 1))
                del keys, slots
            gc.collect()
            used = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert store.census()[0] == {"sealed": INDEX_CHUNKS}
            return used / INDEX_CHUNKS


def main() -> None:
    times = with_node((4 * KEYS * CHUNK_BYTES), on_fresh_arena)
    full = with_node(FULL_CHUNKS * CHUNK_BYTES, on_full_arena)
    ping = statistics.median(times["ping"])

    def figures(name: str, samples: list[float], ping_s: float, bound_ms: float | None) -> list[Figure]:
        p50, p99 = statistics.median(samples), statistics.quantiles(samples, n=100)[98]
        note = f"{p50 / ping_s:.1f} pings"
        first = plain(f"{name}, p50", p50 * 1e3, "ms", note)
        if bound_ms is not None:
            first = at_most(f"{name}, p50", p50 * 1e3, "ms", bound_ms, note)
        return [first, plain(f"{name}, p99", p99 * 1e3, "ms")]

    publish(
        "node",
        f"engine to node and back, {KEYS} keys (128k tokens), {ROUNDS} rounds",
        [
            *figures("ping (the reference)", times["ping"], ping, None),
            *figures("lookup, all there, with a lease", times["lookup"], ping, 1.0),
            *figures("admit, all there: leased, no room", times["admit"], ping, None),
            *figures(f"admit, {MISSING} missing: leased, room granted", times["mixed"], ping, None),
            *figures("release of that lease", times["release"], ping, None),
            *figures("lookup, nothing there", times["miss"], ping, 1.0),
            *figures("reserve, room is free", times["reserve"], ping, 3.0),
            *figures("reserve, evicting as much", full["evict"], statistics.median(full["ping"]), 3.0),
            at_most("index memory per chunk", index_bytes(), "bytes", 1024),
        ],
    )


if __name__ == "__main__":
    main()
