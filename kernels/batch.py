"""Which pages are copied between the engine's layers and contiguous slices, as a table that the copy kernel reads."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from pdx.kernels.page_map import UNIT_BYTES, PageMap

_MAX_ADDRESS = 1 << 62


class Place(Enum):
    """In what memory the places of a batch lie, as seen by the GPU that copies."""

    HERE = "its own"
    PEER = "another GPU's, mapped"
    HOST = "page-locked host memory"


class Run(NamedTuple):
    """Pages whose places in the slices follow each other, in every layer.

    Page i of layer l lies at `address` + l * `layer_bytes` + i * page_bytes. The address is one that the kernel can
    reach: device memory, a peer's mapped memory or page-locked host memory. Whether the slot reaches that far is for
    the caller to check; nothing here knows where a slot ends.
    """

    block_ids: Sequence[int]
    address: int  # of the first page's place in layer 0, whichever layers are copied
    layer_bytes: int  # from a layer's slice to the next one's


@dataclass(frozen=True, eq=False)
class Batch:
    """The pages of any number of runs. Used on the stream it was made on, where it may be dropped after a launch."""

    pages: PageMap
    num_pages: int
    # int64 [num_pages, 3] on the device: block id, address of its place in layer 0, layer_bytes
    table: Tensor = field(repr=False)

    @classmethod
    def of(cls, pages: PageMap, runs: Sequence[Run]) -> Batch:
        """Check the runs and upload them in one copy on torch's current stream, without waiting for it.

        :raises IndexError: a block id is outside the engine's blocks; it is named.
        :raises ValueError: an address or a distance is not divisible by 16, out of range, or too small for its pages.
        """
        for run in runs:
            _check(run, pages)
        block_ids, places, distances = array("q"), array("q"), array("q")
        for run in runs:
            num_pages = len(run.block_ids)
            block_ids.extend(run.block_ids)
            places.extend(range(run.address, run.address + num_pages * pages.page_bytes, pages.page_bytes))
            distances.extend([run.layer_bytes] * num_pages)
        num_pages = len(block_ids)
        # torch keeps page-locked memory from being used again until the copies from it have ended.
        rows = torch.empty((num_pages, 3), dtype=torch.int64, pin_memory=pages.device.type == "cuda")
        if num_pages:
            columns = torch.frombuffer(block_ids + places + distances, dtype=torch.int64)
            rows.copy_(columns.view(3, num_pages).T)
        return cls(pages, num_pages, rows.to(pages.device, non_blocking=True))

    def shifted(self, nbytes: int) -> Batch:
        """The same pages, with places that lie so much further on. On torch's current stream, as `of`."""
        table = self.table.clone()
        table[:, 1] += nbytes
        return Batch(self.pages, self.num_pages, table)

    def parts(self, layers: range, nbytes: int) -> Iterator[tuple[Batch, range]]:
        """The same copies in parts of at most `nbytes` bytes; the least is two pages of one layer.

        A part's table is a part of this one's, so the parts are used on the same stream.
        """
        # An even number of rows of 24 bytes: every part's table is aligned to 16, as the compiled kernel expects.
        most_pages = max(2, nbytes // self.pages.page_bytes // 2 * 2)
        most_layers = max(1, nbytes // max(1, self.num_pages * self.pages.page_bytes))
        for first in range(0, self.num_pages, most_pages):
            part = self
            if self.num_pages > most_pages:
                rows = self.table[first : first + most_pages]
                part = Batch(self.pages, len(rows), rows)
            for layer in range(layers.start, layers.stop, most_layers):
                yield part, range(layer, min(layer + most_layers, layers.stop))


def _check(run: Run, pages: PageMap) -> None:
    if not run.block_ids:
        return
    for bad in (min(run.block_ids), max(run.block_ids)):
        if not 0 <= bad < pages.num_blocks:
            raise IndexError(f"block id {bad} is outside the {pages.num_blocks} blocks")
    end = run.address + pages.num_layers * run.layer_bytes
    if run.address <= 0 or run.address % UNIT_BYTES or end > _MAX_ADDRESS:
        raise ValueError(f"address {run.address:#x} is not one of {len(run.block_ids)} pages aligned to {UNIT_BYTES}")
    if run.layer_bytes % UNIT_BYTES or run.layer_bytes < len(run.block_ids) * pages.page_bytes:
        raise ValueError(
            f"slices {run.layer_bytes} bytes apart do not hold {len(run.block_ids)} pages of {pages.page_bytes} bytes"
        )
