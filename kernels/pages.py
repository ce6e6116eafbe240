"""Gather and scatter of KV pages on the CPU: whole pages of opaque bytes, one torch call per layer.

A page is one block of one layer. Rows are 2-D views [num_pages, page_bytes / 16] of 16-byte elements, because
torch copies its widest dtype fastest; complex128 is that dtype, nothing here is a number. Consecutive block ids
need no path of their own: the processor prefetches across them, and they copy as fast as one memcpy.
"""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENT_BYTES = 16
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


def gather(pages: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """Copy `out[i] = pages[block_ids[i]]`; the engine's pages into a slot.

    `pages` and `out` are rows from `page_rows` that share no memory; `block_ids` is int64 [len(out)]. Nothing
    of the data's size is allocated, the GIL is free during the copy, and any thread may call.

    :raises IndexError: a block id is outside `pages`; nothing was copied.
    :raises ValueError: the shapes or dtypes do not belong together; nothing was copied.
    """
    if _checked(pages, block_ids, out):
        torch.index_select(pages, 0, block_ids, out=out)


def scatter(rows: Tensor, block_ids: Tensor, pages: Tensor) -> None:
    """Copy `pages[block_ids[i]] = rows[i]`; a slot into the engine's pages.

    Contract and errors as `gather`. Block ids must differ; which row wins otherwise is not defined.
    """
    if _checked(pages, block_ids, rows):
        pages.index_copy_(0, block_ids, rows)


def _checked(pages: Tensor, block_ids: Tensor, rows: Tensor) -> bool:
    """Whether there is anything to copy; torch itself would resize a wrong `out`, or not name the bad id."""
    if pages.dtype != _ELEMENT or rows.dtype != _ELEMENT or pages.dim() != 2:
        raise ValueError(f"expected rows from page_rows(), got {pages.dtype} {tuple(pages.shape)} and {rows.dtype}")
    if block_ids.dtype != torch.int64 or block_ids.dim() != 1:
        raise ValueError(f"block ids must be int64 [n], got {block_ids.dtype} {tuple(block_ids.shape)}")
    if rows.shape != (len(block_ids), pages.shape[1]):
        raise ValueError(
            f"{len(block_ids)} pages of {pages.shape[1]} elements do not fit rows of shape {tuple(rows.shape)}"
        )
    if not len(block_ids):
        return False
    lowest, highest = (int(bound) for bound in torch.aminmax(block_ids))
    if lowest < 0 or highest >= len(pages):
        bad = lowest if lowest < 0 else highest
        raise IndexError(f"block id {bad} is outside the {len(pages)} pages")
    return True
