"""Tables for the copy kernel: where the pages of all an engine's layers lie, and which of them to copy.

A page is one block of one layer: `pieces` equal contiguous pieces at a constant distance. It has one piece if the page
is contiguous (LBNHC, LBHNC, BLNHC, BLHNC, MLA), and one per head if other layers or blocks lie between the heads
(BHLNC, LHBNC). In a slot a page is always contiguous: its pieces in order of their addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

UNIT_BYTES = 16  # per access of the kernel; sizes, distances and addresses are multiples of it
_MAX_ADDRESS = 1 << 62


@dataclass(frozen=True)
class _LayerPages:
    """The pages of one layer, in bytes. Piece p of page b is at address + b * block_stride + p * piece_stride."""

    address: int
    block_stride: int
    piece_stride: int
    pieces: int
    piece_bytes: int


@dataclass(frozen=True, eq=False)
class PageMap:
    """The KV cache of one engine worker. Immutable and thread-safe. It keeps the tensors alive."""

    num_layers: int
    num_blocks: int
    page_bytes: int
    device: torch.device
    pieces: int  # per page
    piece_bytes: int
    # int64 [num_layers, 3] on the device: address, block stride, piece stride, in bytes
    table: Tensor = field(repr=False)
    layers: tuple[Tensor, ...] = field(repr=False)

    @classmethod
    def of(cls, layers: Sequence[Tensor], num_blocks: int) -> PageMap:
        """Map the layers' tensors [num_blocks * ratio, ...], in layer order, of any dtype and dimension order.

        With a ratio above 1, that many adjacent kernel blocks form one block. Uploads the table, which may wait for the
        device: call it at start-up only. A ValueError if the layers have no such table.
        """
        if not layers:
            raise ValueError("no layers")
        if len({tensor.device for tensor in layers}) > 1:
            raise ValueError(f"layers on several devices: {sorted({str(tensor.device) for tensor in layers})}")
        found = [_layer_pages(tensor, num_blocks) for tensor in layers]
        sizes = {(place.pieces, place.piece_bytes) for place in found}
        if len(sizes) > 1:
            raise ValueError(f"layers differ in (pieces, bytes of a piece) of a page: {sorted(sizes)}")
        [(pieces, piece_bytes)] = sizes
        rows = [(place.address, place.block_stride, place.piece_stride) for place in found]
        device = layers[0].device
        table = torch.tensor(rows, dtype=torch.int64).to(device)
        page_bytes = pieces * piece_bytes
        return cls(len(layers), num_blocks, page_bytes, device, pieces, piece_bytes, table, tuple(layers))


def _layer_pages(tensor: Tensor, num_blocks: int) -> _LayerPages:
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
    # With a single block, the distance to the next one is meaningless.
    block_stride = blocks.stride(0) * itemsize if num_blocks > 1 else 0
    place = _LayerPages(tensor.data_ptr(), block_stride, piece_stride, pieces, piece_bytes)
    if any(number % UNIT_BYTES for number in (place.address, block_stride, piece_stride, piece_bytes)):
        raise ValueError(f"{place} is not divisible by {UNIT_BYTES}: {shape}")
    if num_blocks > 1 and not _is_apart(place, num_blocks):
        raise ValueError(f"pages overlap, {place}: {shape}")
    return place


def _is_apart(place: _LayerPages, num_blocks: int) -> bool:
    """Whether blocks do not overlap: they are consecutive, or interleaved piece by piece."""
    page_extent = (place.pieces - 1) * place.piece_stride + place.piece_bytes
    all_blocks_extent = (num_blocks - 1) * place.block_stride + place.piece_bytes
    is_interleaved = place.block_stride >= place.piece_bytes and place.piece_stride >= all_blocks_extent
    return place.block_stride >= page_extent or is_interleaved


class Place(Enum):
    """The memory that has the places of a batch, as seen by the GPU that copies."""

    HERE = "its own"
    PEER = "another GPU's, mapped"
    HOST = "page-locked host memory"


class Run(NamedTuple):
    """Pages with consecutive places in the slice of every layer.

    Page i of layer l is at `address` + l * `layer_bytes` + i * page_bytes. The kernel must be able to reach the
    address: device memory, a peer's mapped memory or page-locked host memory. The caller must check that this is within
    the slot, whose end is not known here.
    """

    block_ids: Sequence[int]
    address: int  # of the first page's place in layer 0, whichever layers are copied
    layer_bytes: int  # from one layer's slice to the next


@dataclass(frozen=True, eq=False)
class Batch:
    """The pages of any number of runs. For use on the stream on which it was made; it may be dropped after a launch."""

    pages: PageMap
    num_pages: int
    # int64 [num_pages, 3] on the device: block id, address of its place in layer 0, layer_bytes
    table: Tensor = field(repr=False)

    @classmethod
    def of(cls, pages: PageMap, runs: Sequence[Run]) -> Batch:
        """Check the runs and upload them in one copy on torch's current stream, without waiting for it. An IndexError
        names a block id outside the engine's blocks; a ValueError names an impossible address or distance."""
        counts = [len(run.block_ids) for run in runs]
        num_pages = sum(counts)
        # torch does not reuse page-locked memory until the copies from it have ended.
        rows = torch.empty((num_pages, 3), dtype=torch.int64, pin_memory=pages.device.type == "cuda")
        if num_pages:
            flat = list(itertools.chain.from_iterable(run.block_ids for run in runs))
            for bad in (min(flat), max(flat)):
                if not 0 <= bad < pages.num_blocks:
                    raise IndexError(f"block id {bad} is outside the {pages.num_blocks} blocks")
            ids, places, layer_bytes = rows.numpy().T
            ids[:] = flat
            for run, count in zip(runs, counts, strict=True):
                _check(run, count, pages)
            # Subtract the pages of earlier runs, so that adding each page's overall index places it within its run.
            before = np.cumsum([0, *counts[:-1]])
            firsts = np.array([run.address for run in runs], np.int64) - before * pages.page_bytes
            places[:] = np.repeat(firsts, counts) + np.arange(num_pages, dtype=np.int64) * pages.page_bytes
            layer_bytes[:] = np.repeat(np.array([run.layer_bytes for run in runs], np.int64), counts)
        return cls(pages, num_pages, rows.to(pages.device, non_blocking=True))

    def shifted(self, nbytes: int) -> Batch:
        """The same pages, with places that are `nbytes` further on. On torch's current stream, like `of`."""
        table = self.table.clone()
        table[:, 1] += nbytes
        return Batch(self.pages, self.num_pages, table)

    def parts(self, layers: range, nbytes: int) -> Iterator[tuple[Batch, range]]:
        """The same copies in parts of at most `nbytes` bytes, but at least two pages of one layer.

        The parts' tables are views of this one's, so the parts must be used on the same stream.
        """
        # An even number of rows of 24 bytes: each part's table is aligned to 16, as the compiled kernel expects.
        most_pages = max(2, nbytes // self.pages.page_bytes // 2 * 2)
        most_layers = max(1, nbytes // max(1, self.num_pages * self.pages.page_bytes))
        for first in range(0, self.num_pages, most_pages):
            part = self
            if self.num_pages > most_pages:
                rows = self.table[first : first + most_pages]
                part = Batch(self.pages, len(rows), rows)
            for layer in range(layers.start, layers.stop, most_layers):
                yield part, range(layer, min(layer + most_layers, layers.stop))


def _check(run: Run, num_pages: int, pages: PageMap) -> None:
    if not num_pages:
        return
    end = run.address + pages.num_layers * run.layer_bytes
    if run.address <= 0 or run.address % UNIT_BYTES or end > _MAX_ADDRESS:
        raise ValueError(f"address {run.address:#x} is not one of {num_pages} pages aligned to {UNIT_BYTES}")
    if run.layer_bytes % UNIT_BYTES or run.layer_bytes < num_pages * pages.page_bytes:
        raise ValueError(
            f"slices {run.layer_bytes} bytes apart do not hold {num_pages} pages of {pages.page_bytes} bytes"
        )
