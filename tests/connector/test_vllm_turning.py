"""Where vLLM's CPU backend puts keys and values, by its own operator."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from pdx.engine.plan import MovedTokens
from pdx.errors import LayoutError
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.memory.rope import Rope

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from pdx.engine.turning import Turning
    from pdx.kernels.page_rows import page_rows
    from pdx.vllm.turning import cpu_elements, turning_of

BLOCK, HEADS = 128, 3


def layout_of(dtype: torch.dtype, dim: int, block: int = BLOCK) -> KvLayout:
    isa = _get_attn_isa(dtype, block, dim, "auto")
    fields = {
        "model": "m", "dtype": f"{dtype} as auto", "num_layers": 1, "num_heads": HEADS, "head_dim": dim,
        "block_tokens": block, "page_bytes": HEADS * 2 * block * dim * dtype.itemsize, "chunk_tokens": 2 * block,
        "order": "LBHNC", "backend": "CPU_ATTN", "isa": isa, "num_shards": 1, "hashing": "sha256",
    }  # fmt: skip
    return KvLayout(**fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("block", [32, 48, 128])
def test_elements_are_where_vllm_puts_them(dtype: torch.dtype, dim: int, block: int) -> None:
    layout = layout_of(dtype, dim, block)
    elements = cpu_elements(layout, dtype)
    drawn = torch.randn(2, block, HEADS, dim).to(dtype)
    page = torch.zeros(1, HEADS, block, 2 * dim, dtype=dtype)
    ops.cpu_attn_reshape_and_cache(
        *drawn, *page.view(1, HEADS, 2 * block, dim).chunk(2, dim=2), torch.arange(block), layout.isa
    )
    flat = page.flatten()
    tables = (elements.key_tokens, elements.key_elements), (elements.value_tokens, elements.value_elements)
    for (tokens, places), wanted in zip(tables, drawn, strict=True):
        for head in range(HEADS):
            at = torch.from_numpy(head * elements.head + tokens[:, None] + places[None, :])
            assert torch.equal(flat[at], wanted[:, head])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_vllms_pages_are_loaded_into_others(dtype: torch.dtype) -> None:
    """At their own positions, so that each bit is known."""
    layout = layout_of(dtype, 64)
    turning = Turning(Rope((1.0, 0.1)), cpu_elements(layout, dtype), dtype)
    drawn = torch.randn(2, 2 * BLOCK, HEADS, 64).to(dtype)
    source, target = (torch.zeros(count, HEADS, BLOCK, 128, dtype=dtype) for count in (2, 3))
    expected = torch.zeros_like(target)

    def put(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        caches = pages.view(len(pages), HEADS, 2 * BLOCK, 64).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys.contiguous(), values.contiguous(), *caches, slots, layout.isa)

    put(*drawn, source, torch.arange(2 * BLOCK))
    first, count, at = 37, 170, 55  # of blocks 2 and 0
    slots = torch.arange(at, at + count)
    put(*drawn[:, first : first + count], expected, torch.where(slots < BLOCK, slots + 2 * BLOCK, slots - BLOCK))
    old, new = (turning.pages(page_rows(each)) for each in (source, target))
    turning.scatter(old[None], [new], turning.lines(MovedTokens(first, at, count, 0), [2, 0]), 0)
    assert torch.equal(target, expected)


def test_an_order_that_is_not_by_token_and_element_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(
        keys: torch.Tensor, values: torch.Tensor, to_keys: torch.Tensor, to_values: torch.Tensor, *_: Any
    ) -> None:
        order = torch.randperm(keys.numel(), generator=torch.Generator().manual_seed(0))
        for of_head, to in ((keys, to_keys), (values, to_values)):
            to.copy_(of_head.flatten()[order].view(HEADS, BLOCK, 64).unsqueeze(0))

    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", mixed)
    with pytest.raises(LayoutError, match="take apart"):
        cpu_elements(layout_of(torch.float32, 64), torch.float32)


@pytest.mark.parametrize(
    ("changes", "backend", "model_type", "text"),
    [
        ({}, "CPU_ATTN", "gpt2", "'gpt2'"),
        ({}, "ROCM_AITER_FA", "llama", "ROCM_AITER_FA"),
        ({"order": "NHD"}, "FLASH_ATTN", "llama", "'NHD'"),
        ({}, "FLASH_ATTN", "llama", "a page order the kernel cannot take"),
        ({}, "FLASH_ATTN", "gpt2", "'gpt2'"),
        ({"dtype": "torch.bfloat16 as fp8_e4m3"}, "CPU_ATTN", "llama", "fp8_e4m3"),
        ({"dtype": "torch.float16 as auto"}, "CPU_ATTN", "llama", "float16"),
        ({"kind": "window", "window": 64}, "CPU_ATTN", "llama", "one cache group of full attention"),
    ],
)
def test_what_cannot_be_turned_is_refused_by_name(
    changes: dict[str, Any], backend: str, model_type: str, text: str
) -> None:
    groups = CacheGroups.of(msgspec.structs.replace(layout_of(torch.float32, 64), **changes))
    config = SimpleNamespace(to_dict=lambda: {"model_type": model_type, "rope_theta": 1e4})
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))
    layers = [torch.zeros(3, HEADS, BLOCK, 64 if "page order" in text else 128)]
    with pytest.raises(LayoutError, match=text):
        turning_of(vllm_config, groups, backend, layers, 3)


@pytest.mark.parametrize(("order", "inner"), [("LBHNC", (0, 1, 2, 3)), ("LBNHC", (0, 2, 1, 3))])
def test_pages_on_a_gpu_are_as_their_tensors_lie(order: str, inner: tuple[int, ...]) -> None:
    """For each head and token a key and then a value, as vLLM's own backends split them."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert KVCacheLayout[order].layer_view_order == tuple(inner.index(axis) for axis in range(4))
    groups = CacheGroups.of(msgspec.structs.replace(layout_of(torch.bfloat16, 64, 16), order=order))
    config = SimpleNamespace(to_dict=lambda: {"model_type": "llama", "rope_theta": 1e4})
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))
    shape = [(3, HEADS, 16, 128)[axis] for axis in inner]
    layers = [torch.zeros(shape, dtype=torch.bfloat16).permute(*inner) for _ in range(2)]
    found = turning_of(vllm_config, groups, "FLASH_ATTN", layers, 3)
    assert found.dtype is torch.bfloat16
    by_head = 16 * 128, 128
    assert found.strides[3:] == (by_head * 2 if order == "LBHNC" else (128, HEADS * 128) * 2)
