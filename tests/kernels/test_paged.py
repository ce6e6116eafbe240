"""The copy kernel against its reference and against the CPU's kernels, byte for byte, with all other bytes watched."""

import importlib.util
import mmap
from pathlib import Path

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from paged_cases import LAYOUTS, PLACES, SCATTERED, layer_views, paged, problems, random_bytes

from pdx.kernels.page_map import Batch, PageMap, Place, Run

# What the interpreter of older Tritons does with the bounds of a loop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

GIB = 1 << 30
MAP_NORESERVE = 0x4000  # Linux's; the module has no name for it
on_all_places = pytest.mark.parametrize("place", PLACES)
in_both_directions = pytest.mark.parametrize("name", ["gather", "scatter"])
some = settings(max_examples=examples(60))


def synchronize(place):
    if place[0] == "cuda":
        torch.cuda.synchronize()


@on_all_places
@in_both_directions
@some
@given(problem=problems())
def test_it_is_the_reference_and_touches_nothing_else(place, name, problem):
    actual, expected = problem.copy(place), problem.copy()
    actual.run(name)
    synchronize(place)
    expected.run_reference(name)
    assert actual.is_same(expected)


def test_the_layouts_are_all_that_vllm_has():
    """By its own list, in a module that imports nothing of it."""
    vllm = importlib.util.find_spec("vllm")
    path = Path(vllm.origin).parent / "v1" / "kv_cache_layout.py" if vllm is not None else None
    if path is None or not path.exists():
        pytest.skip("no vLLM that lists its layouts")
    spec = importlib.util.spec_from_file_location("kv_cache_layout_of_vllm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert sorted(LAYOUTS) == sorted(layout.name for layout in module.KVCacheLayout)


@pytest.mark.parametrize("layout", [*LAYOUTS, SCATTERED])
def test_a_page_is_in_address_order_in_every_layout(layout):
    """Every byte of the engine tells where it lies, so a slot shows in which order it was filled."""
    sizes = {"L": 2, "B": 3, "H": 2, "N": 2, "C": 4}
    views, _ = layer_views(layout, sizes, torch.float32)
    numbers = torch.arange(2 * 3 * 2 * 2 * 4, dtype=torch.int32).view(torch.uint8)
    layers = [numbers.view(torch.int32).as_strided(shape, strides, at) for _, shape, strides, at in views]
    for copy in (numbers.new_zeros(2 * 2 * 64), numbers.new_full((2 * 2 * 64,), 255)):
        pages = PageMap.of(layers, 3)
        paged("cpu").gather(pages, Batch.of(pages, [Run([2, 1], copy.data_ptr(), 128)]), 0, 2)
        got = copy.view(torch.int32).view(2, 2, 16).tolist()
        for layer in range(2):
            for place, block in enumerate((2, 1)):
                assert got[layer][place] == sorted(layers[layer][block].flatten().tolist())


def test_more_than_32_bits_of_everything():
    """Pages, blocks, layers and slices further apart than 2, 4 and 8 GiB; nearly nothing of it is ever touched."""
    sparse = mmap.mmap(-1, 40 * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    try:
        memory = torch.frombuffer(sparse, dtype=torch.uint8)
        strides = (5 * GIB, 3 * GIB, 1)  # block, head, byte
        layers = [memory.as_strided((3, 2, 64), strides, layer * 256) for layer in range(2)]
        pages = PageMap.of([view.unflatten(2, (2, 32)) for view in layers], 3)
        for layer in range(2):
            for block in range(3):
                layers[layer][block] = random_bytes(128, layer * 3 + block).view(2, 64)
        slot = memory.data_ptr() + 20 * GIB
        batch = Batch.of(pages, [Run([2, 0], slot, 9 * GIB)])
        paged("cpu").gather(pages, batch, 0, 2)
        for layer in range(2):
            at = 20 * GIB + layer * 9 * GIB
            assert torch.equal(memory[at : at + 128].view(2, 64), layers[layer][2])
            assert torch.equal(memory[at + 128 : at + 256].view(2, 64), layers[layer][0])
            layers[layer][0] = 0
        paged("cpu").scatter(pages, batch, 0, 2)
        assert torch.equal(memory[29 * GIB + 128 : 29 * GIB + 256].view(2, 64), layers[1][0])
        assert layers[1][0].any()
    finally:
        del memory, layers, pages, batch
        sparse.close()


@on_all_places
def test_a_page_of_many_tiles_and_pages_of_which_many_make_one_tile(place):
    """Sizes at the borders of what a tile holds: 16 bytes to 1 MiB, most no power of two."""
    device = place[0]
    for page_bytes in (16, 528, 8192, 8208, 65_552):
        num_blocks = 600 if page_bytes < 64 else 2
        engine = random_bytes(page_bytes * num_blocks, page_bytes).to(device)
        slot = torch.zeros_like(engine)
        pages = PageMap.of([engine.view(num_blocks, -1)], num_blocks)
        block_ids = list(reversed(range(num_blocks)))
        batch = Batch.of(pages, [Run(block_ids, slot.data_ptr(), len(slot))])
        for place in Place:
            slot.zero_()
            paged(device).gather(pages, batch, place=place)
            assert torch.equal(slot.view(num_blocks, -1), engine.view(num_blocks, -1).flip(0))


# ---- what is refused ------------------------------------------------------------------------


def view(dtype, shape, strides, at=0):
    return torch.zeros(1 << 16, dtype=torch.uint8).view(dtype).as_strided(shape, strides, at)


@pytest.mark.parametrize(
    ("layers", "num_blocks", "complaint"),
    [
        ([], 4, "no layers"),
        ([torch.zeros(4, 16), torch.zeros(4, 32)], 4, "differ"),
        ([torch.zeros(4, 16)], 3, "no pages of 3 blocks"),
        ([torch.zeros(4, 16)], 0, "no pages of 0 blocks"),
        ([torch.zeros(4, 0)], 4, "no pages"),
        ([torch.zeros(64)], 4, "no pages"),
        ([view(torch.uint8, (4, 24), (24, 1))], 4, "divisible by 16"),
        ([view(torch.uint8, (4, 32), (40, 1))], 4, "divisible by 16"),
        ([view(torch.uint8, (4, 32), (32, 1), 8)], 4, "divisible by 16"),
        ([view(torch.uint8, (4, 2, 32), (128, 40, 1))], 4, "divisible by 16"),
        ([view(torch.uint8, (4, 32), (64, 2))], 4, "divisible by 16"),
        ([view(torch.uint8, (4, 2, 2, 16), (512, 128, 32, 1))], 4, r"one distance: shape \(4, 2, 2, 16\)"),
        ([torch.zeros(4, 1, 16).expand(4, 3, 16)], 4, r"one distance.*strides \(16, 0, 1\)"),
        ([torch.zeros(1, 16).expand(4, 16)], 4, "overlap"),
        ([view(torch.uint8, (4, 32), (16, 1))], 4, "overlap"),
        ([view(torch.uint8, (4, 2, 32), (32, 96, 1))], 4, "overlap"),  # pieces of 3 blocks fit between, not of 4
        ([torch.zeros(4, 16), torch.zeros(4, 16, device="meta")], 4, "several devices: .'cpu', 'meta'."),
    ],
)
def test_pages_that_are_not_equal_pieces_are_refused(layers, num_blocks, complaint):
    with pytest.raises(ValueError, match=complaint):
        PageMap.of(layers, num_blocks)


def test_pieces_of_all_blocks_fit_exactly_between_a_blocks_pieces():
    assert PageMap.of([view(torch.uint8, (4, 2, 32), (32, 128, 1))], 4).pieces == 2


@pytest.fixture
def pages():
    """Two layers of 4 blocks of 32 bytes."""
    return PageMap.of([random_bytes(128, 1).view(4, 32), random_bytes(128, 2).view(4, 32)], 4)


@pytest.mark.parametrize(("block_ids", "bad"), [([0, 4], "4"), ([-1, 2], "-1"), ([2**70, 0], str(2**70))])
def test_a_bad_block_id_is_named(pages, block_ids, bad):
    with pytest.raises(IndexError, match=f"block id {bad} is outside the 4 blocks"):
        Batch.of(pages, [Run([1], 64, 64), Run(block_ids, 64, 64)])


@pytest.mark.parametrize(
    "run",
    [
        Run([0], 0, 32),
        Run([0], -16, 32),
        Run([0], 8, 32),
        Run([0], 1 << 62, 32),
        Run([0], 16, 40),
        Run([0], 16, 16),  # the next layer's slice would begin in the page
        Run([0, 1], 16, 48),
        Run([0], 16, -32),
        Run([0], 16, 1 << 62),
    ],
)
def test_a_bad_address_is_refused(pages, run):
    with pytest.raises(ValueError, match="address|bytes apart"):
        Batch.of(pages, [run])


@in_both_directions
def test_layers_that_there_are_not_and_batches_of_others_are_refused(pages, name):
    copy = getattr(paged("cpu"), name)
    batch = Batch.of(pages, [Run([0], 1 << 40, 32)])  # nothing is there: a launch would crash
    for first, num in ((0, 3), (2, 1), (-1, 1), (0, -1)):
        with pytest.raises(IndexError, match=f"layers {first} to {first + num} of 2"):
            copy(pages, batch, first, num)
    with pytest.raises(ValueError, match="other pages"):
        copy(PageMap.of(pages.layers, 4), batch)


@in_both_directions
def test_nothing_to_copy_launches_nothing(pages, name, monkeypatch):
    kernel = paged("cpu")
    monkeypatch.setattr(kernel, "_copy_tiles", None)
    for runs in ([], [Run([], 0, 0)]):
        batch = Batch.of(pages, runs)
        assert batch.num_pages == 0
        getattr(kernel, name)(pages, batch, 0, 2)
    getattr(kernel, name)(pages, Batch.of(pages, [Run([0], 64, 64)]), 1, 0)


# ---- around the kernel ----------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 8 * 64, 21 * 64, 1 << 20])
def test_parts_of_a_batch_are_the_whole_and_no_larger_than_asked_for(nbytes):
    """Each page of each layer once; every table is aligned as the compiled kernel expects."""
    layers = [torch.zeros(9, 64, dtype=torch.uint8) for _ in range(3)]
    pages = PageMap.of(layers, 9)
    batch = Batch.of(pages, [Run([3, 1, 8, 0, 5], 1 << 20, 5 * 64), Run([], 16, 0), Run([7, 2], 1 << 21, 2 * 64)])
    seen = []
    for part, which in batch.parts(range(1, 3), nbytes):
        assert part.pages is pages
        assert part.num_pages * 64 * len(which) <= max(nbytes, 2 * 64)
        assert part.table.data_ptr() % 16 == batch.table.data_ptr() % 16
        seen += [(layer, row) for layer in which for row in map(tuple, part.table.tolist())]
    assert sorted(seen) == sorted((layer, row) for layer in (1, 2) for row in map(tuple, batch.table.tolist()))
