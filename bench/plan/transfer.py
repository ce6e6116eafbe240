"""What of a transfer hides behind prefill: layers leave as they are computed, over one wire. Seconds, bytes; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    def hidden_time_share(self) -> float:
        """Of the wire's time, what ran beside prefill."""
        return 1 - min(1.0, self.exposed_s / self.wire_s) if self.wire_s else 1.0

    @property
    def is_wire_bound(self) -> bool:
        """The wire is slower than the prefill: it is busy from the first layer on."""
        return self.layer_wire_s > self.layer_compute_s


def group_of(layer_token_bytes: float, layers: int) -> int:
    """Layers in one message."""
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
