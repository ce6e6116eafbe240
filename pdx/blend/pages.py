"""Converts KV between the form that a model computes and that of an engine's pages in a chunk."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdx.kernels.turned import Offsets, PageElements
from pdx.memory.rope import Rope


def unpacked(pages: Tensor, elements: PageElements) -> Tensor:
    """The KV [layers, 2, KV heads, tokens, head_dim] in float32 of `pages` [layers, blocks, elements of a page]."""
    found = pages[:, :, torch.from_numpy(_places(elements))]  # [layers, blocks, 2, heads, tokens of a block, head_dim]
    return found.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).float()


def pack(kv: Tensor, pages: Tensor, elements: PageElements) -> None:
    """Write such KV into pages of any type, which it fills."""
    blocks = kv.unflatten(3, (-1, elements.block_tokens)).permute(0, 3, 1, 2, 4, 5)
    pages[:, :, torch.from_numpy(_places(elements))] = blocks.to(pages.dtype)


def turned(kv: Tensor, rope: Rope, shift: int) -> Tensor:
    """A copy of the KV, `shift` positions further on."""
    angles = torch.tensor(rope.angles(shift), dtype=torch.float64)
    cosines, sines = angles.cos().float(), angles.sin().float()
    firsts, seconds = (list(each) for each in zip(*rope.pairs(), strict=True))
    out = kv.clone()
    x, y = kv[:, 0, ..., firsts], kv[:, 0, ..., seconds]
    out[:, 0, ..., firsts], out[:, 0, ..., seconds] = x * cosines - y * sines, y * cosines + x * sines
    return out


def _places(elements: PageElements) -> Offsets:
    """Where each element lies: int64 [2, heads, tokens of a block, head_dim]."""
    heads = np.arange(elements.num_heads)[:, None, None] * elements.head
    keys = elements.key_tokens[:, None] + elements.key_elements
    values = elements.value_tokens[:, None] + elements.value_elements
    return np.stack([heads + keys, heads + values])
