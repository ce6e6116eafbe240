"""How a vLLM engine's keys turn with their positions and where they lie in its pages, as needed to load tokens at other
positions (ADR 80)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pdx.engine.turning import Turning
from pdx.errors import LayoutError
from pdx.kernels.turned import PageElements
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.memory.rope import rope_of

if TYPE_CHECKING:
    from pdx.kernels.turned_gpu import TurnedPages

_CPU = "CPU_ATTN"
# Since vLLM 0.29, a page of these backends has for each head and token the key, then the value.
_GPU = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BASE, _DIGITS = 200, 4  # whole numbers below 257 are exact in bfloat16


def turning_of(
    vllm_config: Any, groups: CacheGroups, backend: str, layers: Sequence[torch.Tensor], num_blocks: int
) -> Turning | TurnedPages:
    """For an engine whose `layers` have this attention `backend`: Turning on a CPU, TurnedPages on a GPU.

    :raises LayoutError: the keys of this engine cannot be turned; it says why.
    """
    if not groups.is_single:
        raise LayoutError("it is for models of one cache group of full attention")
    model, layout = vllm_config.model_config, groups[0]
    config = (getattr(model, "hf_text_config", None) or model.hf_config).to_dict()
    if backend not in _GPU:
        return turning_in(layout, backend, config)
    from pdx.kernels.turned_gpu import PageStrides, TurnedPages  # needs Triton

    if sorted(layout.order) != sorted("LBHNC"):
        raise LayoutError(f"keys in pages of the order {layout.order!r:.60} are not turned")
    dtype = _dtype(layout)
    try:
        strides = PageStrides.of(layers, num_blocks, layout.num_heads, layout.head_dim, dtype)
    except ValueError as error:
        raise LayoutError(str(error)) from error
    return TurnedPages(rope_of(config, layout.head_dim), strides, dtype)


def turning_in(layout: KvLayout, backend: str, config: Mapping[str, Any]) -> Turning:
    """For a CPU engine, whose model has this Hugging Face configuration. :raises LayoutError: see `turning_of`."""
    if backend != _CPU:
        raise LayoutError(f"keys in pages of the backend {backend!r:.60} are not turned yet")
    dtype = _dtype(layout)
    return Turning(rope_of(config, layout.head_dim), cpu_elements(layout, dtype), dtype)


def _dtype(layout: KvLayout) -> torch.dtype:
    said, _, kept_as = layout.dtype.removeprefix("torch.").partition(" as ")
    if said not in _DTYPES or kept_as not in ("", "auto", said):
        raise LayoutError(f"keys of type {layout.dtype!r:.60} are not turned: float32 and bfloat16 are")
    return _DTYPES[said]


def cpu_elements(layout: KvLayout, dtype: torch.dtype) -> PageElements:
    """Where vLLM's own operator puts each element of keys and values in a page, found by storing numbered elements.

    :raises LayoutError: an element's place is not the sum of an offset for its token and one for its dimension.
    """
    from vllm import _custom_ops as ops

    block, heads, dim = layout.block_tokens, layout.num_heads, layout.head_dim
    numbers = torch.arange(2 * heads * block * dim).view(heads, 2, block, dim)
    found, scale = torch.zeros(numbers.numel(), dtype=torch.int64), 1
    for _ in range(_DIGITS):
        digits = (numbers // scale % _BASE).to(dtype)
        page = torch.full((1, heads, block, 2 * dim), float(_BASE), dtype=dtype)  # no digit
        keys, values = page.view(1, heads, 2 * block, dim).chunk(2, dim=2)
        of_tokens = [digits[:, part].transpose(0, 1).contiguous() for part in range(2)]
        ops.cpu_attn_reshape_and_cache(*of_tokens, keys, values, torch.arange(block), layout.isa)
        found += page.flatten().to(torch.int64) * scale
        scale *= _BASE
    lies = torch.full((numbers.numel(),), -1, dtype=torch.int64)
    if ((found >= 0) & (found < len(lies))).all():
        lies[found] = torch.arange(len(lies))
    places = lies.view(heads, 2, block, dim)
    head = 2 * block * dim
    by_head = torch.arange(heads).view(-1, 1, 1, 1) * head
    keys, values = places[0]
    is_apart = bool((places >= 0).all()) and bool((places == places[0] + by_head).all())
    for of_head in (keys, values):
        is_apart = is_apart and bool((of_head == of_head[:, :1] + of_head[:1] - of_head[:1, :1]).all())
    if not is_apart:
        raise LayoutError(f"a page order the kernel cannot take apart (packed for {layout.isa!r:.40})")
    tables = [(of_head[:, 0], of_head[0] - of_head[0, 0]) for of_head in (keys, values)]
    return PageElements(heads, head, *(each.contiguous().numpy() for pair in tables for each in pair))
