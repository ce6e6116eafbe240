"""The layout of an engine's KV cache: what it follows from, how ranks cut it, what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdx.errors import ConfigError, LayoutError
from pdx.memory.layout import CacheGroups, KvLayout

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1 import kv_cache_interface
    from vllm_bed import FullAttentionSpec, configs, configured, group

    from pdx.vllm import releases
    from pdx.vllm.identity import layouts_of

pytestmark = pytest.mark.usefixtures("seeded")


class CrossAttentionSpec(SimpleNamespace):
    """Named like vLLM's."""


class MambaSpec(SimpleNamespace):
    """Named like vLLM's."""


# What only releases are told whose groups PDX moves.
of_groups = pytest.mark.skipif(not releases.moves_groups(), reason="PDX moves one group of this vLLM")


@pytest.mark.parametrize(
    ("groups", "changes", "words"),
    [
        ([group()], {"hashing": "xxhash"}, "'xxhash' can be made to collide"),
        pytest.param(
            [group(), group(CrossAttentionSpec)], {}, "a KV cache group of CrossAttentionSpec", marks=of_groups
        ),
        pytest.param(
            [group(MambaSpec, mamba_cache_mode="none")], {}, "states that vLLM keeps in mode 'none'", marks=of_groups
        ),
        pytest.param(
            [group(MambaSpec, mamba_cache_mode="align", num_speculative_blocks=2)],
            {},
            "states with speculative decoding",
            marks=of_groups,
        ),
        ([], {}, "this model has no KV cache"),
        ([group()], {"hash_block_size": 16}, "block hashes of 16 tokens"),
        ([group(non_causal=True)], {}, "non-causal attention"),
    ],
)
def test_layouts_that_pdx_does_not_move_are_refused(
    folder: Path, groups: list[Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError if "hashing" in changes else LayoutError, match=words):
        layouts_of(*configs(folder, groups, **changes), 256, model="m")


class MLAAttentionSpec(SimpleNamespace):
    """Named like vLLM's."""


def counted(heads: int, **said: Any) -> Any:
    """The configuration of a model with so many KV heads, as vLLM says of it as a whole; and what else it says."""
    config = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads, **said})
    return SimpleNamespace(
        hf_config=config, get_total_num_kv_heads=lambda: heads, get_total_num_hidden_layers=lambda: 8
    )


