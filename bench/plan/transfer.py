"""What of a transfer hides behind prefill, and when loading a prompt's KV is faster than computing it. Pure.

Layers leave as they are computed, over one wire. Seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

GROUP_BYTES = 1 << 20  # neighbouring layers of a chunk travel together until a message is this large
CHUNK_TOKENS = 256


class Overlap(msgspec.Struct, frozen=True):
    """One prompt's way from node to node."""

    nbytes: float
    wire_s: float  # of all bytes, if the wire had them at once
    prefill_s: float
    exposed_s: float  # prefill has ended -> the last byte is there
    early_bytes: float  # there when prefill ended
    layer_compute_s: float  # mean
    layer_wire_s: float  # mean

    @property
    def hidden_bytes_share(self) -> float:
        """Of the bytes, those that were there when prefill ended."""
        return self.early_bytes / self.nbytes if self.nbytes else 1.0

    @property
    def is_wire_bound(self) -> bool:
        """The wire is slower than the prefill: it is busy from the first layer on."""
        return self.layer_wire_s > self.layer_compute_s


def group_of(layer_token_bytes: float, layers: int) -> int:
    """How many layers go in one message."""
    return min(layers, max(1, math.ceil(GROUP_BYTES / (layer_token_bytes * CHUNK_TOKENS))))


def overlap(
    steps: Sequence[tuple[int, float]],
    *,
    layers: int,
    layer_token_bytes: float,
    wire_bytes_s: float,
    group: int = 1,
    latency_s: float = 0.0,
) -> Overlap:
    """Follow the layers of each step (its tokens and seconds) onto the wire, which takes them in turn.

    `latency_s` is from the last byte sent to its acknowledgement: once, because many messages are under way.
    """
    now = free = early = nbytes = 0.0
    sent: list[tuple[float, float, float]] = []
    for tokens, seconds in steps:
        for first in range(0, layers, group):
            taken = min(group, layers - first)
            ready = now + seconds * (first + taken) / layers
            size = tokens * layer_token_bytes * taken
            start = max(ready, free)
            free = start + size / wire_bytes_s
            sent.append((start, free, size))
            nbytes += size
        now += seconds
    for start, end, size in sent:
        passed = (now - latency_s - start) / (end - start) if end > start else 1.0
        early += size * min(1.0, max(0.0, passed))
    wire_s = nbytes / wire_bytes_s
    exposed_s = max(0.0, free + latency_s - now) if sent else 0.0
    rounds = max(1, len(steps)) * layers
    return Overlap(nbytes, wire_s, now, exposed_s, early, now / rounds, wire_s / rounds)


LATENCY_S = 0.002  # of a load: lookup, first byte
LONGEST = 131_072


class Crossover(msgspec.Struct, frozen=True):
    """One link."""

    bytes_s: float
    load_from: int | None  # loading is faster for all longer prompts up to `LONGEST`; None: for none


def load_s(tokens: int, token_bytes: float, bytes_s: float) -> float:
    """Bytes over the link, after the first one has come."""
    return LATENCY_S + tokens * token_bytes / bytes_s


def loads_from(prefill_s: Callable[[int], float], token_bytes: float, bytes_s: float) -> int | None:
    """See `Crossover.load_from`. Within 2 %, as far as between two neighbours no other turn is missed."""
    found, tokens = None, LONGEST
    while tokens and prefill_s(tokens) > load_s(tokens, token_bytes, bytes_s):
        found, tokens = tokens, min(tokens - 1, int(tokens / 1.02))
    return found
