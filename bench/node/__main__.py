"""A node's answers for a prompt of 128k tokens, compared with a ping: `python -m pdx.bench.node`.

A real node process and one client using the engines' own connection. Chunks are small, because the node never touches
their bytes. Every round times each call once; medians and 99th percentiles are over all rounds. The last line is JSON.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from pdx.bench.harness.nodes import TimedClient, one_node, timed_client
from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.memory.arena import Arena
from pdx.store.chunk import Claim
from pdx.store.store import Store
from pdx.telemetry.env import Env
from pdx.wire.messages import Abort, Admit, Fill, Ping, Release

KEYS = 512  # 128k tokens at 256 per chunk
CHUNK_BYTES = 16 << 10
LAYERS = 32
MISSING = 64  # of a prompt that is almost completely there
FULL_CHUNKS = 4096  # in the full arena
ROUNDS = 300
WARMUPS = 20
INDEX_CHUNKS = 20_000


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def with_node(arena_bytes: int, work: Callable[[TimedClient], None]) -> dict[str, list[float]]:
    with one_node(arena_bytes) as address, timed_client(address) as client:
        work(client)
        return client.times


def on_fresh_arena(client: TimedClient) -> None:
    """Lookups of present and missing chunks, and reservations in free room."""
    hits = new_keys(KEYS)
    client.seal(hits, CHUNK_BYTES, LAYERS)
    for turn in range(-WARMUPS, ROUNDS):
        if turn == 0:
            client.times.clear()
        misses = new_keys(KEYS)
        client.timed("ping", Ping())
        found = client.admit("lookup", Admit(hits, lease_s=30.0))
        assert found.hits == KEYS
        client.timed("release", Release(found.lease))
        admitted = client.admit("admit", Admit(hits, CHUNK_BYTES, LAYERS, lease_s=30.0))
        assert (admitted.hits, admitted.granted) == (KEYS, [])
        client.call(Release(admitted.lease))
        mixed = Admit(hits[MISSING:] + misses[:MISSING], CHUNK_BYTES, LAYERS, lease_s=30.0)
        admitted = client.admit("mixed", mixed)
        assert (admitted.hits, len(admitted.granted)) == (KEYS - MISSING, MISSING)
        client.call(Release(admitted.lease))
        client.call(Abort(admitted.granted_slots))
        client.timed("miss", Admit(misses, lease_s=30.0))
        reserved = client.admit("reserve", Admit(misses, CHUNK_BYTES, LAYERS))
        assert len(reserved.granted_slots) == KEYS
        client.call(Abort(reserved.granted_slots))


def on_full_arena(client: TimedClient) -> None:
    """Reservations that have to evict as much as they reserve."""
    for _ in range(FULL_CHUNKS // KEYS):
        client.seal(new_keys(KEYS), CHUNK_BYTES, LAYERS)
    for turn in range(-WARMUPS, ROUNDS):
        if turn == 0:
            client.times.clear()
        client.timed("ping", Ping())
        reserved = client.admit("evict", Admit(new_keys(KEYS), CHUNK_BYTES, LAYERS))
        assert len(reserved.granted_slots) == KEYS
        client.call(Fill(reserved.granted_slots, layers=LAYERS, seal=True))


def index_bytes() -> float:
    """Python memory of the store per sealed chunk, including index, allocator and eviction order."""
    with tempfile.TemporaryDirectory(prefix="pdx-bench-", dir="/dev/shm") as folder:
        path = Path(folder) / "arena"
        with Arena.create(path, INDEX_CHUNKS * 4096) as arena:
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            store = Store(arena, Env())
            for number in range(0, INDEX_CHUNKS, 500):
                keys = [(number + index).to_bytes(16, "little") for index in range(500)]
                _, slots, _ = store.reserve(Claim(keys=keys, nbytes=4096, layers=LAYERS, owner=1, writers=[1]))
                store.seal(store.fill(slots, 0, LAYERS, 1))
                del keys, slots
            gc.collect()
            used = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert store.index.census()[0] == {"sealed": INDEX_CHUNKS}
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
