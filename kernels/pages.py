"""Gather and scatter of KV pages on the CPU: whole pages of opaque bytes.

A page is one block of one layer. If torch has one thread, pages are copied with streaming stores; if it has several, by
torch, whose threads the engine has bound to its cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from pdx.kernels.page_rows import ELEMENT, ELEMENT_BYTES
from pdx.kernels.streaming import copy_pages


class PageCopy(NamedTuple):
    """A copy between `rows[i]` and `pages[block_ids[i]]`, for all i. Both are rows from `page_rows`, and they share no
    memory; `block_ids` is int64 [len(rows)].
    """

    rows: Tensor
    block_ids: Tensor
    pages: Tensor


def gather(copies: Sequence[PageCopy]) -> None:
    """Copy the engine's pages into slots.

    Allocates nothing of the data's size, releases the GIL during the copy, and is thread-safe. With one thread
    (`torch.get_num_threads`) all copies are made in one call without the GIL. Nothing is copied if a block id is
    outside its pages (IndexError), or if shapes or dtypes do not match (ValueError).
    """
    if torch.get_num_threads() == 1:
        _stream(copies, to_pages=False)
        return
    for rows, block_ids, pages in _checked(copies):
        torch.index_select(pages, 0, block_ids, out=rows)


def scatter(copies: Sequence[PageCopy]) -> None:
    """Copy slots into the engine's pages, like `gather`. Block ids of the same pages must differ; otherwise it is
    undefined which row wins."""
    if torch.get_num_threads() == 1:
        _stream(copies, to_pages=True)
        return
    for rows, block_ids, pages in _checked(copies):
        pages.index_copy_(0, block_ids, rows)


def _stream(copies: Sequence[PageCopy], *, to_pages: bool) -> None:
    table, block_ids = [], []
    first = 0
    for copy in copies:
        _check(copy)
        rows, ids, pages = copy
        page_bytes = pages.shape[1] * ELEMENT_BYTES
        place = pages.data_ptr(), pages.stride(0) * ELEMENT_BYTES, len(pages)
        table.append((*place, rows.data_ptr(), rows.stride(0) * ELEMENT_BYTES, page_bytes, first, len(ids)))
        block_ids.append(ids.numpy())
        first += len(ids)
    if not first:
        return
    all_ids = numpy.concatenate(block_ids)
    bad = copy_pages(numpy.array(table, dtype=numpy.int64), all_ids, to_pages)
    if bad >= 0:
        num_pages = next(line[2] for line in reversed(table) if line[6] <= bad)
        raise _outside(int(all_ids[bad]), num_pages)


def _checked(copies: Sequence[PageCopy]) -> list[PageCopy]:
    """The copies that are not empty, checked; torch itself would resize a wrong `out`, and not name a bad id."""
    for copy in copies:
        _check(copy)
    filled = [copy for copy in copies if len(copy.block_ids)]
    for copy in filled:
        lowest, highest = (int(bound) for bound in torch.aminmax(copy.block_ids))
        if lowest < 0 or highest >= len(copy.pages):
            raise _outside(lowest if lowest < 0 else highest, len(copy.pages))
    return filled


def _check(copy: PageCopy) -> None:
    rows, block_ids, pages = copy
    if pages.dtype != ELEMENT or rows.dtype != ELEMENT or {pages.dim(), rows.dim()} != {2}:
        raise ValueError(f"expected rows from page_rows(), got {pages.dtype} {tuple(pages.shape)} and {rows.dtype}")
    if not (pages.is_cpu and rows.is_cpu and block_ids.is_cpu):
        raise ValueError(f"expected memory of the CPU, got {pages.device}, {rows.device} and {block_ids.device}")
    if pages.stride(1) != 1 or rows.stride(1) != 1 or not block_ids.is_contiguous():
        raise ValueError(f"expected rows without holes, got strides {pages.stride()} and {rows.stride()}")
    if block_ids.dtype != torch.int64 or block_ids.dim() != 1:
        raise ValueError(f"block ids must be int64 [n], got {block_ids.dtype} {tuple(block_ids.shape)}")
    if rows.shape != (len(block_ids), pages.shape[1]):
        raise ValueError(
            f"{len(block_ids)} pages of {pages.shape[1]} elements do not fit rows of shape {tuple(rows.shape)}"
        )


def _outside(block_id: int, num_pages: int) -> IndexError:
    return IndexError(f"block id {block_id} is outside the {num_pages} pages")
