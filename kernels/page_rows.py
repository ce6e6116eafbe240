"""KV pages on a CPU as rows: 2-D views [num_pages, page_bytes / 16] of 16-byte elements.

torch copies its widest dtype fastest, which is complex128; the elements are only bytes, not numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENT_BYTES = 16
ELEMENT = torch.complex128


def page_rows(tensor: Tensor) -> Tensor:
    """`tensor` [num_pages, ...] of any dtype as rows [num_pages, page_bytes / 16]: a view, nothing is copied.

    All dimensions after the first make up one page, in any order but without holes. There may be gaps between pages
    (for other layers' pages in block-outermost layouts). A slot of the arena becomes rows as its bytes in shape
    [num_pages, page_bytes].

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
    # The stride of a single page may be anything, but torch requires it to be divisible.
    row_elements = strides[0] if sizes[0] > 1 else page_elements
    return tensor.as_strided((sizes[0], page_elements), (row_elements, 1)).view(ELEMENT)
