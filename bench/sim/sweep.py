"""How much room, and for how long: hit rates by the capacity of a cache, and by the time that chunks are kept.

Both are replays without engines (`pdx.bench.sim.replay`): one pool, requests in their order, the trace's own times for
how long something is kept. Capacity is also told as a share of the demand: what all that comes anew within an hour
would take. With sessions that is CachedAttention's CCpUT (section 4.3): the distinct sessions of an hour, each with a
full context window; the share is its RCC/CCpUT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdx.bench.sim.replay import replay
from pdx.bench.sim.requests import Trace

HOUR_S = 3600.0


class Point(msgspec.Struct, frozen=True):
    """One capacity, or one time."""

    trace: str
    policy: str
    room_bytes: float  # capacity; with a time: the most that was kept at once
    of_demand: float  # that room, as a share of an hour's demand
    kept_s: float  # 0: for ever
    hit_share: float
    of_possible: float  # the hits, as a share of those of a store that forgets nothing


def demand_bytes(trace: Trace, token_bytes: float) -> float:
    """What an hour's distinct sessions would take, each with a full window; or, without sessions, its new blocks."""
    hours = max(trace.seconds, 1.0) / HOUR_S
    tokens = trace.sessions * trace.window or trace.distinct_blocks() * trace.block_tokens
    return tokens * token_bytes / hours


def by_room(
    trace: Trace,
    token_bytes: float,
    rooms: Sequence[float],
    policies: Sequence[str],
    told: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Of each policy, at each capacity in bytes; `told` after each."""
    found = []
    for policy in policies:
        for room in rooms:
            blocks = max(1, int(room / (token_bytes * trace.block_tokens)))
            found.append(_point(trace, token_bytes, policy, replay(trace, policy, blocks).hit_share, room, 0.0))
            told()
    return found


def by_time(
    trace: Trace, token_bytes: float, policy: str, times_s: Sequence[float], told: Callable[[], None] = lambda: None
) -> list[Point]:
    """Of each time in seconds, with room for all that is not older (`policy` `age`), or was used since (`idle`)."""
    found = []
    for time_s in times_s:
        kept = replay(trace, f"{policy}:{time_s:g}", trace.distinct_blocks())
        room = kept.most_blocks * token_bytes * trace.block_tokens
        found.append(_point(trace, token_bytes, policy, kept.hit_share, room, time_s))
        told()
    return found


def _point(trace: Trace, token_bytes: float, policy: str, share: float, room: float, kept_s: float) -> Point:
    possible = trace.found_by_all() / trace.tokens
    demand = demand_bytes(trace, token_bytes)
    return Point(trace.name, policy, room, room / demand, kept_s, share, share / possible if possible else 0.0)
