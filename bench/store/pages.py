"""Gather and scatter of KV pages against a plain copy of the same bytes: `python -m pdx.bench.store.pages`.

128 MiB of pages in anonymous memory, as an engine has them, and 128 MiB of arena in /dev/shm. A ratio of 1
means as fast as a plain copy. The last line is JSON.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy
import torch
from torch import Tensor

from pdx.bench.harness.report import Figure, at_least, publish, show_rows
from pdx.bench.harness.timing import Timing, measure
from pdx.kernels.page_rows import page_rows
from pdx.kernels.pages import PageCopy, gather, scatter
from pdx.memory.arena import populate_in_background

TOTAL_BYTES = 128 << 20
PAGE_KIB = (16, 32, 64, 128)
RUN_BLOCKS = 8  # consecutive block ids in the allocation-like order
REPEATS = 11
GOAL = 0.8


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case; rates are of bytes copied, once counted."""

    operation: str
    page_kib: int
    order: str
    threads: int
    memcpy_gb_s: float
    gb_s: float
    ratio: float


def shared_memory(nbytes: int) -> Tensor:
    """`nbytes` of /dev/shm like the arena's, as uint8; they go with the tensor, no file stays."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


def block_order(order: str, num_blocks: int) -> Tensor:
    """All block ids: shuffled one by one ("random"), or as shuffled runs ("runs") like a young block pool's."""
    run = {"random": 1, "runs": RUN_BLOCKS}[order]
    starts = list(range(0, num_blocks, run))
    random.Random(0).shuffle(starts)
    return torch.tensor([block for start in starts for block in range(start, start + run)])


def plain_copy(source: Tensor, target: Tensor) -> Callable[[], object]:
    """libc's memcpy on one thread; torch's parallel copy on more."""
    if torch.get_num_threads() > 1:
        return lambda: target.copy_(source)
    return lambda: numpy.copyto(target.numpy(), source.numpy())


def cases(cache: Tensor, arena: Tensor) -> Iterator[Row]:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for page_kib in PAGE_KIB:
            num_blocks = TOTAL_BYTES // (page_kib << 10)
            pages, slot = (page_rows(memory.view(num_blocks, -1)) for memory in (cache, arena))
            for order in ("random", "runs"):
                block_ids = block_order(order, num_blocks)
                copies = [PageCopy(slot, block_ids, pages)]
                for operation, call, copy in (
                    ("gather", lambda c=copies: gather(c), plain_copy(cache, arena)),
                    ("scatter", lambda c=copies: scatter(c), plain_copy(arena, cache)),
                ):
                    timings = measure({"memcpy": copy, operation: call}, reference="memcpy", repeats=REPEATS)
                    yield row(operation, page_kib, order, threads, timings)


def row(operation: str, page_kib: int, order: str, threads: int, timings: dict[str, Timing]) -> Row:
    memcpy_gb_s, gb_s = (timings[name].rate(TOTAL_BYTES / 1e9) for name in ("memcpy", operation))
    ratio = timings[operation].ratio
    return Row(operation, page_kib, order, threads, round(memcpy_gb_s, 2), round(gb_s, 2), round(ratio, 3))


def figures(rows: list[Row]) -> list[Figure]:
    """The slowest case of each operation, on one thread and on two."""
    found = []
    for operation, threads in itertools.product(("gather", "scatter"), (1, 2)):
        cases = [row for row in rows if (row.operation, row.threads) == (operation, threads)]
        slowest = min(cases, key=lambda row: row.ratio)
        note = f"{slowest.page_kib} KiB pages, {slowest.order}: {slowest.gb_s} GB/s"
        name = f"{operation}, {threads} thread{'s' * (threads > 1)}, slowest of {len(cases)}: share of memcpy's rate"
        found.append(at_least(name, slowest.ratio, "", GOAL, note))
    return found


def main() -> None:
    cache = torch.full((TOTAL_BYTES,), 1, dtype=torch.uint8)
    arena = shared_memory(TOTAL_BYTES).fill_(2)
    rows = list(cases(cache, arena))
    show_rows(rows, f"KV pages against a plain copy, {TOTAL_BYTES >> 20} MiB each, median of {REPEATS}")
    title = "gather and scatter of KV pages of 16 to 128 KiB"
    publish("pages", title, figures(rows), {"rows": [asdict(row) for row in rows]})


COPIES = 5  # in one go, of memory that has just been in use
CALM_S = 1.5  # engines poll for a second after their last step, and would share the core with the copy


class Memcpy:
    """Copies from shared to anonymous memory, all of it touched before, on one core and while the engines sleep.

    `targets`: that many of them take turns, so that each lies idle meanwhile.
    """

    def __init__(self, nbytes: int, core: int, *, targets: int = 1) -> None:
        self._source = shared_memory(nbytes).fill_(1).numpy()
        self._targets = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(targets)]
        for target in self._targets:
            populate_in_background(target.data_ptr(), nbytes, target).join()
            target.fill_(2)
        self._core = core

    def times_ms(self, nbytes: int | None = None) -> tuple[float, list[float]]:
        """A copy to the target that has lain idle longest, then more to the same one; `nbytes`: of only so many."""
        self._targets.append(self._targets.pop(0))
        time.sleep(CALM_S)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        try:
            return self._once_ms(nbytes), [self._once_ms(nbytes) for _ in range(COPIES)]
        finally:
            os.sched_setaffinity(0, cores)

    def _once_ms(self, nbytes: int | None) -> float:
        target, source = self._targets[-1].numpy()[:nbytes], self._source[:nbytes]
        start_at = time.perf_counter()
        numpy.copyto(target, source)
        return (time.perf_counter() - start_at) * 1e3


if __name__ == "__main__":
    main()
