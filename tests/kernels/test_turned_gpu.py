"""The GPU's kernel that turns keys, under Triton's interpreter or natively, against the CPU's."""

import functools
import importlib.util

import numpy as np
import pytest
import torch
import triton  # noqa: F401  natively: see paged_cases
from paged_cases import ON_GPU, paged

import pdx
from pdx.kernels.page_map import Batch, PageMap, Run
from pdx.kernels.turned import PageElements, Turn, scatter_turned, spans
from pdx.memory.rope import Rope

BLOCK, HEADS, DIM, LAYERS, BLOCKS = 16, 2, 32, 3, 6
ROPES = {
    "halves": Rope(tuple(100.0 ** (-i / 16) for i in range(16))),
    "interleaved": Rope(tuple(100.0 ** (-i / 16) for i in range(16)), interleaved=True),
    "in part": Rope((1.0, 0.1, 0.01, 0.001, 0.0001)),
}
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BHLNC")
# How keys turn, in what order they lie, and bytes of a launch.
CASES = [
    ("halves", "LBHNC", 1 << 30),
    ("interleaved", "LBNHC", 1),
    ("in part", "BLHNC", 20_000),
    ("halves", "BHLNC", 1 << 30),
]
ON = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=ON_GPU)]


@functools.cache
def kernel(device):
    """pdx.kernels.turned_gpu, as `paged_cases.paged`."""
    spec = importlib.util.spec_from_file_location(f"turned_on_{device}", f"{pdx.__path__[0]}/kernels/turned_gpu.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1" if device == "cpu" else "0")
        spec.loader.exec_module(module)
    return module


def cache(order, dtype):
    """Layers [blocks, heads, tokens, 2 * dim] that lie in this order, all zero."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK, "C": 2 * DIM}
    whole = torch.zeros([sizes[each] for each in order], dtype=dtype)
    return list(whole.permute([order.index(each) for each in "LBHNC"]))


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rope", "order", "part_bytes"), CASES)
def test_it_does_what_the_cpu_kernel_does(rope, order, part_bytes, dtype, device):
    module, rope = kernel(device), ROPES[rope]
    layers = [each.to(device) for each in cache(order, dtype)]
    pages = PageMap.of(layers, BLOCKS)
    by_head = order.index("H") < order.index("N")
    head, token = (BLOCK * 2 * DIM, 2 * DIM) if by_head else (2 * DIM, HEADS * 2 * DIM)
    slot = torch.randn(LAYERS, 2, HEADS * BLOCK * 2 * DIM).to(dtype).to(device)  # 2 pages of each layer
    strides = module.PageStrides.of(layers, BLOCKS, HEADS, DIM, dtype)
    assert (strides.head, strides.token) == (head, token)
    blocks, first, target, count, shift = [4, 1, 3], 3, 21, 23, -977
    layer_bytes = slot.stride(0) * slot.element_size()
    runs = [module.TurnedRun(slot.data_ptr(), layer_bytes, first, target, count, blocks)]
    batch = module.TurnedBatch.of(pages, module.TurnedPages(rope, strides, dtype), runs, shift)
    for part, of_layers in batch.parts(range(1, 3), part_bytes):
        module.scatter_turned(pages, part, of_layers.start, len(of_layers))

    each, of_key = np.arange(BLOCK) * token, np.arange(DIM)
    elements = PageElements(HEADS, head, each, of_key, each, of_key + DIM)
    lines = spans(elements, first, target, count, blocks)
    as_numpy = torch.uint16 if dtype is torch.bfloat16 else dtype
    size = HEADS * BLOCK * 2 * DIM
    for layer in range(LAYERS):
        expected = np.zeros((BLOCKS, size), np.uint16 if dtype is torch.bfloat16 else np.float32)
        if layer:
            turn = Turn.of(elements, rope, shift, is_half=dtype is torch.bfloat16)
            scatter_turned(slot[layer][None].cpu().view(as_numpy).numpy(), [expected], lines, turn)
        inner = (0, 1, 2, 3) if by_head else (0, 2, 1, 3)
        found = layers[layer].permute(*inner).contiguous().reshape(BLOCKS, size).cpu()
        wanted = torch.from_numpy(expected).view(dtype)
        # a product and a sum may be rounded together or apart
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_heads_of_a_page_are_taken_as_page_map_takes_them(order):
    """A rank that has more heads than a shard has."""
    module, dtype = kernel("cpu"), torch.float32
    layers = [each.copy_(torch.randn(each.shape)) for each in cache(order, dtype)]
    shard = [each.narrow(1, 1, 1) for each in layers]
    pages = PageMap.of(shard, BLOCKS)
    slot = torch.empty(LAYERS, BLOCK * 2 * DIM)
    paged("cpu").gather(pages, Batch.of(pages, [Run([2], slot.data_ptr(), slot.stride(0) * 4)]), 0, LAYERS)
    turned = module.TurnedPages(ROPES["halves"], module.PageStrides.of(shard, BLOCKS, 1, DIM, dtype), dtype)
    run = module.TurnedRun(slot.data_ptr(), slot.stride(0) * 4, 0, 0, BLOCK, [5])
    wanted = [each.clone() for each in layers]
    for each in wanted:
        each[5, 1] = each[2, 1]
    module.scatter_turned(pages, module.TurnedBatch.of(pages, turned, [run], 0), 0, LAYERS)
    assert all(map(torch.equal, layers, wanted))


def test_what_is_not_there_is_refused():
    module = kernel("cpu")
    layers, dtype = cache("LBHNC", torch.float32), torch.float32
    pages = PageMap.of(layers, BLOCKS)
    strides = module.PageStrides.of(layers, BLOCKS, HEADS, DIM, dtype)
    turned = module.TurnedPages(ROPES["halves"], strides, dtype)
    with pytest.raises(IndexError, match=r"blocks \[6\]"):
        module.TurnedBatch.of(pages, turned, [module.TurnedRun(64, 64, 0, 0, 1, [6])], 1)
    batch = module.TurnedBatch.of(pages, turned, [module.TurnedRun(64, 64, 0, 0, 1, [5])], 1)
    with pytest.raises(IndexError, match="layers 2 to 4"):
        module.scatter_turned(pages, batch, 2, 2)


@pytest.mark.parametrize(
    "layers",
    [
        [torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM)],  # as vLLM had them before 0.29
        [torch.zeros(2 * BLOCKS, HEADS, BLOCK // 2, 2 * DIM)],  # two kernel blocks are a block
        [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM + 2)],
        [torch.zeros(BLOCKS, HEADS, 2 * DIM, BLOCK).transpose(2, 3)],
        [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM), torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2)],
        [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.float16)],
    ],
    ids=lambda layers: " and ".join(str([*each.shape]) for each in layers),
)
def test_orders_that_the_kernel_cannot_take_are_refused_by_name(layers):
    with pytest.raises(ValueError, match="a page order the kernel cannot take"):
        kernel("cpu").PageStrides.of(layers, BLOCKS, HEADS, DIM, torch.float32)
