"""What gather and scatter mean, page by page, on tensors as the engine has them: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdx.kernels.page_map import Run


def gather(pages: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """`out[i] = pages[block_ids[i]]`, for tensors of equal dtype and page shape."""
    for row, block_id in enumerate(block_ids.tolist()):
        out[row].copy_(pages[block_id])


def scatter(rows: Tensor, block_ids: Tensor, pages: Tensor) -> None:
    """`pages[block_ids[i]] = rows[i]`, for tensors of equal dtype and page shape."""
    for row, block_id in enumerate(block_ids.tolist()):
        pages[block_id].copy_(rows[row])


def gather_slices(layers: Sequence[Tensor], num_blocks: int, runs: Sequence[Run], slices: Tensor, which: range) -> None:
    """Pages of the layers in `which` -> `slices`, uint8 [n]; the runs' addresses are offsets in it."""
    for layer in which:
        for run in runs:
            for index, block_id in enumerate(run.block_ids):
                page = _in_address_order(layers[layer], num_blocks, block_id).contiguous().view(-1).view(torch.uint8)
                at = run.address + layer * run.layer_bytes + index * len(page)
                slices[at : at + len(page)] = page


def scatter_slices(
    slices: Tensor, runs: Sequence[Run], layers: Sequence[Tensor], num_blocks: int, which: range
) -> None:
    """`slices` -> pages of the layers in `which`; arguments as `gather_slices`."""
    for layer in which:
        for run in runs:
            for index, block_id in enumerate(run.block_ids):
                page = _in_address_order(layers[layer], num_blocks, block_id)
                nbytes = page.numel() * page.element_size()
                at = run.address + layer * run.layer_bytes + index * nbytes
                page.copy_(slices[at : at + nbytes].clone().view(page.dtype).view(page.shape))


def _in_address_order(layer: Tensor, num_blocks: int, block_id: int) -> Tensor:
    block = layer.unflatten(0, (num_blocks, -1))[block_id]
    return block.permute(sorted(range(block.dim()), key=lambda dim: (-block.stride(dim), -block.shape[dim])))
