"""Load a prompt's KV, or compute it again? The lengths at which both take the same time. Seconds, bytes; pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

LATENCY_S = 0.002  # of a load: lookup, first byte
LONGEST = 131_072


class Crossover(msgspec.Struct, frozen=True):
    """One link."""

    bytes_s: float
    load_from: int | None  # loading is faster for all longer prompts up to `longest`; None: for none
    turns: list[int]  # all lengths where the faster way changes
    longest: int

    @property
    def always(self) -> bool:
        """Loading is faster at every length."""
        return self.load_from == 1


def load_s(tokens: int, token_bytes: float, bytes_s: float, latency_s: float = LATENCY_S) -> float:
    """Bytes over the link, after the first one has come."""
    return latency_s + tokens * token_bytes / bytes_s


def crossover(
    prefill_s: Callable[[int], float],
    token_bytes: float,
    bytes_s: float,
    *,
    longest: int = LONGEST,
    latency_s: float = LATENCY_S,
) -> Crossover:
    """Where the faster way changes between 1 token and `longest`.

    Exact to a token; two turns within 2 % of each other are not seen.
    """

    def gain(tokens: int) -> float:
        return prefill_s(tokens) - load_s(tokens, token_bytes, bytes_s, latency_s)

    turns = []
    lengths = _grid(longest)
    for low, high in zip(lengths, lengths[1:], strict=False):
        if (gain(low) > 0) != (gain(high) > 0):
            turns.append(_turn(gain, low, high))
    if gain(longest) <= 0:
        return Crossover(bytes_s, None, turns, longest)
    return Crossover(bytes_s, turns[-1] if turns else 1, turns, longest)


def break_even_bytes_s(
    prefill_s: Callable[[int], float], token_bytes: float, tokens: int, *, latency_s: float = LATENCY_S
) -> float:
    """The speed at which loading `tokens` takes as long as computing them; inf where the latency alone is longer."""
    left_s = prefill_s(tokens) - latency_s
    return tokens * token_bytes / left_s if left_s > 0 else float("inf")


def layered_load_s(load: float, prefill: float, layers: int, buffered: int = 0) -> float:
    """Loading old tokens layer by layer while new ones are computed, with `buffered` layers read ahead of prefill.

    From start to end: each layer waits for its load. Without a buffer the first layer's load is always waited for.
    """
    load_at, end = 0.0, 0.0
    each_load, each_prefill = load / layers, prefill / layers
    ahead = buffered * each_load
    for _ in range(layers):
        load_at += each_load
        end = max(end, load_at - ahead) + each_prefill
    return end


def perfect_buffer_bytes(load: float, prefill: float, bytes_s: float) -> float:
    """Read ahead so much and layer-wise loading costs nothing: CachedAttention's B·(T_load·L_hist − T_pref·L_new).

    `load` and `prefill` are the products: seconds to load the old tokens and to compute the new ones.
    """
    return max(0.0, bytes_s * (load - prefill))


def _grid(longest: int) -> list[int]:
    lengths = [1]
    while lengths[-1] < longest:
        lengths.append(min(longest, max(lengths[-1] + 1, int(lengths[-1] * 1.02))))
    return lengths


def _turn(gain: Callable[[int], float], low: int, high: int) -> int:
    """The first length in (low, high] whose sign is that of `high`."""
    wanted = gain(high) > 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if (gain(middle) > 0) == wanted else (middle, high)
    return high
