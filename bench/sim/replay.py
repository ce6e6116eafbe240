"""A trace through a real `Store` alone, without any time: which blocks are found, by the eviction policy and the room.

Blocks have slots of the smallest size instead of real bytes. `REQUEST` has requests as an engine does: each finds and
leases its leading blocks, has room made for the others, fills and seals them, and lets go. `EACH` is the way of
simulators of plain caches: blocks come one at a time, the last one of a prompt first, and none is leased.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdx.bench.sim.clock import Clock
from pdx.bench.sim.oracle import Belady, Future
from pdx.bench.sim.requests import Trace
from pdx.memory.arena import GRANULE_BYTES, TABLE_BYTES, Arena
from pdx.store.chunk import Claim
from pdx.store.policies import by_name
from pdx.store.store import Store
from pdx.telemetry.env import Env

SESSION = 1
REQUEST, EACH = "request", "each"
BELADY = "belady"
HOUR_S = 3600.0


def replay(trace: Trace, policy: str, blocks: int, way: str = REQUEST) -> float:
    """The share of all tokens of prompts that memory of so many blocks has. `policy`: as `pdx node --policy` has it, or
    `belady`, which knows the trace. Times are the trace's.

    :raises ConfigError: there is no such policy.
    """
    future = Future(trace.requests) if policy == BELADY else None
    clock = Clock()
    blocks = min(blocks, trace.distinct_blocks())  # more room is of no use, and a file has an end
    maker = by_name.find(policy, clock) if future is None else lambda _: Belady(future)
    come = _request if way == REQUEST else _each
    with tempfile.TemporaryDirectory() as folder, sparse_arena(Path(folder) / "arena", blocks) as arena:
        store = Store(arena, Env(clock), policy=maker)
        found = 0
        for number, request in enumerate(trace.requests):
            clock.now = request.at_s
            store.expire()
            if future is not None:
                future.turn(number)
            found += min(come(store, request.keys) * trace.block_tokens, request.tokens)
            if request.more:
                _fill(store, request.more)
            if future is not None:
                store.refresh([chunk for key in request.keys for chunk in store.index.of(key)])
    return found / trace.tokens


def sparse_arena(path: Path, granules: int) -> Arena:
    """An arena of so many of the smallest slots, of which no byte is touched: a file full of holes."""
    nbytes = granules * GRANULE_BYTES
    with path.open("xb") as file:
        file.truncate(nbytes + granules * TABLE_BYTES)
    return Arena(path, nbytes, writable_generations=True)


def _request(store: Store, keys: Sequence[bytes]) -> int:
    """How many leading ones were there."""
    found = store.find(keys, 1)
    lease = store.lease([chunk for shards in found for chunk in shards], SESSION, 60.0)
    slots = store.reserve(_claim(keys[len(found) :]))[1]
    store.release(lease, SESSION)
    store.seal(store.fill(slots, 0, 1, SESSION))
    return len(found)


def _each(store: Store, keys: Sequence[bytes]) -> int:
    count = len(store.find(keys, 1))
    for key in reversed(keys):
        if known := store.find([key], 1):
            store.touch(known[0])
        else:
            _fill(store, [key])
    return count


def _fill(store: Store, keys: Sequence[bytes]) -> None:
    """These come, as far as there is room."""
    store.seal(store.fill(store.reserve(_claim(keys))[1], 0, 1, SESSION))


def _claim(keys: Sequence[bytes]) -> Claim:
    return Claim(keys=keys, nbytes=GRANULE_BYTES, layers=1, owner=SESSION, writers=[SESSION], partial=True)


# ---- sweeps: hit rates by the capacity of a cache ------------------------------------------------
# Capacity is also told as a share of the demand: what all that comes anew within an hour would take. With sessions that
# is CachedAttention's CCpUT (section 4.3): the distinct sessions of an hour, each with a full context window; the share
# is its RCC/CCpUT.


class Point(msgspec.Struct, frozen=True):
    """One capacity."""

    trace: str
    policy: str
    room_bytes: float
    of_demand: float  # that room, as a share of an hour's demand
    hit_share: float
    of_possible: float  # the hits, as a share of those of a store that forgets nothing


def demand_bytes(trace: Trace, token_bytes: float) -> float:
    """What an hour's distinct sessions would take, each with a full window; or, without sessions, its new blocks."""
    hours = max(trace.seconds, 1.0) / HOUR_S
    tokens = trace.sessions * trace.window or trace.distinct_blocks() * trace.block_tokens
    return tokens * token_bytes / hours


def by_room(trace: Trace, token_bytes: float, rooms: Sequence[float], policies: Sequence[str]) -> list[Point]:
    """Of each policy, at each capacity in bytes."""
    possible, demand = trace.found_by_all() / trace.tokens, demand_bytes(trace, token_bytes)
    found = []
    for policy in policies:
        for room in rooms:
            share = replay(trace, policy, max(1, int(room / (token_bytes * trace.block_tokens))))
            of_possible = share / possible if possible else 0.0
            found.append(Point(trace.name, policy, room, room / demand, share, of_possible))
    return found
