"""Measures gather and scatter of KV pages against a plain copy: `python -m pdx.bench.store.pages`.

128 MiB of pages in anonymous memory, as in an engine, and 128 MiB of arena in /dev/shm. The arena starts on a page
boundary of memory. The engine's pages start on one or, as torch allocates them, 64 bytes after it, since the speed of a
copy may depend on that alignment. A ratio of 1 means as fast as a plain copy of the same bytes. The last line is JSON.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import numpy
import torch
from torch import Tensor

from pdx.bench.harness.report import Figure, at_least, publish, show_rows
from pdx.bench.harness.timing import measure
from pdx.kernels.page_rows import page_rows
from pdx.kernels.pages import PageCopy, gather, scatter
from pdx.kernels.turned import PageElements, Turn, scatter_turned, spans
from pdx.memory.arena import populate_in_background
from pdx.memory.rope import Rope

TOTAL_BYTES = 128 << 20
PAGE_KIB = (16, 32, 64, 128)
OFFSETS = (0, 64)  # bytes from a page boundary of memory to the engine's pages
MEMORY_PAGE_BYTES = 4096
RUN_BLOCKS = 8  # consecutive block ids in the allocation-like order
REPEATS = 11
GOALS = {1: 0.95, 2: 0.8}  # by number of threads; with two, the plain copy is torch's
SHARDS = 2  # per page, for engines of another tensor parallel size
CUT_GOAL = 1 / 1.3  # of the rate of whole pages
TURNED_GOAL = 0.7
TURNED_HEAD, TURNED_TOKENS = 64, 128  # elements of a key, tokens of a page


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case. Rates count each copied byte once."""

    operation: str
    page_kib: int
    order: str
    offset: int
    threads: int
    memcpy_gb_s: float
    gb_s: float
    ratio: float


def shared_memory(nbytes: int) -> Tensor:
    """`nbytes` of /dev/shm like the arena's, as uint8; freed with the tensor, no file remains."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


def block_order(order: str, num_blocks: int) -> Tensor:
    """All block ids, shuffled one by one ("random") or in runs ("runs"), like those of a young block pool."""
    run = {"random": 1, "runs": RUN_BLOCKS}[order]
    starts = list(range(0, num_blocks, run))
    random.Random(0).shuffle(starts)
    return torch.tensor([block for start in starts for block in range(start, start + run)])


def plain_copy(source: Tensor, target: Tensor) -> Callable[[], object]:
    """libc's memcpy on one thread; torch's parallel copy on more."""
    if torch.get_num_threads() > 1:
        return lambda: target.copy_(source)
    return lambda: numpy.copyto(target.numpy(), source.numpy())


def cache_memory(nbytes: int, offset: int) -> Tensor:
    """`nbytes` of anonymous memory, touched, that start `offset` bytes after a page boundary of memory."""
    room = torch.full((nbytes + 2 * MEMORY_PAGE_BYTES,), 1, dtype=torch.uint8)
    start = -room.data_ptr() % MEMORY_PAGE_BYTES + offset
    return room[start : start + nbytes]


def cases(caches: Mapping[int, Tensor], arena: Tensor) -> Iterator[Row]:
    """`caches`: an engine's memory by its offset."""
    for threads, page_kib, order in itertools.product((1, 2), PAGE_KIB, ("random", "runs")):
        torch.set_num_threads(threads)
        num_blocks = TOTAL_BYTES // (page_kib << 10)
        block_ids = block_order(order, num_blocks)
        for offset, cache in caches.items():
            pages, slot = (page_rows(memory.view(num_blocks, -1)) for memory in (cache, arena))
            copies = [PageCopy(slot, block_ids, pages)]
            for operation, call, copy in (
                ("gather", lambda c=copies: gather(c), plain_copy(cache, arena)),
                ("scatter", lambda c=copies: scatter(c), plain_copy(arena, cache)),
            ):
                timings = measure({"memcpy": copy, operation: call}, reference="memcpy", repeats=REPEATS)
                memcpy_gb_s, gb_s = (round(timings[name].rate(TOTAL_BYTES / 1e9), 2) for name in ("memcpy", operation))
                ratio = round(timings[operation].ratio, 3)
                yield Row(operation, page_kib, order, offset, threads, memcpy_gb_s, gb_s, ratio)


def cut_figures(cache: Tensor, arena: Tensor) -> Iterator[Figure]:
    """Pages with a slot per shard, against whole pages, on one thread."""
    torch.set_num_threads(1)
    for page_kib in PAGE_KIB[1:]:
        num_blocks = TOTAL_BYTES // (page_kib << 10)
        block_ids = block_order("random", num_blocks)
        whole = [PageCopy(page_rows(arena.view(num_blocks, -1)), block_ids, page_rows(cache.view(num_blocks, -1)))]
        shards, parts = arena.view(SHARDS, num_blocks, -1), cache.view(num_blocks, SHARDS, -1)
        cut = [PageCopy(page_rows(shards[at]), block_ids, page_rows(parts[:, at])) for at in range(SHARDS)]
        for name, copy in (("gather", gather), ("scatter", scatter)):
            calls = {"whole": partial(copy, whole), "cut": partial(copy, cut)}
            timing = measure(calls, reference="whole", repeats=REPEATS)["cut"]
            title = f"{name}, {page_kib} KiB pages in {SHARDS} shards: share of the rate of whole pages"
            yield at_least(title, timing.ratio, "", CUT_GOAL)


