"""What cache groups vLLM makes of each family of models: facts that PDX's own groups rest on."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from families import FAMILIES, ONLY_GROUPS, WINDOW, Group
from forge import Forge, StartFailed

from pdx.engine.gpu_copier import page_map

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm.v1.kv_cache_interface import KVCacheLayout, MambaSpec
    from vllm.v1.worker.utils import allocate_kv_cache

pytestmark = pytest.mark.long  # vLLM is imported for it
ALL = {**FAMILIES, **ONLY_GROUPS}


@pytest.fixture(scope="module")
def groups_of(forge: Forge) -> Any:
    """`forge.groups_of`, asked once for each family."""
    return cache(forge.groups_of)


@pytest.mark.parametrize("family", ALL)
def test_vllm_makes_these_groups(groups_of: Any, family: str) -> None:
    assert [Group.of(group) for group in groups_of(family).kv_cache_groups] == list(ALL[family].groups)


@pytest.mark.parametrize("family", ALL)
def test_all_groups_share_one_buffer_block_by_block(groups_of: Any, family: str) -> None:
    """A block id is of one group at a time: the pages of all groups begin at the same places."""
    config = groups_of(family)
    tensors = config.kv_cache_tensors
    assert len({(tensor.offset, tensor.block_stride) for tensor in tensors}) == 1
    assert sorted(name for tensor in tensors for name in tensor.layers) == sorted(
        name for group in config.kv_cache_groups for name in group.layer_names
    )
    assert len({group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups}) == 1


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
@pytest.mark.parametrize("family", ALL)
def test_the_pages_of_each_group_are_such_as_the_kernels_of_a_gpu_copy(
    groups_of: Any, family: str, layout: str
) -> None:
    """vLLM lays them out alike on all devices, block by block where groups share it."""
    config = groups_of(family)
    tensors = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        nbytes = getattr(spec, "real_page_size_bytes", spec.page_size_bytes)
        assert page_map([tensors[name] for name in group.layer_names], config.num_blocks, nbytes).page_bytes == nbytes


def test_blocks_of_groups_may_differ_and_hashes_are_of_the_shorter(groups_of: Any) -> None:
    config = groups_of("gemma4")
    assert {group.kv_cache_spec.block_size for group in config.kv_cache_groups} == {32, 64}
    assert config.hash_block_size == 32
    assert config.cache_hit_alignment_tokens == 64


def test_a_window_is_as_long_as_the_spec_says_not_the_models_configuration(groups_of: Any) -> None:
    windows = {Group.of(group).reach for group in groups_of("cohere2").kv_cache_groups}
    assert windows == {WINDOW + 1, 0}


def test_layers_that_read_anothers_cache_have_none(groups_of: Any) -> None:
    config = groups_of("gemma3n")
    assert sum(len(group.layer_names) for group in config.kv_cache_groups) == 6
    assert ONLY_GROUPS["gemma3n"].config["num_hidden_layers"] == 10


@pytest.mark.parametrize("family", [name for name in ALL if any(g.spec == "MambaSpec" for g in ALL[name].groups)])
def test_a_state_is_padded_to_the_page_of_attention(groups_of: Any, family: str) -> None:
    config = groups_of(family)
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    assert states
    for spec in states:
        held = sum(_bytes(shape, dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        assert held <= spec.page_size_bytes
        if len(specs) > len(states):
            assert spec.page_size_padded == spec.page_size_bytes


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def test_without_the_hybrid_manager_windows_are_full_and_states_are_refused(forge: Forge) -> None:
    config = forge.groups_of("gptoss", disable_hybrid_kv_cache_manager=True)
    assert [Group.of(group)[:3] for group in config.kv_cache_groups] == [("FullAttentionSpec", 6, 32)]
    with pytest.raises(StartFailed, match="Failed to promote local KV cache specs"):
        forge.groups_of("granite", disable_hybrid_kv_cache_manager=True)
