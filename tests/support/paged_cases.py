"""Problems for the copy kernel, and the kernel itself: under Triton's interpreter on a CPU, natively on a GPU.

Both are private copies of pdx.kernels.paged, so that neither depends on who imported it first, and nobody else's
import sees TRITON_INTERPRET.
"""

import functools
import importlib.util
import math
from dataclasses import dataclass
from types import ModuleType

import paged_reference as reference
import pytest
import torch
import triton  # noqa: F401  natively: imported under TRITON_INTERPRET, parts of it could not be imported later
from hypothesis import strategies as st
from torch import Tensor

import pdx
from pdx.kernels.page_map import Batch, PageMap, Place, Run

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32)
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(600),  # every page size is compiled
]
# Where the engine's pages lie, and where the slots.
PLACES = [
    pytest.param(("cpu", "cpu"), id="cpu"),
    pytest.param(("cuda", "cuda"), id="cuda", marks=ON_GPU),
    pytest.param(("cuda", "pinned"), id="cuda-and-host", marks=ON_GPU),
]
# The dimensions as they lie in memory: layers, blocks, heads, tokens, channels.
LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
SCATTERED = "BHNLC"  # nobody registers it: every token of every head is a piece


@functools.cache
def paged(device: str) -> ModuleType:
    """pdx.kernels.paged for tensors on `device`; on a CPU the interpreter runs it."""
    spec = importlib.util.spec_from_file_location(f"paged_on_{device}", f"{pdx.__path__[0]}/kernels/paged.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1" if device == "cpu" else "0")
        spec.loader.exec_module(module)
    return module


@dataclass
class Problem:
    """Random bytes with an engine's blocks in them, random bytes with slots in them, and what to copy."""

    engine: Tensor  # uint8, whatever is in no page is a guard
    slots: Tensor  # uint8, whatever is in no run is a guard
    views: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]  # per layer: how it lies in `engine`
    num_blocks: int
    runs: list[Run]  # with offsets in `slots` for addresses
    which: range  # layers
    where: Place

    @property
    def layers(self) -> list[Tensor]:
        return [self.engine.view(dtype).as_strided(shape, strides, at) for dtype, shape, strides, at in self.views]

    def copy(self, place: tuple[str, str] = ("cpu", "cpu")) -> "Problem":
        device, slots_on = place
        slots = self.slots.pin_memory() if slots_on == "pinned" else self.slots.to(slots_on, copy=True)
        engine = self.engine.to(device, copy=True)
        where = Place.HOST if slots_on == "pinned" else self.where
        return Problem(engine, slots, self.views, self.num_blocks, self.runs, self.which, where)

    def run(self, name: str) -> None:
        """The kernel's `gather` or `scatter`."""
        pages = PageMap.of(self.layers, self.num_blocks)
        batch = Batch.of(pages, [run._replace(address=self.slots.data_ptr() + run.address) for run in self.runs])
        copy = getattr(paged(self.engine.device.type), name)
        copy(pages, batch, self.which.start, len(self.which), place=self.where)

    def run_reference(self, name: str) -> None:
        if name == "gather":
            reference.gather_slices(self.layers, self.num_blocks, self.runs, self.slots, self.which)
        else:
            reference.scatter_slices(self.slots, self.runs, self.layers, self.num_blocks, self.which)

    def is_same(self, other: "Problem") -> bool:
        return torch.equal(self.engine.cpu(), other.engine.cpu()) and torch.equal(self.slots.cpu(), other.slots.cpu())


def random_bytes(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def layer_views(layout, sizes, dtype, *, logical="BHNC", lead=0, gap=0):
    """Each layer as the engine registers it, and the bytes of all; `gap` bytes lie behind each block (BL…: all layers).

    `sizes` says how many of each of L, B, H, N, C; `lead` and `gap` are multiples of 16.
    """
    strides, extent = {}, 1
    for dim in reversed(layout):
        strides[dim] = extent
        if dim == "B":
            strides[dim] = extent = extent + gap // dtype.itemsize
        extent *= sizes[dim]
    shape, inner = tuple(sizes[dim] for dim in logical), tuple(strides[dim] for dim in logical)
    starts = [lead // dtype.itemsize + layer * strides["L"] for layer in range(sizes["L"])]
    return [(dtype, shape, inner, start) for start in starts], lead + extent * dtype.itemsize + 64


@st.composite
def engines(draw, layouts=(*LAYOUTS, SCATTERED), ratios=(1, 1, 2, 3)):
    """(views of the layers, bytes of the engine, blocks, bytes of a page) of any engine that PDX serves."""
    layout, dtype = draw(st.sampled_from(layouts)), draw(st.sampled_from(DTYPES))
    ratio = draw(st.sampled_from(ratios)) if layout not in ("BHLNC", SCATTERED) else 1
    num_blocks = draw(st.integers(1, 7))
    is_mla = draw(st.booleans())
    units = draw(st.integers(1, 6) | st.sampled_from([32, 72, 100, 513]))  # of 16 bytes
    sizes = {
        "L": draw(st.integers(1, 4)),
        "B": num_blocks * ratio,
        "H": 1 if is_mla else draw(st.integers(1, 3)),
        "N": draw(st.integers(1, 4)),
        "C": 16 // dtype.itemsize * units,
    }
    lead, gap = (16 * draw(st.integers(0, 4)) for _ in range(2))
    if ratio > 1 and layout == "LHBNC":
        gap = 0  # a hole in each kernel block of each head: that many distances nobody registers
    logical = draw(st.sampled_from(("BHNC", "BNC"))) if is_mla else draw(st.sampled_from(("BHNC", "BNHC")))
    views, nbytes = layer_views(layout, sizes, dtype, logical=logical, lead=lead, gap=gap)
    page_bytes = ratio * math.prod(sizes[dim] for dim in "HNC") * dtype.itemsize
    return views, nbytes, num_blocks, page_bytes


@st.composite
def problems(draw, layouts=(*LAYOUTS, SCATTERED), ratios=(1, 1, 2, 3)):
    """Some chunks of an engine's blocks, each block at most once, with some pages of some chunks left out."""
    views, nbytes, num_blocks, page_bytes = draw(engines(layouts, ratios))
    block_ids = draw(st.permutations(range(num_blocks)))
    runs, end, taken = [], 16 * draw(st.integers(0, 4)), 0
    while taken < num_blocks:
        chunk_blocks = draw(st.integers(1, num_blocks - taken))
        layer_bytes = chunk_blocks * page_bytes + 16 * draw(st.integers(0, 2))
        cuts = sorted({0, chunk_blocks} | draw(st.sets(st.integers(0, chunk_blocks), max_size=2)))
        runs += [
            Run(block_ids[taken + first : taken + last], end + first * page_bytes, layer_bytes)
            for first, last in zip(cuts, cuts[1:], strict=False)
            if draw(st.sampled_from((True, True, False)))
        ]
        taken += chunk_blocks
        end += len(views) * layer_bytes + 16 * draw(st.integers(0, 2))
    first_layer = draw(st.integers(0, len(views) - 1))
    which = range(first_layer, draw(st.integers(first_layer + 1, len(views))))
    seed, where = draw(st.integers(0, 99)), draw(st.sampled_from(Place))
    engine, slots = random_bytes(nbytes, seed), random_bytes(end + 64, seed + 100)
    return Problem(engine, slots, views, num_blocks, draw(st.permutations(runs)), which, where)
