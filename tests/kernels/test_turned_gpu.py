"""The GPU's kernel that turns keys, under Triton's interpreter or natively, against the CPU's."""

import functools
import importlib.util

import numpy as np
import pytest
import torch
import triton  # noqa: F401  natively: see paged_cases
from paged_cases import ON_GPU

import pdx
from pdx.kernels.page_map import PageMap
from pdx.kernels.turned import PageElements, Turn, scatter_turned, spans
from pdx.memory.rope import Rope

BLOCK, HEADS, DIM, LAYERS, BLOCKS = 16, 2, 32, 3, 6
ROPES = {
    "halves": Rope(tuple(100.0 ** (-i / 16) for i in range(16))),
    "interleaved": Rope(tuple(100.0 ** (-i / 16) for i in range(16)), interleaved=True),
    "in part": Rope((1.0, 0.1, 0.01, 0.001, 0.0001)),
}
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BHLNC")
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
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_it_does_what_the_cpu_kernel_does(rope, order, dtype, device):
    module = kernel(device)
    layers = [each.to(device) for each in cache(order, dtype)]
    pages = PageMap.of(layers, BLOCKS)
    by_head = order.index("H") < order.index("N")
    head, token = (BLOCK * 2 * DIM, 2 * DIM) if by_head else (2 * DIM, HEADS * 2 * DIM)
    slot = torch.randn(LAYERS, 2, HEADS * BLOCK * 2 * DIM).to(dtype).to(device)  # 2 pages of each layer
    strides = module.PageStrides(HEADS, DIM, head, token, DIM, engine_head=layers[0].stride(1))
    blocks, first, target, count, shift = [4, 1, 3], 3, 21, 23, -977
    layer_bytes = slot.stride(0) * slot.element_size()
    runs = [(slot.data_ptr(), layer_bytes, first, target, count, blocks)]
    tokens = module.token_table(pages, runs, block_tokens=BLOCK)
    angles = module.angle_table(rope, shift, layers[0].device)
    module.scatter_turned(pages, tokens, angles, strides, rope, dtype, 1, 2)

    each, of_key = np.arange(BLOCK) * token, np.arange(DIM)
    elements = PageElements(HEADS, head, each, of_key, each, of_key + DIM)
    lines = spans(elements, first, target, count, blocks)
    as_numpy = torch.uint16 if dtype is torch.bfloat16 else dtype
    size = HEADS * BLOCK * 2 * DIM
    for layer in range(LAYERS):
        expected = np.zeros((BLOCKS, size), np.uint16 if dtype is torch.bfloat16 else np.float32)
        if layer:
            scatter_turned(slot[layer].cpu().view(as_numpy).numpy(), expected, lines, elements, Turn.of(rope, shift))
        inner = (0, 1, 2, 3) if by_head else (0, 2, 1, 3)
        found = layers[layer].permute(*inner).contiguous().reshape(BLOCKS, size).cpu()
        wanted = torch.from_numpy(expected).view(dtype)
        # a product and a sum may be rounded together or apart
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_blocks_and_layers_that_are_not_there_are_refused():
    module = kernel("cpu")
    pages = PageMap.of(cache("LBHNC", torch.float32), BLOCKS)
    with pytest.raises(IndexError, match="block id 6"):
        module.token_table(pages, [(64, 64, 0, 0, 1, [6])], block_tokens=BLOCK)
    rope = ROPES["halves"]
    tokens = module.token_table(pages, [(64, 64, 0, 0, 1, [5])], block_tokens=BLOCK)
    strides = module.PageStrides(HEADS, DIM, 1, 1, 1, 1)
    angles = module.angle_table(rope, 1, torch.device("cpu"))
    with pytest.raises(IndexError, match="layers 2 to 4"):
        module.scatter_turned(pages, tokens, angles, strides, rope, torch.float32, 2, 2)
