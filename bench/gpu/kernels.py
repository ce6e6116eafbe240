"""Gather and scatter of KV pages on the GPU, and between the GPU and page-locked host memory.

`kernels`: pages to contiguous slices and back within the GPU, against one device-to-device copy of the same bytes.
`pinned`: the same to and from memory that is mapped and page-locked as a host arena is, against one copy of a large
pinned buffer. All pages of a case are moved by one launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from pdx.bench.gpu.bed import REAL, TOY, Bed, Findings
from pdx.bench.harness.report import Figure, at_least, plain
from pdx.bench.harness.timing import Timing, measure
from pdx.errors import GpuError

KIB = 1 << 10
MIB = 1 << 20
IN_ORDER, SHUFFLED = "in order", "shuffled"
GATHER, SCATTER, COPY = "gather", "scatter", "copy"
WARMUPS = 3
GOAL, LARGE_GOAL, PINNED_GOAL, PINNED_GB_S = 0.8, 0.9, 0.9, 50.0
LARGE_BYTES = MIB  # LARGE_GOAL holds for slices of contiguous blocks from this size on
LOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. Every case moves `total_bytes`."""

    total_bytes: int
    pages: Sequence[int]
    slices: Sequence[int]
    layers: int
    repeats: int


KERNEL_SIZES = {
    REAL: Sizes(512 * MIB, (16 * KIB, 32 * KIB, 64 * KIB), (256 * KIB, MIB, 4 * MIB), 4, 21),
    TOY: Sizes(32 * KIB, (KIB,), (4 * KIB, 8 * KIB), 2, 2),
}
PINNED_SIZES = {
    REAL: Sizes(512 * MIB, (16 * KIB, 32 * KIB, 64 * KIB), (MIB,), 4, 21),
    TOY: Sizes(32 * KIB, (KIB,), (4 * KIB,), 2, 2),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One case. `on_host`: the slices lie in page-locked host memory."""

    page_bytes: int
    slice_bytes: int
    order: str
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case: rates in GB/s, as its section counts them."""

    operation: str
    page_bytes: int
    slice_bytes: int
    order: str
    gb_s: float
    reference_gb_s: float
    ratio: float

    @property
    def case(self) -> str:
        return f"pages of {self.page_bytes // KIB} KB, slices of {self.slice_bytes // KIB} KB, {self.order}"


class Case:
    """The pages of some layers, half of which are moved, and the slices to which they belong."""

    def __init__(self, pool: Tensor, slices: Tensor, sizes: Sizes, kind: Kind) -> None:
        from pdx.kernels.paged import Batch, PageMap, Place, Run

        page_bytes, slice_bytes = kind.page_bytes, kind.slice_bytes
        num_blocks = pool.numel() // sizes.layers // page_bytes
        count = sizes.total_bytes // sizes.layers // page_bytes
        self._layers = list(pool.view(sizes.layers, num_blocks, page_bytes))
        if kind.order == IN_ORDER:
            self._ids = torch.arange(count)
        else:
            self._ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))[:count]
        self._shape = (-1, sizes.layers, slice_bytes // page_bytes, page_bytes)
        self._pages = PageMap.of(self._layers, num_blocks)
        per_slice, chunk_bytes = slice_bytes // page_bytes, slice_bytes * sizes.layers
        ids = self._ids.tolist()
        runs = [
            Run(ids[first : first + per_slice], slices.data_ptr() + chunk * chunk_bytes, slice_bytes)
            for chunk, first in enumerate(range(0, count, per_slice))
        ]
        self._batch = Batch.of(self._pages, runs)
        self._num_layers = sizes.layers
        self._slices = slices
        self._place = Place.HOST if kind.on_host else Place.HERE

    def gather(self) -> None:
        from pdx.kernels.paged import gather

        gather(self._pages, self._batch, 0, self._num_layers, place=self._place)

    def scatter(self) -> None:
        from pdx.kernels.paged import scatter

        scatter(self._pages, self._batch, 0, self._num_layers, place=self._place)

    def check(self, wait: Callable[[], None]) -> None:
        """Check that gather fills the slices and scatter restores the pages. :raises RuntimeError: the bytes differ."""
        from pdx.kernels.paged import scatter

        self._slices.zero_()
        wait()  # accesses by the host and by the stream are not ordered
        self.gather()
        wait()
        found = self._slices.view(self._shape)
        ids = self._ids.to(self._layers[0].device)
        for layer, pages in enumerate(self._layers):
            expected = pages[ids]
            if not torch.equal(found[:, layer].reshape(expected.shape).to(expected.device), expected):
                raise RuntimeError(f"layer {layer} was not gathered right")
            pages[ids] = 0
            scatter(self._pages, self._batch, layer, 1, place=self._place)
            wait()
            if not torch.equal(pages[ids], expected):
                raise RuntimeError(f"layer {layer} was not scattered right")


def kernels(bed: Bed) -> Findings:
    """The section `kernels`; rates count bytes read and bytes written."""
    sizes = KERNEL_SIZES[bed.name]
    pool = bed.noise(2 * sizes.total_bytes, 1)
    slices, other = bed.zeros(sizes.total_bytes), bed.zeros(sizes.total_bytes)
    rows: list[Row] = []
    for page_bytes, slice_bytes, order in itertools.product(sizes.pages, sizes.slices, (IN_ORDER, SHUFFLED)):
        kind = Kind(page_bytes, slice_bytes, order)
        case = Case(pool, slices, sizes, kind)
        case.check(bed.wait)
        calls = {COPY: lambda: other.copy_(slices), GATHER: case.gather, SCATTER: case.scatter}
        timings = measure(calls, reference=COPY, repeats=sizes.repeats, warmups=WARMUPS, clock=bed.clock)
        rows += [_row(timings, name, kind, 2 * sizes.total_bytes) for name in (GATHER, SCATTER)]
    title = f"gather and scatter within the GPU, {sizes.total_bytes / MIB:g} MiB, median of {sizes.repeats}"
    return Findings(title, kernel_figures(rows), {"rows": [asdict(row) for row in rows]})


def _row(timings: Mapping[str, Timing], operation: str, kind: Kind, nbytes: int) -> Row:
    ours, copy = (round(timings[name].rate(nbytes / 1e9), 2) for name in (operation, COPY))
    ratio = round(timings[operation].ratio, 4)
    return Row(operation, kind.page_bytes, kind.slice_bytes, kind.order, ours, copy, ratio)


def kernel_figures(rows: Sequence[Row]) -> list[Figure]:
    """The slowest case of each operation and page size, and of large slices of contiguous blocks."""
    found = []
    for operation in (GATHER, SCATTER):
        own = [row for row in rows if row.operation == operation]
        for page_bytes in dict.fromkeys(row.page_bytes for row in own):
            cases = [row for row in own if row.page_bytes == page_bytes]
            name = f"{operation}, pages of {page_bytes // KIB} KB, slowest of {len(cases)}: share of a device copy"
            found.append(_slowest(name, cases, GOAL))
        large = [row for row in own if row.order == IN_ORDER and row.slice_bytes >= LARGE_BYTES]
        if large:
            name = f"{operation}, slices of 1 MB and more, contiguous, slowest of {len(large)}: share of a device copy"
            found.append(_slowest(name, large, LARGE_GOAL))
    found.append(plain("device copy, read and written", max(row.reference_gb_s for row in rows), "GB/s"))
    return found


def _slowest(name: str, cases: Sequence[Row], goal: float) -> Figure:
    slowest = min(cases, key=lambda row: row.ratio)
    note = f"{slowest.case}: {slowest.gb_s:.0f} of {slowest.reference_gb_s:.0f} GB/s"
    return at_least(name, slowest.ratio, "", goal, note)


# ---- page-locked host memory ----------------------------------------------------------------


@contextlib.contextmanager
def locked_memory(bed: Bed, nbytes: int) -> Iterator[Tensor]:
    """Bytes of shared memory, page-locked as a host arena is. :raises GpuError: the driver does not lock it in time."""
    from pdx.cuda.page_lock import PageLock

    fd = os.memfd_create("pdx-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    anchor = (ctypes.c_char * nbytes).from_buffer(mapping)
    refused: list[str] = []
    lock = PageLock(ctypes.addressof(anchor), nbytes, bed.gpu, anchor=anchor, on_refused=refused.append)
    try:
        deadline = time.monotonic() + LOCK_S
        while not lock.covers(0, nbytes):
            if refused or time.monotonic() > deadline:
                raise GpuError(refused[0] if refused else f"{nbytes} bytes were not page-locked within {LOCK_S} s")
            time.sleep(0.001)
        yield torch.frombuffer(anchor, dtype=torch.uint8)
        bed.wait()
    finally:
        lock.close()


def pinned(bed: Bed) -> Findings:
    """The section `pinned`; rates count each byte once."""
    sizes = PINNED_SIZES[bed.name]
    title = f"GPU pages to page-locked host memory and back, {sizes.total_bytes / MIB:g} MiB, median of {sizes.repeats}"
    pool = bed.noise(2 * sizes.total_bytes, 1)
    large, on_gpu = bed.pinned(sizes.total_bytes), bed.zeros(sizes.total_bytes)
    rows: list[Row] = []
    with locked_memory(bed, sizes.total_bytes) as slices:
        copies: dict[str, Callable[[], object]] = {
            GATHER: lambda: large.copy_(on_gpu, non_blocking=True),
            SCATTER: lambda: on_gpu.copy_(large, non_blocking=True),
        }
        for page_bytes, slice_bytes in itertools.product(sizes.pages, sizes.slices):
            kind = Kind(page_bytes, slice_bytes, SHUFFLED, on_host=True)
            case = Case(pool, slices, sizes, kind)
            case.check(bed.wait)
            for operation, call in ((GATHER, case.gather), (SCATTER, case.scatter)):
                calls = {COPY: copies[operation], operation: call}
                timings = measure(calls, reference=COPY, repeats=sizes.repeats, warmups=WARMUPS, clock=bed.clock)
                rows.append(_row(timings, operation, kind, sizes.total_bytes))
    return Findings(title, pinned_figures(rows), {"rows": [asdict(row) for row in rows]})


def pinned_figures(rows: Sequence[Row]) -> list[Figure]:
    """The slowest case of each direction, against the reference and in GB/s."""
    found = []
    for operation, way in ((GATHER, "pages to host"), (SCATTER, "host to pages")):
        own = [row for row in rows if row.operation == operation]
        name = f"{way}, slowest of {len(own)}: share of one large pinned copy"
        found.append(_slowest(name, own, PINNED_GOAL))
        slowest = min(own, key=lambda row: row.gb_s)
        found.append(at_least(f"{way}, slowest of {len(own)}", slowest.gb_s, "GB/s", PINNED_GB_S, slowest.case))
    return found
