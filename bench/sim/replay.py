"""Replays a trace through a real `Store` alone, where nothing takes time: the hit rate by eviction policy and room.

Blocks have slots of the smallest size instead of real bytes. `REQUEST` handles requests as an engine does: each finds
and leases its leading blocks, gets room for the others, releases the lease, and fills and seals the others. The other
ways are those of simulators of plain caches: `EACH` inserts blocks one at a time, a prompt's last one first, and leases
none; `AFTER` inserts them from the first one on, and makes room once the whole prompt is in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pdx.bench.sim.clock import Clock
from pdx.bench.sim.oracle import Belady, Future
from pdx.bench.sim.requests import SCOPE, Request, Trace
from pdx.memory.arena import GRANULE_BYTES, TABLE_BYTES, Arena
from pdx.store.chunk import Claim
from pdx.store.content_names import ContentNames
from pdx.store.policies import by_name
from pdx.store.store import Store
from pdx.telemetry.env import Env

SESSION = 1
REQUEST, EACH, AFTER = "request", "each", "after"
BELADY = "belady"
HOUR_S = 3600.0


class Replayed(msgspec.Struct, frozen=True):
    """The result of a replay."""

    hit_share: float  # of the tokens of all prompts
    most_blocks: int  # the most in memory after a request


def replay(trace: Trace, policy: str, blocks: int, way: str = REQUEST) -> Replayed:
    """Replay with memory of `blocks` blocks. `policy`: as in `pdx node --policy`, or `belady`, which knows the trace.

    Requests come at the trace's times.

    :raises ConfigError: there is no such policy.
    """
    future = Future(trace.requests) if policy == BELADY else None
    clock = Clock()
    blocks = min(blocks, trace.distinct_blocks())  # more room is useless, and the size of a file is limited
    maker = by_name.find(policy, clock) if future is None else lambda _: Belady(future)
    spare = max(len(request.keys) for request in trace.requests) if way == AFTER else 0
    with tempfile.TemporaryDirectory() as folder, sparse_arena(Path(folder) / "arena", blocks + spare) as arena:
        store = Store(arena, Env(clock), policy=maker)
        names = ContentNames()
        found = most_bytes = 0
        for number, request in enumerate(trace.requests):
            clock.now = request.at_s
            store.expire()
            if future is not None:
                future.mark_turn(number)
            hits = _BY_WAY[way](store, names, request, blocks)
            found += min(hits * trace.block_tokens, request.tokens)
            if request.answer_keys:
                _fill(store, request.answer_keys)
            if request.prompt_tokens is not None and request.answer_tokens is not None:
                names.register(request.prompt_tokens, request.keys, b"")
                parent = request.keys[request.num_whole - 1] if request.num_whole else b""
                names.register(request.answer_tokens, request.answer_keys, parent)
            if future is not None:
                store.refresh([chunk for key in request.keys for chunk in store.index.of(key)])
            most_bytes = max(most_bytes, store.total_bytes - store.free_bytes)
    return Replayed(found / trace.tokens, most_bytes // GRANULE_BYTES)


def sparse_arena(path: Path, granules: int) -> Arena:
    """An arena with slots of the smallest size, `granules` of them, in a sparse file: none of its data is touched."""
    nbytes = granules * GRANULE_BYTES
    with path.open("xb") as file:
        file.truncate(nbytes + granules * TABLE_BYTES)
    return Arena(path, nbytes, writable_generations=True)


def _request(store: Store, names: ContentNames, request: Request, blocks: int) -> int:
    keys = request.keys
    own = found = store.find(keys, 1)
    if len(own) < request.num_whole:
        pieces = names.find(SCOPE, request.ids, 1, lambda key: bool(store.find([key], 1)))
        found = max(own, store.find([piece.key for piece in pieces], 1), key=len)
    lease = store.lease([chunk for shards in found for chunk in shards], SESSION, 60.0)
    slots = store.reserve(_claim(keys[len(own) :]))[1]
    store.release(lease, SESSION)
    store.seal(store.fill(slots, 0, 1, SESSION))
    return len(found)


def _each(store: Store, names: ContentNames, request: Request, blocks: int) -> int:
    count = len(store.find(request.keys, 1))
    for key in reversed(request.keys):
        _touch_or_insert(store, key)
    return count


def _after(store: Store, names: ContentNames, request: Request, blocks: int) -> int:
    count = len(store.find(request.keys, 1))
    for key in request.keys:
        _touch_or_insert(store, key)
    surplus = (store.total_bytes - store.free_bytes) // GRANULE_BYTES - blocks
    order = store.pools[0].order.victims()
    for key in [chunk.key for chunk, _ in zip(order, range(surplus), strict=False)]:
        store.delete([key])
    return count


def _touch_or_insert(store: Store, key: bytes) -> None:
    """Touch this block if the store has it, else insert it."""
    found = store.find([key], 1)
    if found:
        store.touch(found[0])
    else:
        _fill(store, [key])


def _fill(store: Store, keys: Sequence[bytes]) -> None:
    """Insert these blocks, as far as there is room."""
    store.seal(store.fill(store.reserve(_claim(keys))[1], 0, 1, SESSION))


def _claim(keys: Sequence[bytes]) -> Claim:
    return Claim(keys=keys, nbytes=GRANULE_BYTES, layers=1, owner=SESSION, writers=[SESSION], partial=True)


_BY_WAY: dict[str, Callable[[Store, ContentNames, Request, int], int]] = {REQUEST: _request, EACH: _each, AFTER: _after}


# ---- sweeps: hit rates by the capacity of a cache, and by the time that chunks are kept ----------
# Capacity is also given as a share of the demand: the room that everything new within an hour would take. With sessions
# that is CachedAttention's CCpUT (section 4.3): the distinct sessions of an hour, each with a full context window; the
# share is its RCC/CCpUT.


class Point(msgspec.Struct, frozen=True):
    """The result for one capacity, or for one time."""

    trace: str
    policy: str
    room_bytes: float  # the capacity; in a sweep of times, the most that was kept at once
    of_demand: float  # `room_bytes` as a share of an hour's demand
    kept_s: float  # 0: for ever
    hit_share: float
    of_possible: float  # hits as a share of those of a store without evictions


def demand_bytes(trace: Trace, token_bytes: float) -> float:
    """The room for an hour's distinct sessions, each with a full window; without sessions, for its new blocks."""
    hours = max(trace.seconds, 1.0) / HOUR_S
    tokens = trace.sessions * trace.window or trace.distinct_blocks() * trace.block_tokens
    return tokens * token_bytes / hours


