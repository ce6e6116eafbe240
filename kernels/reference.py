"""What gather and scatter mean, page by page, on tensors as the engine has them: the oracle of the tests."""

from __future__ import annotations

from torch import Tensor


def gather(pages: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """`out[i] = pages[block_ids[i]]`, for tensors of equal dtype and page shape."""
    for row, block_id in enumerate(block_ids.tolist()):
        out[row].copy_(pages[block_id])


def scatter(rows: Tensor, block_ids: Tensor, pages: Tensor) -> None:
    """`pages[block_ids[i]] = rows[i]`, for tensors of equal dtype and page shape."""
    for row, block_id in enumerate(block_ids.tolist()):
        pages[block_id].copy_(rows[row])
