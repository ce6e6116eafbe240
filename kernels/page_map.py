"""Where the pages of all layers of an engine lie, as a table that the copy kernel reads.

A page is one block of one layer: `pieces` equal contiguous pieces, a constant distance apart. One piece where the
page is contiguous (LBNHC, LBHNC, BLNHC, BLHNC, MLA), one per head where other layers or other blocks lie between the
heads (BHLNC, LHBNC). In a slot a page is always contiguous: its pieces in the order of their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

UNIT_BYTES = 16  # of one access of the kernel; sizes, distances and addresses are multiples of it


@dataclass(frozen=True)
class _Place:
    """The pages of one layer; everything in bytes. Page b, piece p lies at address + b * block + p * piece."""

    address: int
    block_stride: int
    piece_stride: int
    pieces: int
    piece_bytes: int


@dataclass(frozen=True, eq=False)
class PageMap:
    """The KV cache of one engine worker. Immutable; any thread may use it. It keeps the tensors alive."""

    num_layers: int
    num_blocks: int
    page_bytes: int
    device: torch.device
    pieces: int  # of one page
    piece_bytes: int
    # int64 [num_layers, 3] on the device: address, block stride, piece stride, in bytes
    table: Tensor = field(repr=False)
    layers: tuple[Tensor, ...] = field(repr=False)

    @classmethod
    def of(cls, layers: Sequence[Tensor], num_blocks: int) -> PageMap:
        """Map the layers' tensors [num_blocks * ratio, ...], in layer order, of any dtype and dimension order.

        Where the ratio is not 1, that many neighbouring kernel blocks make one block. Uploads the table: at
        start-up only, since it may wait for the device.

        :raises ValueError: there is no layer, layers differ in device or page size, blocks overlap, a page has holes
            that are not one constant distance, or a size, distance or address is not divisible by 16.
        """
        if not layers:
            raise ValueError("no layers")
        if len({tensor.device for tensor in layers}) > 1:
            raise ValueError(f"layers on several devices: {sorted({str(tensor.device) for tensor in layers})}")
        places = [_place(tensor, num_blocks) for tensor in layers]
        sizes = {(place.pieces, place.piece_bytes) for place in places}
        if len(sizes) > 1:
            raise ValueError(f"layers differ in (pieces, bytes of a piece) of a page: {sorted(sizes)}")
        [(pieces, piece_bytes)] = sizes
        rows = [(place.address, place.block_stride, place.piece_stride) for place in places]
        device = layers[0].device
        table = torch.tensor(rows, dtype=torch.int64).to(device)
        page_bytes = pieces * piece_bytes
        return cls(len(layers), num_blocks, page_bytes, device, pieces, piece_bytes, table, tuple(layers))


def _place(tensor: Tensor, num_blocks: int) -> _Place:
    shape = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}"
    if tensor.dim() < 2 or num_blocks < 1 or not tensor.numel() or tensor.shape[0] % num_blocks:
        raise ValueError(f"no pages of {num_blocks} blocks: {shape}")
    blocks = tensor.unflatten(0, (num_blocks, -1))  # always a view, whatever the strides
    itemsize = tensor.element_size()
    inner = [(stride, size) for stride, size in zip(blocks.stride()[1:], blocks.shape[1:], strict=True) if size > 1]
    piece_bytes, piece_stride, pieces = itemsize, 0, 1
    for stride, size in sorted(inner):
        stride_bytes = stride * itemsize
        if not piece_stride and stride_bytes == piece_bytes:
            piece_bytes *= size
        elif not piece_stride and stride_bytes > piece_bytes:
            piece_stride, pieces = stride_bytes, size
        elif stride_bytes == piece_stride * pieces and piece_stride:
            pieces *= size
        else:
            raise ValueError(f"a page is not equal pieces at one distance: {shape}")
    # The distance to the next block means nothing where there is one block.
    block_stride = blocks.stride(0) * itemsize if num_blocks > 1 else 0
    place = _Place(tensor.data_ptr(), block_stride, piece_stride, pieces, piece_bytes)
    if any(number % UNIT_BYTES for number in (place.address, block_stride, piece_stride, piece_bytes)):
        raise ValueError(f"{place} is not divisible by {UNIT_BYTES}: {shape}")
    if num_blocks > 1 and not _is_apart(place, num_blocks):
        raise ValueError(f"pages overlap, {place}: {shape}")
    return place


def _is_apart(place: _Place, num_blocks: int) -> bool:
    """Whether blocks lie one behind the other, or, between a block's pieces, the same piece of all other blocks."""
    page_extent = (place.pieces - 1) * place.piece_stride + place.piece_bytes
    all_blocks_extent = (num_blocks - 1) * place.block_stride + place.piece_bytes
    is_interleaved = place.block_stride >= place.piece_bytes and place.piece_stride >= all_blocks_extent
    return place.block_stride >= page_extent or is_interleaved