def sweep_capacities(
    trace: Trace,
    token_bytes: float,
    rooms: Sequence[float],
    policies: Sequence[str],
    on_point: Callable[[], None] = lambda: None,
) -> list[Point]:
    """One point per policy and capacity in bytes; `on_point` is called after each."""
    found = []
    for policy in policies:
        for room in rooms:
            blocks = max(1, int(room / (token_bytes * trace.block_tokens)))
            found.append(_point(trace, token_bytes, policy, replay(trace, policy, blocks).hit_share, room, 0.0))
            on_point()
    return found


def sweep_times(
    trace: Trace, token_bytes: float, policy: str, times_s: Sequence[float], on_point: Callable[[], None] = lambda: None
) -> list[Point]:
    """One point per time in seconds, the age (`policy` `age`) or idle time (`idle`) up to which all chunks are kept."""
    found = []
    for time_s in times_s:
        kept = replay(trace, f"{policy}:{time_s:g}", trace.distinct_blocks())
        room = kept.most_blocks * token_bytes * trace.block_tokens
        found.append(_point(trace, token_bytes, policy, kept.hit_share, room, time_s))
        on_point()
    return found


def _point(trace: Trace, token_bytes: float, policy: str, share: float, room: float, kept_s: float) -> Point:
    possible = trace.found_by_all() / trace.tokens
    demand = demand_bytes(trace, token_bytes)
    return Point(trace.name, policy, room, room / demand, kept_s, share, share / possible if possible else 0.0)