def sharded(
    folder: Path,
    ranks: int,
    shards: int = 0,
    heads: int = 4,
    kind: Any = FullAttentionSpec,
    draft: Any = None,
    **said: Any,
) -> KvLayout:
    """The layout of an engine of so many ranks, whose model has so many KV heads."""
    made = group(kind)
    made.kv_cache_spec.num_kv_heads = max(1, heads // ranks)
    made.kv_cache_spec.page_size_bytes = 128 * max(1, heads // ranks) * 2 * 64 * 2
    config, cache = configs(folder, [made], ranks=ranks)
    config.model_config = counted(heads, **said)
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    [found] = layouts_of(config, cache, 256, model="m", shards=shards)
    return found


def test_engines_of_any_number_of_ranks_have_one_layout_if_they_cut_alike(folder: Path) -> None:
    own = {ranks: sharded(folder, ranks) for ranks in (1, 2, 4)}
    assert len({each.fingerprint() for each in own.values()}) == 3
    assert {sharded(folder, ranks, 4).fingerprint() for ranks in (1, 2, 4)} == {own[4].fingerprint()}
    assert sharded(folder, 1, 2).fingerprint() == own[2].fingerprint()
    assert (own[4].num_shards, own[4].num_heads, own[4].page_bytes) == (4, 1, 128 * 2 * 64 * 2)


def test_heads_that_several_ranks_have_are_one_shard(folder: Path) -> None:
    assert sharded(folder, 8).fingerprint() == sharded(folder, 4).fingerprint()
    latent = {sharded(folder, ranks, heads=1, kind=MLAAttentionSpec).fingerprint() for ranks in (1, 2, 8)}
    assert len(latent) == 1
    assert sharded(folder, 8, heads=1, kind=MLAAttentionSpec).num_shards == 1


@pytest.mark.parametrize(
    "more",
    [
        {"swa_num_key_value_heads": 8},
        {"block_configs": [{"attention": {"n_heads_in_group": count}} for count in (4, 8)]},
        {"num_key_value_heads_per_layer": [4, 8]},
        {"draft": counted(8)},
    ],
    ids=["of windows", "by block", "by layer", "of a draft model"],
)
def test_layers_with_more_heads_than_others_are_not_taken_for_copies(folder: Path, more: dict[str, Any]) -> None:
    """With 8 ranks each has one head, so vLLM puts these layers into one group; some have 8 heads, no two alike."""
    assert sharded(folder, 8, **more).num_shards == 8
    assert sharded(folder, 8, draft=counted(4)).num_shards == 4


@pytest.mark.parametrize(
    ("ranks", "shards", "words"),
    [
        (1, 3, "shards 3, where 1 ranks have 4 KV heads: set `shards` to a number that divides 4 and that 1 divides"),
        (4, 2, "shards 2, where 4 ranks have 4 KV heads"),
        (1, 8, "shards 8, where 1 ranks have 4 KV heads"),
        (8, 2, "shards 2, where 8 ranks have 4 KV heads"),
    ],
)
def test_what_cannot_be_cut_is_refused(folder: Path, ranks: int, shards: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        sharded(folder, ranks, shards)


@of_groups
def test_a_state_cannot_be_cut(folder: Path) -> None:
    import torch

    state = group(MambaSpec, mamba_cache_mode="align", shapes=[(8, 16)], dtypes=[torch.float32])
    with pytest.raises(LayoutError, match="shards 2 of 1 ranks: a state cannot be cut"):
        layouts_of(*configs(folder, [state]), 256, model="m", shards=2)


def test_cache_formats_that_are_stored_alike_are_different_layouts(folder: Path) -> None:
    auto, fp8 = (
        layouts_of(*configs(folder, [group()], cache_dtype=dtype), 256, model="m") for dtype in ("auto", "bfloat16")
    )
    assert auto.fingerprint() != fp8.fingerprint()


# ---- from vLLM's own configuration ----------------------------------------------------------
#
# What follows is held against vLLM's own classes, of the release that is installed; `make releases` has these tests run
# on the sources of each release that PDX supports.


def specs(*windows: int | None) -> dict[str, Any]:
    """vLLM's own, of a layer each; without a window it attends to everything."""
    import torch

    shape = {"block_size": 128, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}
    found: dict[str, Any] = {}
    for number, window in enumerate(windows):
        if window is None:
            spec = kv_cache_interface.FullAttentionSpec(**shape)
        else:
            spec = kv_cache_interface.SlidingWindowSpec(**shape, sliding_window=window)
        found[f"layers.{number}"] = spec
    return found


def layouts_in_vllm(folder: Path, *windows: int | None, **flags: Any) -> CacheGroups:
    """As an engine with layers of these windows comes to it, from its command line on."""
    transfer = KVTransferConfig(
        kv_connector="PdxConnector",
        kv_connector_module_path="pdx.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    config = VllmConfig(model_config=ModelConfig(model=str(folder), max_model_len=512), kv_transfer_config=transfer)
    config.cache_config.block_size = 128
    if hasattr(config.cache_config, "get_resolved_kv_cache_layout"):
        config.cache_config.kv_cache_layout = "LBHNC"
    for name, value in flags.items():
        setattr(config.cache_config, name, value)
    home = "kv_cache_planning" if releases.RELEASE >= (0, 33) else "kv_cache_utils"
    groups = importlib.import_module(f"vllm.v1.core.{home}").get_kv_cache_groups(config, specs(*windows))
    cache = kv_cache_interface.KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    return layouts_of(config, cache, 256, model="m")


@configured
def test_the_layout_of_an_engine_is_read_from_vllms_own_configuration(folder: Path) -> None:
    [layout] = layouts_in_vllm(folder, None, None, None)
    assert (layout.num_layers, layout.num_heads, layout.head_dim, layout.block_tokens) == (3, 4, 64, 128)
    assert layout.page_bytes == 128 * 4 * 2 * 64 * 2
    assert layout.release == ".".join(map(str, releases.RELEASE))


@configured
def test_layers_with_windows_are_groups_of_their_own_where_pdx_moves_several(folder: Path) -> None:
    """vLLM splits them only for connectors that say they can take it."""
    mixed = layouts_in_vllm(folder, 256, None, 256, None)
    if not releases.moves_groups():
        assert [each.num_layers for each in mixed] == [4]
        with pytest.raises(LayoutError, match="a KV cache group of SlidingWindowSpec: PDX moves full attention"):
            layouts_in_vllm(folder, 256, 256)
        return
    found = [(each.kind, each.window, each.num_layers, each.layers) for each in mixed]
    assert sorted(found) == [("full", 0, 2, (1, 3)), ("window", 256, 2, (0, 2))]
    assert len({each.fingerprint() for each in mixed}) == 2
    [windows] = layouts_in_vllm(folder, 256, 256)
    assert (windows.kind, windows.window, windows.num_layers) == ("window", 256, 2)


def test_a_model_with_state_space_layers_is_refused_where_vllm_asks_for_the_layout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it does through its own function, before it finds that it cannot make one group of them."""
    assert isinstance(ModelConfig.is_hybrid, property)
    transfer = SimpleNamespace(kv_connector="PdxConnector", kv_connector_module_path="pdx.vllm.connector")
    model = SimpleNamespace(is_hybrid=False, architectures=["JambaForCausalLM"])
    config = SimpleNamespace(kv_transfer_config=transfer, model_config=model)
    chosen = KVConnectorFactory.get_connector_class(transfer)
    assert chosen.get_required_kvcache_layout(config) is None
    model.is_hybrid = True
    monkeypatch.setattr(releases, "RELEASE", (0, 31))
    with pytest.raises(LayoutError, match=r"state-space layers \(JambaForCausalLM\)"):
        chosen.get_required_kvcache_layout(config)
