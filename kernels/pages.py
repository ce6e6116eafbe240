"""Gather and scatter of KV pages on the CPU: whole pages of opaque bytes.

A page is one block of one layer. Rows are 2-D views [num_pages, page_bytes / 16] of 16-byte elements. Where torch has
one thread, pages are copied by streaming stores; where it has several, by torch, whose threads the engine has bound to
its cores. torch copies its widest dtype fastest; complex128 is that dtype, nothing here is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from pdx.kernels.streaming import ELEMENT_BYTES, copy_pages

_ELEMENT = torch.complex128


def page_rows(tensor: Tensor) -> Tensor:
    """`tensor` [num_pages, ...] of any dtype as rows [num_pages, page_bytes / 16]: a view, nothing is copied.

    All dimensions after the first make up one page, in any order but without holes. Pages may lie apart from
    each other (block-outermost layouts, where the other layers' pages lie between). A slot of the arena becomes
    rows as its bytes in shape [num_pages, page_bytes].

    :raises ValueError: a page has holes, pages overlap, or page size, distance or address is no multiple of 16.
    """
    if tensor.dim() < 2:
        raise ValueError(f"expected [num_pages, ...], got shape {tuple(tensor.shape)}")
    sizes, strides, itemsize = tensor.shape, tensor.stride(), tensor.element_size()
    inner = sorted(range(1, tensor.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))
    page_elements = 1
    for dim in reversed(inner):
        if sizes[dim] != 1 and strides[dim] != page_elements:
            raise ValueError(f"a page is not contiguous: shape {tuple(sizes)}, strides {strides}")
        page_elements *= sizes[dim]
    page_bytes, row_bytes = page_elements * itemsize, strides[0] * itemsize
    if not page_bytes or page_bytes % ELEMENT_BYTES:
        raise ValueError(f"pages of {page_bytes} bytes are not divisible by {ELEMENT_BYTES}")
    if sizes[0] > 1 and (row_bytes < page_bytes or row_bytes % ELEMENT_BYTES):
        raise ValueError(f"pages of {page_bytes} bytes lie {row_bytes} bytes apart")
    offset_bytes = tensor.storage_offset() * itemsize
    if tensor.data_ptr() % ELEMENT_BYTES or offset_bytes % ELEMENT_BYTES:
        raise ValueError(f"address {tensor.data_ptr():#x} or storage offset {offset_bytes} is not aligned to 16")
    # A lone page's distance to the next may be anything; torch wants it divisible all the same.
    row_elements = strides[0] if sizes[0] > 1 else page_elements
    return tensor.as_strided((sizes[0], page_elements), (row_elements, 1)).view(_ELEMENT)


class PageCopy(NamedTuple):
    """`rows[i]` and `pages[block_ids[i]]`, for all i: rows from `page_rows` that share no memory; int64 [len(rows)]."""

    rows: Tensor
    block_ids: Tensor
    pages: Tensor


def gather(copies: Sequence[PageCopy]) -> None:
    """Copy the engine's pages into slots.

    Nothing of the data's size is allocated, the GIL is free during the copy, and any thread may call. On one thread
    (`torch.get_num_threads`) the GIL is taken once for all copies.

    :raises IndexError: a block id is outside its pages; nothing was copied.
    :raises ValueError: the shapes or dtypes of a copy do not belong together; nothing was copied.
    """
    if torch.get_num_threads() == 1:
        _stream(copies, to_pages=False)
        return
    for rows, block_ids, pages in _checked(copies):
        torch.index_select(pages, 0, block_ids, out=rows)


def scatter(copies: Sequence[PageCopy]) -> None:
    """Copy slots into the engine's pages.

    Contract and errors as `gather`. Block ids of the same pages must differ; which row wins otherwise is not defined.
    """
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
    """Those that copy anything; torch itself would resize a wrong `out`, and not name the bad id."""
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
    if pages.dtype != _ELEMENT or rows.dtype != _ELEMENT or pages.dim() != 2:
        raise ValueError(f"expected rows from page_rows(), got {pages.dtype} {tuple(pages.shape)} and {rows.dtype}")
    if block_ids.dtype != torch.int64 or block_ids.dim() != 1:
        raise ValueError(f"block ids must be int64 [n], got {block_ids.dtype} {tuple(block_ids.shape)}")
    if rows.shape != (len(block_ids), pages.shape[1]):
        raise ValueError(
            f"{len(block_ids)} pages of {pages.shape[1]} elements do not fit rows of shape {tuple(rows.shape)}"
        )


def _outside(block_id: int, num_pages: int) -> IndexError:
    return IndexError(f"block id {block_id} is outside the {num_pages} pages")