def turned_figures(cache: Tensor, arena: Tensor) -> Iterator[Figure]:
    """Scatter of keys turned to other positions, against plain scatter, on one thread. The moved run starts within a
    page of the arena, as most do. Pages are as vLLM packs them on CPUs with vector units, or token by token.
    """
    torch.set_num_threads(1)
    rope = Rope(tuple(1e5 ** (-2 * pair / TURNED_HEAD) for pair in range(TURNED_HEAD // 2)))
    tokens, ids = numpy.arange(TURNED_TOKENS), numpy.arange(TURNED_HEAD)
    head = 2 * TURNED_TOKENS * TURNED_HEAD
    packed = (tokens // 32 * 32 * TURNED_HEAD + tokens % 32, ids * 32, (TURNED_TOKENS + tokens) * TURNED_HEAD, ids)
    by_token = (tokens * 2 * TURNED_HEAD, ids, tokens * 2 * TURNED_HEAD, ids + TURNED_HEAD)
    for dtype, (kind, tables) in itertools.product(("float32", "uint16"), (("packed", packed), ("by token", by_token))):
        elements = PageElements(8, head, *tables)
        turn = Turn.of(elements, rope, -1234, is_half=dtype == "uint16")
        size = 8 * head * numpy.dtype(dtype).itemsize
        num_blocks = TOTAL_BYTES // size
        block_ids = block_order("random", num_blocks)
        old, new = (memory.numpy().view(dtype).reshape(num_blocks, -1) for memory in (arena, cache))
        lines = spans(elements, 37, 0, (num_blocks - 1) * TURNED_TOKENS, block_ids.tolist())
        whole = [PageCopy(page_rows(arena.view(num_blocks, -1)), block_ids, page_rows(cache.view(num_blocks, -1)))]
        calls = {
            "plain": partial(scatter, whole),
            "turned": partial(scatter_turned, old[None], [new], lines, turn),
        }
        timing = measure(calls, reference="plain", repeats=REPEATS)["turned"]
        name = "bfloat16" if dtype == "uint16" else dtype
        title = f"scatter, turned, {name} {kind}: share of the rate of a plain scatter"
        yield at_least(title, timing.ratio, "", TURNED_GOAL)


def figures(rows: list[Row]) -> list[Figure]:
    """The slowest case of each operation, on one thread and on two."""
    found = []
    for operation, threads in itertools.product(("gather", "scatter"), (1, 2)):
        cases = [row for row in rows if (row.operation, row.threads) == (operation, threads)]
        slowest = min(cases, key=lambda row: row.ratio)
        note = f"{slowest.page_kib} KiB pages, {slowest.order}, at {slowest.offset}: {slowest.gb_s} GB/s"
        name = f"{operation}, {threads} thread{'s' * (threads > 1)}, slowest of {len(cases)}: share of memcpy's rate"
        found.append(at_least(name, slowest.ratio, "", GOALS[threads], note))
    return found


def main() -> None:
    caches = {offset: cache_memory(TOTAL_BYTES, offset) for offset in OFFSETS}
    rows = list(cases(caches, shared_memory(TOTAL_BYTES).fill_(2)))
    show_rows(rows, f"KV pages against a plain copy, {TOTAL_BYTES >> 20} MiB each, median of {REPEATS}")
    title = "gather and scatter of KV pages of 16 to 128 KiB"
    arena = shared_memory(TOTAL_BYTES).fill_(2)
    others = [*cut_figures(caches[0], arena), *turned_figures(caches[0], arena)]
    publish("pages", title, [*figures(rows), *others], {"rows": [asdict(row) for row in rows]})


COPIES = 5  # in a row, of memory just used
CALM_S = 1.5  # engines poll for a second after their last step, and would share the core with the copy


class Memcpy:
    """Copies from shared to anonymous memory, all of it touched before, on one core and while the engines sleep."""

    def __init__(self, nbytes: int, core: int) -> None:
        self._source = shared_memory(nbytes).fill_(1).numpy()
        target = torch.empty(nbytes, dtype=torch.uint8)
        populate_in_background(target.data_ptr(), nbytes, target).join()
        self._target = target.fill_(2).numpy()
        self._core = core

    def median_ms(self, nbytes: int) -> float:
        """Median time to copy `nbytes`, without the first copy, before which the target has lain idle."""
        time.sleep(CALM_S)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        try:
            return statistics.median([self._once_ms(nbytes) for _ in range(1 + COPIES)][1:])
        finally:
            os.sched_setaffinity(0, cores)

    def _once_ms(self, nbytes: int) -> float:
        start_at = time.perf_counter()
        numpy.copyto(self._target[:nbytes], self._source[:nbytes])
        return (time.perf_counter() - start_at) * 1e3


if __name__ == "__main__":
    main()
