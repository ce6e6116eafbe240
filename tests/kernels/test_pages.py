"""Gather and scatter against the reference, byte for byte, with everything around the rows watched."""

import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise

import paged_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdx.kernels import pages, streaming
from pdx.kernels.page_rows import page_rows


def gather(blocks, block_ids, out):
    pages.gather([pages.PageCopy(out, block_ids, blocks)])


def scatter(rows, block_ids, blocks):
    pages.scatter([pages.PageCopy(rows, block_ids, blocks)])


@pytest.fixture(autouse=True, params=[1, 2], ids=["streaming", "torch"])
def threads(request):
    """Both ways of copying: on one thread PDX's own, on several torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class Memory:
    """Random bytes with blocks in them; whatever is not in a block is a sentinel."""

    raw: Tensor  # uint8
    blocks: Tensor  # [num_blocks, ...] of some dtype

    def copy(self) -> "Memory":
        raw = self.raw.clone()
        blocks = raw.view(self.blocks.dtype).as_strided(
            self.blocks.shape, self.blocks.stride(), self.blocks.storage_offset()
        )
        return Memory(raw, blocks)


def memory(shape, dtype, *, lead=0, gap=0, order=None, seed=0) -> Memory:
    """Blocks of `shape` with `gap` bytes between pages, the first at byte `lead`, inner dims in `order`."""
    itemsize = dtype.itemsize
    strides, page = [0] * len(shape), 1
    for dim in reversed(order or range(1, len(shape))):
        strides[dim] = page
        page *= shape[dim]
    row_bytes = page * itemsize + gap
    strides[0] = row_bytes // itemsize
    nbytes = lead + shape[0] * row_bytes + 64
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Memory(raw, raw.view(dtype).as_strided(shape, strides, lead // itemsize))


@st.composite
def problems(draw):
    """(the engine's blocks, a slot with room for the drawn ids, the ids without duplicates)."""
    dtype = draw(st.sampled_from(DTYPES))
    num_blocks = draw(st.integers(1, 9))
    heads, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dim = 16 // dtype.itemsize * draw(st.integers(1, 5))
    shape = (num_blocks, heads, tokens, dim)  # [blocks, heads, tokens, dim], LBHNC's B H N C
    order = draw(st.permutations((1, 2, 3)))
    ids = draw(st.permutations(range(num_blocks)))[: draw(st.integers(0, num_blocks))]
    multiples = st.integers(0, 4).map(lambda n: 16 * n)
    engine = memory(shape, dtype, lead=draw(multiples), gap=draw(multiples), order=order, seed=1)
    slot = memory((len(ids), *shape[1:]), dtype, lead=draw(multiples), order=order, seed=2)
    return engine, slot, torch.tensor(ids, dtype=torch.int64)


@pytest.mark.parametrize("operation", [gather, scatter])
@given(problem=problems())
def test_it_is_the_reference_and_touches_nothing_else(operation, problem):
    engine, slot, block_ids = problem
    wanted, kept = engine.copy(), slot.copy()
    if operation is gather:
        reference.gather(wanted.blocks, block_ids, kept.blocks)
        gather(page_rows(engine.blocks), block_ids, page_rows(slot.blocks))
    else:
        reference.scatter(kept.blocks, block_ids, wanted.blocks)
        scatter(page_rows(slot.blocks), block_ids, page_rows(engine.blocks))
    assert torch.equal(engine.raw, wanted.raw)
    assert torch.equal(slot.raw, kept.raw)


@pytest.mark.parametrize("page_bytes", [16, 64, 112, 4096, 16384 - 16, 16384 + 16, 53328, 65536 + 64])
@pytest.mark.parametrize(("lead", "gap"), [(0, 0), (16, 32), (48, 0)])
def test_pages_of_any_size_at_any_address(page_bytes, lead, gap):
    """Whatever part of a page is a span, a line or less than one, and wherever it begins."""
    engine = memory((5, page_bytes), torch.uint8, lead=lead, gap=gap, seed=1)
    slot = memory((3, page_bytes), torch.uint8, lead=32, seed=2)
    ids = torch.tensor([4, 0, 3])
    expected = engine.copy()
    reference.scatter(slot.blocks, ids, expected.blocks)
    scatter(page_rows(slot.blocks), ids, page_rows(engine.blocks))
    assert torch.equal(engine.raw, expected.raw)
    back = memory((3, page_bytes), torch.uint8, lead=lead, seed=3)
    around = back.copy()
    around.blocks.copy_(slot.blocks)
    gather(page_rows(engine.blocks), ids, page_rows(back.blocks))
    assert torch.equal(back.raw, around.raw)


def test_streams_copy_every_line_once_and_keep_out_of_each_others_cache_sets():
    """Else stores push lines out that were prefetched and not read yet, and copies take five times as long."""
    line, stream_bytes = streaming.LINE_BYTES, streaming.STREAM_BYTES
    steps = range(0, stream_bytes, line)
    offsets = [[streaming.offset_in_stream(step, stream) for step in steps] for stream in range(8)]
    assert all(sorted(each) == list(steps) for each in offsets)
    for at_once in zip(*offsets, strict=True):
        sets = sorted(offset // line for offset in at_once)
        around = [*sets, sets[0] + stream_bytes // line]
        assert min(after - before for before, after in pairwise(around)) >= 2


def several():
    """Three copies of different sizes, from three engines' layers, one of them of no page."""
    sizes = [(64, [3, 1]), (160, []), (16448, [0, 2, 1])]
    engines = [memory((4, nbytes), torch.uint8, seed=index) for index, (nbytes, _) in enumerate(sizes)]
    slots = [memory((len(ids), nbytes), torch.uint8, seed=9 + index) for index, (nbytes, ids) in enumerate(sizes)]
    copies = [
        pages.PageCopy(page_rows(slot.blocks), torch.tensor(ids, dtype=torch.int64), page_rows(engine.blocks))
        for slot, engine, (_, ids) in zip(slots, engines, sizes, strict=True)
    ]
    return engines, slots, copies


def test_several_copies_in_one_call():
    engines, slots, copies = several()
    expected = [engine.copy() for engine in engines]
    for engine, slot, copy in zip(expected, slots, copies, strict=True):
        reference.scatter(slot.blocks, copy.block_ids, engine.blocks)
    pages.scatter(copies)
    assert all(torch.equal(engine.raw, wanted.raw) for engine, wanted in zip(engines, expected, strict=True))
    wanted = [slot.copy() for slot in slots]
    for slot in slots:
        slot.blocks.zero_()
    pages.gather(copies)
    assert all(torch.equal(slot.raw, before.raw) for slot, before in zip(slots, wanted, strict=True))


@pytest.mark.parametrize("operation", [pages.gather, pages.scatter])
def test_a_bad_block_id_in_any_of_several_copies_copies_nothing(operation):
    engines, slots, copies = several()
    before = [each.raw.clone() for each in (*engines, *slots)]
    copies[2] = copies[2]._replace(block_ids=torch.tensor([0, 2, 7]), pages=copies[2].pages[:3])
    with pytest.raises(IndexError, match="block id 7 is outside the 3 pages"):
        operation(copies)
    assert all(torch.equal(each.raw, was) for each, was in zip((*engines, *slots), before, strict=True))


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (memory((4, 2, 16), torch.float16).blocks[:, :, :8], "not contiguous"),
        (memory((4, 4, 16), torch.float16).blocks[:, ::2], "not contiguous"),
        (torch.zeros(4, 1, 16).expand(4, 3, 16), "not contiguous"),
        (memory((4, 24), torch.uint8).blocks, "24 bytes are not divisible"),
        (memory((4, 0), torch.uint8).blocks, "0 bytes are not divisible"),
        (memory((4, 32), torch.uint8, gap=8).blocks, "40 bytes apart"),
        (memory((1, 32), torch.uint8).blocks.expand(4, 32), "0 bytes apart"),
        (memory((4, 32), torch.uint8, lead=8, gap=16).blocks, "not aligned"),
        (torch.frombuffer(bytearray(80), dtype=torch.uint8, offset=8)[:64].view(2, 32), "not aligned"),
        (torch.zeros(64), "shape"),
    ],
)
def test_page_rows_refuses_what_is_not_rows_of_whole_aligned_pages(tensor, complaint):
    with pytest.raises(ValueError, match=complaint):
        page_rows(tensor)


@pytest.mark.parametrize(
    ("rows", "ids"),
    [
        ((3, 32), torch.tensor([0, 1])),  # more rows than ids
        ((2, 48), torch.tensor([0, 1])),  # another page size
        ((2, 32), torch.tensor([0, 1], dtype=torch.int32)),
        ((2, 32), torch.tensor([[0, 1]])),
    ],
)
def test_what_does_not_fit_together_is_refused(rows, ids):
    engine, slot = (page_rows(memory(shape, torch.uint8).blocks) for shape in ((4, 32), rows))
    with pytest.raises(ValueError, match="block ids must be|do not fit"):
        gather(engine, ids, slot)
    with pytest.raises(ValueError, match="block ids must be|do not fit"):
        scatter(slot, ids, engine)


@pytest.fixture
def large():
    """64 MiB of rows, a slot of as many, and all the ids."""
    engine, slot = (page_rows(torch.ones(1024, 64 << 10, dtype=torch.uint8)) for _ in range(2))
    return engine, torch.arange(1024).flip(0), slot


@pytest.mark.parametrize("operation", [gather, scatter])
def test_the_gil_is_free_during_the_copy(large, operation):
    ticks, done = [0], threading.Event()

    def tick():
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0)  # lets go of the GIL, and gets it back only if the copy has let go of it

    def ticks_during_one_copy():
        before = ticks[0]
        operation(*large)
        return ticks[0] - before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that nobody takes the GIL from the copying thread by force
    thread = threading.Thread(target=tick)
    try:
        thread.start()
        # Checking the ids frees the GIL for a moment: 1 or 2 ticks. A free copy of 64 MiB lets some 100 pass, unless
        # the other thread has no core just then.
        assert any(ticks_during_one_copy() > 5 for _ in range(1000))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("operation", [gather, scatter])
def test_no_temporary_of_the_datas_size(large, operation):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        operation(*large)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < 1 << 20


@pytest.mark.parametrize("number", [0, 1, 2], ids=["rows", "block ids", "pages"])
def test_what_has_holes_or_lies_elsewhere_is_refused(number):
    """Their addresses would be trusted."""
    whole = [page_rows(torch.zeros(4, 64, dtype=torch.uint8)) for _ in range(2)]
    wide = page_rows(torch.zeros(4, 128, dtype=torch.uint8))
    holes = [wide[:, ::2], torch.arange(8)[::2], wide[:, ::2]]
    for bad, complaint in ((holes[number], "without holes"), (holes[number].to("meta"), "memory of the CPU")):
        copy = [whole[0], torch.arange(4), whole[1]]
        copy[number] = bad
        for operation in (pages.gather, pages.scatter):
            with pytest.raises(ValueError, match=complaint):
                operation([pages.PageCopy(*copy)])
