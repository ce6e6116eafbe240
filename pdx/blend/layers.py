"""Blends documents whose KV was computed apart: the tokens that their new place changes most are recomputed.

CacheBlend (Yao et al., EuroSys 2025, https://arxiv.org/abs/2405.16444), section 4: KV that was computed without the
documents before it lacks their cross attention, which matters for few tokens, and much the same ones in each layer. The
first layer's KV depends on no other token, so the second layer is computed for all tokens; those whose keys there are
furthest from the given ones are recomputed in the layers behind it, fewer from layer to layer (gradual filtering).

Unlike in the paper, how far a token's keys are counts by how much attention it gets, which recovers more at the same
cost (docs/adr/0081-blending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pdx.errors import LayoutError
from pdx.memory.rope import rope_of

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "mlp", "input_layernorm", "post_attention_layernorm")  # of a layer
WIDER = 1.5  # times the requested share, in the second layer; falls linearly to 0.5 times in the last one
_QUERIES = 128  # whose attention to all tokens is in memory at a time
Select = Callable[[Tensor, int], Tensor]  # (deviations [n], how many) -> indices of so many


def most(deviations: Tensor, count: int) -> Tensor:
    """Where they are largest."""
    return deviations.topk(count).indices


def blended(
    model: Any,
    tokens: Sequence[int],
    kv: Tensor,
    share: float,
    *,
    known: int = 0,
    fresh: Tensor | None = None,
    select: Select = most,
) -> Tensor:
    """The KV of `tokens`: as given, except for a share that is recomputed.

    `model`: a causal language model of transformers whose layers are Llama's. `kv`: [layers, 2, KV heads, tokens,
    head_dim], keys turned for the positions from 0 on; it is not changed. `share`: of the tokens behind the first
    `known` ones, whose KV is exact; the mean over the layers. `fresh`: bool [tokens], those without given KV: they are
    computed in each layer, in addition to the share. `select`: which tokens of a layer are computed in the next.

    :raises LayoutError: the layers are not as Llama's.
    """
    rope_of(model.config.to_dict(), kv.shape[-1])  # which refuses what cannot be turned
    config = model.config
    if (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)) or (
        {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    ):
        raise LayoutError("layers with windows are not blended: each has to attend to all tokens")
    layers = list(model.model.layers)
    if missing := [name for name in _PARTS if not hasattr(layers[0], name) and not hasattr(layers[0].self_attn, name)]:
        raise LayoutError(f"layers of {type(model).__name__} cannot be blended: they have no {', '.join(missing)}")
    out = kv.clone()
    with torch.inference_mode():
        hidden = model.model.embed_tokens(torch.tensor([list(tokens)]))
        turns = model.model.rotary_emb(hidden, torch.arange(len(tokens))[None])
        rows = torch.arange(len(tokens))  # that are computed in this layer
        for number, layer in enumerate(layers):
            queries, keys, values = _projected(layer, hidden, tuple(each[:, rows] for each in turns))
            deviations = (keys - kv[number, 0][None, :, rows]).pow(2).sum(dim=(0, 1, 3))
            out[number, 0, :, rows], out[number, 1, :, rows] = keys[0].to(out.dtype), values[0].to(out.dtype)
            if number == len(layers) - 1:
                break  # no layer follows that would need more of this one
            if number:
                if share < 1:
                    deviations *= _attention(queries, out[number, 0], rows)[rows]
                count = _count(share, number, len(layers), len(tokens) - known)
                deviations[rows < known] = -1.0
                if fresh is not None:
                    deviations[fresh[rows]] = torch.inf
                    count += int(fresh.sum())
                kept = select(deviations, min(count, len(rows))).sort().values
                rows, hidden, queries = rows[kept], hidden[:, kept], queries[:, :, kept]
            if not len(rows):
                break
            hidden = _attended(layer, hidden, queries, out[number], rows)
    return out


def _count(share: float, number: int, num_layers: int, num_tokens: int) -> int:
    """How many tokens layer `number` + 1 computes."""
    if share >= 1:
        return num_tokens
    done = (number - 1) / max(1, num_layers - 2)
    return round(num_tokens * min(1.0, share * (WIDER - done * (2 * WIDER - 2))))


def _projected(layer: Any, hidden: Tensor, turns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, both turned, and values: [1, heads, tokens, head_dim]."""
    attention = layer.self_attn
    inner = layer.input_layernorm(hidden)
    found = []
    for name in ("q", "k", "v"):
        each = getattr(attention, f"{name}_proj")(inner).unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{name}_norm", None)  # Qwen 3's
        found.append((each if norm is None else norm(each)).transpose(1, 2))
    cosines, sines = (each[:, None] for each in turns)
    half = attention.head_dim // 2
    queries, keys = (
        each * cosines + torch.cat((-each[..., half:], each[..., :half]), dim=-1) * sines for each in found[:2]
    )
    return queries, keys, found[2]


def _attention(queries: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """How much attention each token gets from these rows, over the number of tokens that can see it: [tokens]."""
    count = keys.shape[1]
    keys = keys.repeat_interleave(queries.shape[1] // len(keys), dim=0).mT * keys.shape[-1] ** -0.5
    got = torch.zeros(count)
    for some, at in zip(queries[0].split(_QUERIES, dim=1), rows.split(_QUERIES), strict=True):
        scores = (some @ keys).masked_fill_(torch.arange(count) > at[:, None], -torch.inf)
        got += scores.softmax(dim=-1).sum(dim=(0, 1))
    return got / torch.arange(count, 0, -1)


def _attended(layer: Any, hidden: Tensor, queries: Tensor, kv: Tensor, rows: Tensor) -> Tensor:
    """The layer's output for these rows, which attend to all tokens up to their own."""
    keys, values, count = kv[None, 0], kv[None, 1], kv.shape[2]
    mask = None if len(rows) == count else torch.arange(count)[None, :] <= rows[:, None]
    attended = scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    hidden = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    made = layer.mlp(layer.post_attention_layernorm(hidden))  # experts may add their router's output
    out: Tensor = hidden + (made[0] if isinstance(made, tuple) else made)
    return out
