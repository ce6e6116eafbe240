"""A trace through a real `Store` alone, without any time: which blocks are found, by the eviction policy and the room.

Blocks have slots of the smallest size instead of real bytes. `REQUEST` has requests as an engine does: each finds and
leases its leading blocks, has room made for the others, fills and seals them, and lets go. The other ways are those of
simulators of plain caches: `EACH` lets blocks come one at a time, the last one of a prompt first, and leases none;
`AFTER` lets them come from the first one on, and makes room when the whole prompt is in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pdx.bench.sim.clock import Clock
from pdx.bench.sim.oracle import Belady, Future
from pdx.bench.sim.requests import Request, Trace
from pdx.memory.arena import GRANULE_BYTES, TABLE_BYTES, Arena
from pdx.store.chunk import Claim
from pdx.store.policies import by_name
from pdx.store.store import Store
from pdx.telemetry.env import Env

SESSION = 1
REQUEST, EACH, AFTER = "request", "each", "after"
WAYS = (REQUEST, EACH, AFTER)
BELADY = "belady"


class Kept(msgspec.Struct, frozen=True):
    """What a replay says."""

    hit_share: float  # of the tokens of all prompts
    most_blocks: int  # that were in memory when a request was over


def hit_share(trace: Trace, policy: str, blocks: int, way: str = REQUEST) -> float:
    """The share of all tokens of prompts that were found in memory of so many blocks.

    `policy`: as `pdx node --policy` has it, or `belady`, which knows the trace. Times are the trace's.

    :raises ConfigError: there is no such policy.
    """
    return replay(trace, policy, blocks, way).hit_share


def replay(trace: Trace, policy: str, blocks: int, way: str = REQUEST) -> Kept:
    """See `hit_share`."""
    future = Future(trace.requests) if policy == BELADY else None
    clock = Clock()
    blocks = min(blocks, trace.distinct_blocks())  # more room is of no use, and a file has an end
    maker = by_name.find(policy, clock) if future is None else lambda _: Belady(future)
    spare = max(len(request.keys) for request in trace.requests) if way == AFTER else 0
    with tempfile.TemporaryDirectory() as folder, sparse_arena(Path(folder) / "arena", blocks + spare) as arena:
        store = Store(arena, Env(clock), policy=maker)
        found = most_bytes = 0
        for number, request in enumerate(trace.requests):
            clock.now = request.at_s
            store.expire()
            if future is not None:
                future.now = number
            hits = _ONE[way](store, request, blocks)
            found += min(hits * trace.block_tokens, request.tokens)
            if request.more:
                _fill(store, request.more)
            if future is not None:
                store.refresh([chunk for key in request.keys for chunk in store.index.of(key)])
            most_bytes = max(most_bytes, store.total_bytes - store.free_bytes)
    return Kept(found / trace.tokens, most_bytes // GRANULE_BYTES)


def sparse_arena(path: Path, granules: int) -> Arena:
    """An arena of so many of the smallest slots, of which no byte is touched: a file full of holes."""
    nbytes = granules * GRANULE_BYTES
    with path.open("xb") as file:
        file.truncate(nbytes + granules * TABLE_BYTES)
    return Arena(path, nbytes, writable_generations=True)


def _request(store: Store, request: Request, blocks: int) -> int:
    keys = request.keys
    chunks = [chunk for shards in store.find(keys, 1) for chunk in shards]
    lease = store.lease(chunks, SESSION, 60.0)
    slots = store.reserve(_claim(keys[len(chunks) :]))[1]
    store.release(lease, SESSION)
    store.seal(store.fill(slots, 0, 1, SESSION))
    return len(chunks)


def _each(store: Store, request: Request, blocks: int) -> int:
    count = len(store.find(request.keys, 1))
    for key in reversed(request.keys):
        _come(store, key)
    return count


def _after(store: Store, request: Request, blocks: int) -> int:
    count = len(store.find(request.keys, 1))
    for key in request.keys:
        _come(store, key)
    surplus = (store.total_bytes - store.free_bytes) // GRANULE_BYTES - blocks
    order = store.pools[0].order.victims()
    for key in [chunk.key for chunk, _ in zip(order, range(surplus), strict=False)]:
        store.delete([key])
    return count


def _come(store: Store, key: bytes) -> None:
    """It is used, or comes."""
    found = store.find([key], 1)
    if found:
        store.touch(found[0])
    else:
        _fill(store, [key])


def _fill(store: Store, keys: Sequence[bytes]) -> None:
    """These come, as far as there is room."""
    store.seal(store.fill(store.reserve(_claim(keys))[1], 0, 1, SESSION))


def _claim(keys: Sequence[bytes]) -> Claim:
    return Claim(keys=keys, nbytes=GRANULE_BYTES, layers=1, owner=SESSION, writers=[SESSION], partial=True)


_ONE: dict[str, Callable[[Store, Request, int], int]] = {REQUEST: _request, EACH: _each, AFTER: _after}
