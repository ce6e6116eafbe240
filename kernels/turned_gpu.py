"""The same as `pdx.kernels.turned` by one Triton kernel, for pages whose elements lie at equal distances.

A launch copies tokens of many layers; a program takes some tokens of one head and layer. Keys are turned in float32 and
rounded once. As in `pdx.kernels.paged` launching neither allocates nor waits, but for its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.page_map import PageMap

if TYPE_CHECKING:
    from pdx.memory.rope import Rope

_TOKENS = 16  # of a program


class PageStrides(NamedTuple):
    """Where the elements of a page lie, in elements: of head h and token t the key begins at h * head + t * token, and
    its value `value` behind that; both are contiguous. `engine_head`: the same in the engine's own page, where heads
    may lie apart."""

    num_heads: int
    head_dim: int
    head: int
    token: int
    value: int
    engine_head: int


@triton.jit  # type: ignore[untyped-decorator]
def _copy_turned(
    layers: tl.tensor,
    tokens: tl.tensor,
    angles: tl.tensor,
    first_layer: tl.int32,
    num_tokens: tl.int32,
    HEAD: tl.constexpr,
    ENGINE_HEAD: tl.constexpr,
    TOKEN: tl.constexpr,
    VALUE: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    APART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> None:
    """`tokens`: as `token_table` makes it. `layers`: `PageMap.table`. The elements of pair i are X + i * APART and
    Y + i * APART."""
    nth = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_token = nth < num_tokens
    head = tl.program_id(1).to(tl.int64)
    layer = (first_layer + tl.program_id(2)).to(tl.int64)
    row = tokens + nth * 5
    page = tl.load(row, mask=is_token, other=0) + layer * tl.load(row + 1, mask=is_token, other=0)
    old_token = tl.load(row + 2, mask=is_token, other=0)
    block = tl.load(row + 3, mask=is_token, other=0)
    new_token = tl.load(row + 4, mask=is_token, other=0)
    base = tl.load(layers + layer * 3) + block * tl.load(layers + layer * 3 + 1)
    old = page.to(tl.pointer_type(ELEMENT)) + head * HEAD + old_token * TOKEN
    new = base.to(tl.pointer_type(ELEMENT)) + head * ENGINE_HEAD + new_token * TOKEN
    pair = tl.arange(0, WIDTH)
    is_pair = is_token[:, None] & (pair < PAIRS)[None, :]
    at_x, at_y = (X + pair * APART)[None, :], (Y + pair * APART)[None, :]
    cosine = tl.load(angles + pair, mask=pair < PAIRS, other=0.0)[None, :]
    sine = tl.load(angles + PAIRS + pair, mask=pair < PAIRS, other=0.0)[None, :]
    x = tl.load(old[:, None] + at_x, mask=is_pair, other=0.0).to(tl.float32)
    y = tl.load(old[:, None] + at_y, mask=is_pair, other=0.0).to(tl.float32)
    tl.store(new[:, None] + at_x, (x * cosine - y * sine).to(ELEMENT), mask=is_pair)
    tl.store(new[:, None] + at_y, (y * cosine + x * sine).to(ELEMENT), mask=is_pair)
    for first in tl.static_range(0, DIM, WIDTH):
        element = first + tl.arange(0, WIDTH)
        is_value = is_token[:, None] & (element < DIM)[None, :]
        value = tl.load(old[:, None] + VALUE + element[None, :], mask=is_value)
        tl.store(new[:, None] + VALUE + element[None, :], value, mask=is_value)
        if first + WIDTH > 2 * PAIRS:  # what has no position
            is_still = is_value & (element >= 2 * PAIRS)[None, :]
            still = tl.load(old[:, None] + element[None, :], mask=is_still)
            tl.store(new[:, None] + element[None, :], still, mask=is_still)


def token_table(
    pages: PageMap,
    runs: Sequence[tuple[int, int, int, int, int, Sequence[int]]],
    *,
    block_tokens: int,
) -> Tensor:
    """A line per token of `runs`, each (address of the slot in layer 0, bytes from layer to layer, first token in the
    slot, first token in the request, count, the request's blocks): address of its page in the slot in layer 0, bytes
    from layer to layer, which token of that page; the engine's block, which token of that. int64 [tokens, 5] on the
    device of `pages`.

    :raises IndexError: a block is outside `pages`.
    """
    rows = []
    for address, layer_bytes, first, target, count, blocks in runs:
        for token in range(count):
            here, there = first + token, target + token
            block = blocks[there // block_tokens]
            if not 0 <= block < pages.num_blocks:
                raise IndexError(f"block id {block} is outside the {pages.num_blocks} blocks")
            page = address + here // block_tokens * pages.page_bytes
            rows.append((page, layer_bytes, here % block_tokens, block, there % block_tokens))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 5).to(pages.device)


def angle_table(rope: Rope, shift: int, device: torch.device) -> Tensor:
    """Cosines, and behind them sines; float32."""
    angles = torch.tensor(rope.angles(shift), dtype=torch.float64)
    return torch.cat([angles.cos(), angles.sin()]).float().to(device)


def scatter_turned(
    pages: PageMap,
    tokens: Tensor,
    angles: Tensor,
    strides: PageStrides,
    rope: Rope,
    dtype: torch.dtype,
    first_layer: int = 0,
    num_layers: int = 1,
) -> None:
    """Copy the tokens' keys, turned, and values into the engine's pages of these layers: one launch on torch's current
    stream. `tokens` and `angles` are from `token_table` and `angle_table`.

    :raises IndexError: the layers are not all in `pages`.
    """
    if min(first_layer, num_layers) < 0 or first_layer + num_layers > pages.num_layers:
        raise IndexError(f"layers {first_layer} to {first_layer + num_layers} of {pages.num_layers}")
    if not len(tokens) or not num_layers:
        return
    pairs = len(rope.frequencies)
    x, y, apart = (0, 1, 2) if rope.interleaved else (0, pairs, 1)
    grid = (triton.cdiv(len(tokens), _TOKENS), strides.num_heads, num_layers)
    _copy_turned[grid](
        *(pages.table, tokens, angles, first_layer, len(tokens)),
        *(strides.head, strides.engine_head, strides.token, strides.value, strides.head_dim),
        *(pairs, x, y, apart, _TOKENS, triton.next_power_of_2(pairs), _ELEMENTS[dtype]),
    )


_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
