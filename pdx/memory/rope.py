"""Rotary embedding (RoPE): how a model turns its keys by position, for models whose keys can be moved.

A key at position p is the key without position, with each pair of elements turned by p times the pair's frequency (Su
et al., https://arxiv.org/abs/2104.09864, section 3.2.2). Turning it further by `shift` times the frequency makes it the
key at p + shift, if frequencies depend on neither position nor prompt length. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from pdx.errors import LayoutError

# Models that pair the first half of a key's rotary elements with the second half, in all layers.
_HALVES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo2"})
# With one of these, keys turn in another way: not in all layers, or by other angles.
_OTHERWISE = ("no_rope_layers", "dual_chunk_attention_config", "rope_dim", "use_fope")


class Rope(msgspec.Struct, frozen=True):
    """Pair i of a key's `2 * len(frequencies)` rotary elements is (i, i + len(frequencies)), or (2 i, 2 i + 1) if
    `interleaved`; elements after these are not turned. `frequencies`: radians per position."""

    frequencies: tuple[float, ...]
    interleaved: bool = False

    def pairs(self) -> list[tuple[int, int]]:
        count = len(self.frequencies)
        return [(2 * i, 2 * i + 1) if self.interleaved else (i, i + count) for i in range(count)]

    def angles(self, shift: int) -> list[float]:
        """The angle in radians by which each pair is turned to move a key `shift` positions further."""
        return [math.remainder(shift * each, math.tau) for each in self.frequencies]


def rope_of(config: Mapping[str, Any], head_dim: int) -> Rope:
    """The RoPE of a model, from its Hugging Face configuration as written by transformers 4 or 5.

    :raises LayoutError: the keys of such a model cannot be turned, or it is not known how.
    """
    kind = config.get("model_type")
    if kind not in _HALVES:
        raise LayoutError(f"how a model of type {kind!r:.60} turns its keys by position is not known")
    told = config.get("rope_parameters") or {}
    told = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {}), **told}
    for name in _OTHERWISE:
        if config.get(name) or told.get(name):
            raise LayoutError(f"how keys turn by position with {name} in the configuration is not known")
    if not isinstance(told["rope_theta"], (int, float)):
        raise LayoutError(f"rope_theta {told['rope_theta']!r:.60} is no number")
    partial = told.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rotary = int(head_dim * partial)
    if rotary < 2 or rotary % 2:
        raise LayoutError(f"{rotary} of {head_dim} elements of a key turn with its position, which are no pairs")
    plain = [float(told["rope_theta"]) ** (-2 * i / rotary) for i in range(rotary // 2)]
    scaling = told.get("rope_type", told.get("type", "default"))
    try:
        found = _SCALINGS[scaling](plain, told, config)
    except KeyError as error:
        known = ", ".join(_SCALINGS)
        raise LayoutError(
            f"keys cannot be turned by the RoPE {scaling!r:.60} ({error!s:.60}); by {known} they can"
        ) from error
    return Rope(tuple(found))


def _llama3(plain: list[float], told: Mapping[str, Any], _config: Mapping[str, Any]) -> list[float]:
    """Low frequencies are divided by `factor`, high ones stay, and between they are blended (Llama 3.1)."""
    factor, length = told["factor"], told["original_max_position_embeddings"]
    low, high = told["low_freq_factor"], told["high_freq_factor"]
    found = []
    for each in plain:
        turns = length * each / math.tau  # over the model's original context length
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(share * each + (1 - share) * each / factor)
    return found


_SCALINGS = {
    "default": lambda plain, _told, _config: plain,
    "linear": lambda plain, told, _config: [each / told["factor"] for each in plain],
    "llama3": _llama3,
}
