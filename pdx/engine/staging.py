"""Staging of pages for host memory: a kernel gathers them into memory of the GPU, and the copy engine moves slices on.

So no kernel writes over PCIe: as soon as the gather has ended, the pages are free and the multiprocessors are the
engine's again, while whole slices cross at the speed of the link (docs/adr/0033).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from pdx.engine.streams import Stream, StreamEvent, Streams
from pdx.kernels.page_map import UNIT_BYTES, Batch, PageMap, Place, Run

STAGING_BYTES = 128 << 20  # a launch takes at most half of it, as much as `gpu_copier.LAUNCH_BYTES`
MAX_UNDER_WAY = 64  # launches whose copies may be in flight


class Staged(NamedTuple):
    """Pages of which one layer fits into half of the ring. A layer's runs are contiguous there."""

    batch: Batch  # as if layer 0 lay at the beginning of the ring
    runs: Sequence[Run]  # with addresses in host memory
    layer_bytes: int


class Staging:
    """A ring buffer in the GPU's memory: a kernel fills one part while the copy engine drains those before it.

    Only the engine's thread uses it. It must live until `stream` has done everything that is queued there.
    """

    def __init__(self, pages: Sequence[PageMap], streams: Streams) -> None:
        """`pages`: all that may be staged. :raises RuntimeError: the GPU has no room for the ring."""
        self._streams = streams
        largest = max(each.page_bytes for each in pages)
        self._half_bytes = max(STAGING_BYTES // 2 // UNIT_BYTES * UNIT_BYTES, largest)
        self._memory = torch.empty(2 * self._half_bytes, dtype=torch.uint8, device=pages[0].device)
        self.stream: Stream = streams.new_stream()  # the copy engine's
        self._gathered: StreamEvent = streams.event()
        # Parts of the ring in use, the oldest first: start, end, and the event after which the copy engine is done.
        self._taken: deque[tuple[int, int, StreamEvent]] = deque()
        self._at = 0  # behind the last part taken

    def stage(self, pages: PageMap, runs: Iterable[Run]) -> list[Staged]:
        """Prepare to gather these runs of `pages`, with addresses in host memory, on torch's current stream. Raises
        what `Batch.of` raises, and RuntimeError if the GPU has no room for the tables."""
        most_pages = self._half_bytes // pages.page_bytes
        staged: list[Staged] = []
        group: list[Run] = []
        num_pages = 0
        for run in runs:
            first = 0
            while first < len(run.block_ids):
                count = min(most_pages - num_pages, len(run.block_ids) - first)
                address = run.address + first * pages.page_bytes
                group.append(Run(run.block_ids[first : first + count], address, run.layer_bytes))
                first, num_pages = first + count, num_pages + count
                if num_pages == most_pages:
                    staged.append(self._staged(pages, group, num_pages))
                    group, num_pages = [], 0
        if group:
            staged.append(self._staged(pages, group, num_pages))
        return staged

    def _staged(self, pages: PageMap, runs: list[Run], num_pages: int) -> Staged:
        layer_bytes = num_pages * pages.page_bytes
        block_ids = [block_id for run in runs for block_id in run.block_ids]
        batch = Batch.of(pages, [Run(block_ids, self._memory.data_ptr(), layer_bytes)])
        return Staged(batch, runs, layer_bytes)

    def gather(self, gathering: Stream, kernel: Callable[..., None], staged: Sequence[Staged], layers: range) -> None:
        """Queue these layers: `kernel` on the stream `gathering`, then the copies to host memory. Raises what the
        kernel raises, and GpuError if the driver refuses a copy."""
        for each in staged:
            at_once = max(1, self._half_bytes // each.layer_bytes)
            for first in range(layers.start, layers.stop, at_once):
                self._gather(gathering, kernel, each, range(first, min(first + at_once, layers.stop)))

    def _gather(self, gathering: Stream, kernel: Callable[..., None], staged: Staged, layers: range) -> None:
        nbytes = staged.layer_bytes * len(layers)
        start = self._room(nbytes, gathering)
        with self._streams.on(gathering):
            batch = staged.batch.shifted(start - layers.start * staged.layer_bytes)
        self._streams.launch(gathering, kernel, batch.pages, batch, layers.start, len(layers), place=Place.HERE)
        self._gathered.record(gathering)
        self._gathered.wait(self.stream)
        source = self._memory.data_ptr() + start
        copies: list[tuple[int, int, int]] = []
        for layer in layers:
            for run in staged.runs:
                size = len(run.block_ids) * batch.pages.page_bytes
                copies.append((run.address + layer * run.layer_bytes, source, size))
                source += size
        self._streams.copy(self.stream, copies)
        emptied = self._streams.event()
        emptied.record(self.stream)
        self._taken.append((start, start + nbytes, emptied))

    def _room(self, nbytes: int, gathering: Stream) -> int:
        """Take the next part of the ring; what is queued on `gathering` from now on starts when the part is drained."""
        start = self._at if self._at + nbytes <= 2 * self._half_bytes else 0
        end, passed = start + nbytes, len(self._taken) - MAX_UNDER_WAY + 1
        for number, (taken, taken_end, _) in enumerate(self._taken, 1):
            if taken < end and start < taken_end:
                passed = max(passed, number)
        if passed > 0:  # the copy engine works in order: waiting for one part waits for all before it
            self._taken[passed - 1][2].wait(gathering)
            for _ in range(passed):
                self._taken.popleft()
        self._at = end
        return start
