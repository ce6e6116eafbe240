"""Requests sent at once, followed step by step through one engine, or through a prefill and a decode engine.

Not random: what vLLM's scheduler does with them, first come first served, in steps of at most `Engine.budget` prompt
tokens. Seconds; pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from pdx.bench.plan.engine import Engine


class Replayed(msgspec.Struct, frozen=True):
    """One request, from when all were sent."""

    first_s: float
    gaps_s: list[float]


class _Running(msgspec.Struct):
    """A request inside an engine."""

    left: int  # prompt tokens to compute
    done: int = 0
    times_s: list[float] = []


def alone(engine: Engine, tokens: int, count: int, output: int) -> list[Replayed]:
    """`count` prompts of so many tokens, all on one engine that prefills and decodes in the same steps."""
    requests = [_Running(tokens) for _ in range(count)]
    now = 0.0
    while any(len(request.times_s) < output for request in requests):
        decoding = [request for request in requests if not request.left and len(request.times_s) < output]
        pieces = _pieces(requests, engine.budget - len(decoding))
        now += _step_s(engine, len(decoding), tokens + output / 2, [(size, request.done) for request, size in pieces])
        for request, size in pieces:
            request.left -= size
            request.done += size
            if not request.left:
                request.times_s.append(now)
        for request in decoding:
            request.times_s.append(now)
    return [_replayed(request.times_s) for request in requests]


def pair(engine: Engine, tokens: int, count: int, output: int, handoff_s: float) -> list[Replayed]:
    """The same with a prefill engine, whose token goes to the client at once, and a decode engine like it."""
    firsts = [replayed.first_s for replayed in alone(engine, tokens, count, 1)]
    coming = [first + handoff_s for first in firsts]
    times = [[first] for first in firsts]
    now = 0.0
    while any(len(mine) < output for mine in times):
        ready = [mine for at, mine in zip(coming, times, strict=True) if at <= now and len(mine) < output]
        if not ready:
            now = min(at for at, mine in zip(coming, times, strict=True) if len(mine) < output)
            continue
        now += engine.step_s(len(ready), tokens + output / 2)
        for mine in ready:
            mine.append(now)
    return [_replayed(mine) for mine in times]


def mean_first_s(found: Sequence[Replayed]) -> float:
    """Of all requests."""
    return statistics.fmean(replayed.first_s for replayed in found)


def mean_gap_s(found: Sequence[Replayed]) -> float:
    """Of all tokens; 0 where there is one per request."""
    gaps = [gap for replayed in found for gap in replayed.gaps_s]
    return statistics.fmean(gaps) if gaps else 0.0


def _pieces(requests: Sequence[_Running], room: int) -> list[tuple[_Running, int]]:
    found = []
    for request in requests:
        size = min(request.left, room)
        if size > 0:
            found.append((request, size))
            room -= size
    return found


def _step_s(engine: Engine, batch: int, context: float, pieces: Sequence[tuple[int, int]]) -> float:
    (size, done), *more = pieces or [(0, 0)]
    extra_s = sum(engine.step_s(0, 0, other, before) - engine.speeds.step_s for other, before in more)
    return engine.step_s(batch, context, size, done) + extra_s


def _replayed(times_s: list[float]) -> Replayed:
    return Replayed(times_s[0], [b - a for a, b in zip(times_s, times_s[1:], strict=False)])
