"""How much of a transfer hides behind prefill, and when loading a prompt's KV is faster than computing it. Pure.

Layers are sent over one wire as soon as they are computed. Seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

GROUP_BYTES = 1 << 20  # adjacent layers of a chunk are sent together until a message is this large
CHUNK_TOKENS = 256


class Overlap(msgspec.Struct, frozen=True):
    """The transfer of one prompt from node to node, during and after its prefill."""

    nbytes: float
    wire_s: float  # for all bytes, if they were available at once
    prefill_s: float
    exposed_s: float  # from the end of prefill to the arrival of the last byte
    early_bytes: float  # arrived when prefill ends
    layer_compute_s: float  # mean
    layer_wire_s: float  # mean

    @property
    def hidden_bytes_share(self) -> float:
        """Share of the bytes that have arrived when prefill ends."""
        return self.early_bytes / self.nbytes if self.nbytes else 1.0

    @property
    def is_wire_bound(self) -> bool:
        """Whether the wire is slower than prefill, and so busy from the first layer on."""
        return self.layer_wire_s > self.layer_compute_s


def group_of(layer_token_bytes: float, layers: int) -> int:
    """Number of layers in one message."""
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
    """Send the layers of each step (its tokens and seconds) over the wire, one message after the other.

    `latency_s`: from the last byte sent to its acknowledgment; counted once, because many messages are in flight.
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
    """The prompt length from which loading over one link is faster than computing."""

    bytes_s: float
    load_from: int | None  # tokens: loading is faster from here up to `LONGEST`; None: not at `LONGEST`


def load_s(tokens: int, token_bytes: float, bytes_s: float) -> float:
    """Time to load a prompt's KV: latency to the first byte, then all bytes at the speed of the link."""
    return LATENCY_S + tokens * token_bytes / bytes_s


def loads_from(prefill_s: Callable[[int], float], token_bytes: float, bytes_s: float) -> int | None:
    """`Crossover.load_from`, within 2 %, provided that no crossover back lies between two adjacent samples."""
    found, tokens = None, LONGEST
    while tokens and prefill_s(tokens) > load_s(tokens, token_bytes, bytes_s):
        found, tokens = tokens, min(tokens - 1, int(tokens / 1.02))
    return found
