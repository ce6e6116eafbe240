"""The GPU version of `pdx.kernels.turned`: one Triton kernel.

A launch copies tokens of many layers; a program copies some tokens of one head and layer. Keys are turned in float32
and rounded once. As in `pdx.kernels.paged`, a launch neither allocates nor waits, and compiles only what
`warm_up_turned` has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.page_map import PageMap, Place

if TYPE_CHECKING:
    from pdx.memory.rope import Rope

_TOKENS = 16  # per program
_RUNTIME_ARGUMENTS = ["layers", "tokens", "angles", "first_layer", "num_tokens"]
_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class PageStrides(NamedTuple):
    """Where the elements of a page lie, in elements. The key of head h and token t begins at h * head + t * token in a
    slot, and at h * engine_head + t * engine_token in the engine. Its value follows it; both are contiguous."""

    num_heads: int
    block_tokens: int
    head_dim: int
    head: int
    token: int
    engine_head: int
    engine_token: int

    @classmethod
    def of(
        cls, layers: Sequence[Tensor], num_blocks: int, num_heads: int, head_dim: int, dtype: torch.dtype
    ) -> PageStrides:
        """The strides of layers given as tensors [blocks, heads, tokens, key and value], in any memory order; a shard
        has `num_heads` of their heads.

        :raises ValueError: the layers are not like that.
        """
        kinds = {(tuple(each.shape), each.stride(), each.element_size()) for each in layers}
        (shape, strides, size), *others = kinds
        content = 2 * head_dim
        if (
            others
            or len(shape) != 4
            or (shape[0], shape[3] * size, strides[3]) != (num_blocks, content * dtype.itemsize, 1)
            or any(stride * size % dtype.itemsize for stride in strides[:3])
        ):
            raise ValueError(f"a page order the kernel cannot take: {sorted(kinds)[:2]} for {num_blocks} blocks")
        by_head, by_token = (stride * size // dtype.itemsize for stride in strides[1:3])
        block_tokens = shape[2]
        is_by_head = shape[1] == 1 or by_head > by_token  # the order in which `PageMap` puts pages into slots
        head, token = (block_tokens * content, content) if is_by_head else (content, num_heads * content)
        return cls(num_heads, block_tokens, head_dim, head, token, by_head, by_token)


class TurnedPages(NamedTuple):
    """How keys turn with their positions, and where they lie in a shard's pages."""

    rope: Rope
    strides: PageStrides
    dtype: torch.dtype


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)  # type: ignore[untyped-decorator]
def _copy_turned(
    layers: tl.tensor,
    tokens: tl.tensor,
    angles: tl.tensor,
    first_layer: tl.int32,
    num_tokens: tl.int32,
    HEAD: tl.constexpr,
    TOKEN: tl.constexpr,
    ENGINE_HEAD: tl.constexpr,
    ENGINE_TOKEN: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    APART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> None:
    """`layers`: `PageMap.table`; `tokens`, `angles`: of a `TurnedBatch`. The elements of pair i are X + i * APART and
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
    new = base.to(tl.pointer_type(ELEMENT)) + head * ENGINE_HEAD + new_token * ENGINE_TOKEN
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
        value = tl.load(old[:, None] + DIM + element[None, :], mask=is_value)
        tl.store(new[:, None] + DIM + element[None, :], value, mask=is_value)
        if first + WIDTH > 2 * PAIRS:  # elements that do not turn
            is_still = is_value & (element >= 2 * PAIRS)[None, :]
            still = tl.load(old[:, None] + element[None, :], mask=is_still)
            tl.store(new[:, None] + element[None, :], still, mask=is_still)


class TurnedRun(NamedTuple):
    """Tokens [first, first + num_tokens) of a slot, which go to the tokens from `target` on of these blocks. The caller
    must check that the slot and the blocks reach that far."""

    address: int  # of the slot in layer 0
    layer_bytes: int  # from one layer's slice to the next
    first: int
    target: int
    num_tokens: int
    block_ids: Sequence[int]


class TurnedBatch(NamedTuple):
    """The tokens of any number of runs with the same shift. Used like a `pdx.kernels.page_map.Batch`."""

    pages: PageMap
    turned: TurnedPages
    # int64 [tokens, 5] on the device: address of the token's page in the slot in layer 0, bytes from layer to layer,
    # index in that page; the engine's block, index in that.
    tokens: Tensor
    angles: Tensor  # float32, on the device: cosines, followed by sines

    @classmethod
    def of(cls, pages: PageMap, turned: TurnedPages, runs: Sequence[TurnedRun], shift: int) -> TurnedBatch:
        """Upload the runs on torch's current stream, without waiting for it.

        :raises IndexError: a block is outside `pages`.
        """
        size, is_cuda = turned.strides.block_tokens, pages.device.type == "cuda"
        tokens = torch.empty((sum(run.num_tokens for run in runs), 5), dtype=torch.int64, pin_memory=is_cuda)
        rows, end = tokens.numpy(), 0
        for run in runs:
            here, there = (np.arange(run.num_tokens) + start for start in (run.first, run.target))
            blocks = np.asarray(run.block_ids, np.int64)[there // size]
            if run.num_tokens and not 0 <= blocks.min() <= blocks.max() < pages.num_blocks:
                raise IndexError(f"blocks {run.block_ids} are not all of the {pages.num_blocks} blocks")
            address = run.address + here // size * pages.page_bytes
            columns = address, np.full(run.num_tokens, run.layer_bytes), here % size, blocks, there % size
            rows[end : end + run.num_tokens] = np.stack(columns, axis=1)
            end += run.num_tokens
        turns = torch.tensor(turned.rope.angles(shift), dtype=torch.float64)
        angles = torch.empty(2 * len(turns), dtype=torch.float32, pin_memory=is_cuda)
        angles.copy_(torch.cat([turns.cos(), turns.sin()]))
        uploaded = (each.to(pages.device, non_blocking=True) for each in (tokens, angles))
        return cls(pages, turned, *uploaded)

    def parts(self, layers: range, nbytes: int) -> Iterator[tuple[TurnedBatch, range]]:
        """The same copies in parts of at most `nbytes` bytes, but at least a program's tokens of one layer."""
        of_token = self.pages.page_bytes // self.turned.strides.block_tokens
        most = max(1, nbytes // of_token // _TOKENS) * _TOKENS  # keeps the alignment of the table
        most_layers = max(1, nbytes // max(1, len(self.tokens) * of_token))
        for first in range(0, len(self.tokens), most):
            part = TurnedBatch(self.pages, self.turned, self.tokens[first : first + most], self.angles)
            for layer in range(layers.start, layers.stop, most_layers):
                yield part, range(layer, min(layer + most_layers, layers.stop))


def scatter_turned(
    pages: PageMap, batch: TurnedBatch, first_layer: int = 0, num_layers: int = 1, *, place: Place = Place.HERE
) -> None:
    """Copy the tokens' keys, turned, and their values into the engine's pages of these layers: one launch on torch's
    current stream, which must be that of `TurnedBatch.of`. `place` is ignored so far.

    :raises IndexError: not all layers are in `pages`.
    """
    if min(first_layer, num_layers) < 0 or first_layer + num_layers > pages.num_layers:
        raise IndexError(f"layers {first_layer} to {first_layer + num_layers} of {pages.num_layers}")
    if len(batch.tokens) and num_layers:
        _launch(pages, batch, first_layer, num_layers)


def warm_up_turned(pages: PageMap, turned: TurnedPages) -> None:
    """Compile and load what `scatter_turned` launches. Launches on torch's current stream; copies nothing."""
    _launch(pages, TurnedBatch.of(pages, turned, [], 0), 0, 1)


def _launch(pages: PageMap, batch: TurnedBatch, first_layer: int, num_layers: int) -> None:
    rope, strides, dtype = batch.turned
    pairs, num_tokens = len(rope.frequencies), len(batch.tokens)
    x, y, apart = (0, 1, 2) if rope.interleaved else (0, pairs, 1)
    grid = (max(1, triton.cdiv(num_tokens, _TOKENS)), strides.num_heads, num_layers)
    _copy_turned[grid](
        *(pages.table, batch.tokens, batch.angles, first_layer, num_tokens),
        *(strides.head, strides.token, strides.engine_head, strides.engine_token, strides.head_dim),
        *(pairs, x, y, apart, _TOKENS, triton.next_power_of_2(pairs), _ELEMENTS[dtype]),
        enable_fp_fusion=False,  # so that rounding is the same as on a CPU
    )
