"""What is taken from vLLM: the model's identity, the layout, the hash of a tail, the configuration; what is refused."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_harness import NodeThread, attached

from pdx.engine.params import TransferParams, parse_params
from pdx.engine.plan import WorkerNews
from pdx.errors import ConfigError, LayoutError, ProtocolError
from pdx.memory.form import apart_salt, form_of, lossy_fingerprint
from pdx.memory.keys import chunk_key
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.testing.waiting import wait_until
from pdx.wire.messages import EngineFacts
from pdx.wire.tokens import chunk_keys
from pdx.wire.verbs import Model, Models

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
        SupportsHMA,
        supports_hma,
    )
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams
    from vllm.v1 import kv_cache_interface
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    from pdx.vllm import connector, releases
    from pdx.vllm.connector import _checked_config
    from pdx.vllm.identity import facts_of, layouts_of, model_identity, naming_of, why_unnamed

# ---- the model's identity -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from pdx.bench.harness.tiny_llama import make_model

    make_model(tmp_path / "model", layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32)
    return tmp_path / "model"


def model_of(folder: Path, **changes: Any) -> Any:
    config = json.loads((folder / "config.json").read_text())
    fields = {
        "model": str(folder), "revision": None, "dtype": "bfloat16", "quantization": None, "seed": 0,
        "hf_config": SimpleNamespace(to_dict=lambda: config), "max_model_len": 4096, "generation_config": "auto",
        "override_generation_config": {}, "get_diff_sampling_param": dict, "logits_processors": None,
        "get_vocab_size": lambda: 32_000, "enable_sleep_mode": False, **changes,
    }  # fmt: skip
    return SimpleNamespace(**fields)


def test_identity_is_that_of_what_makes_the_cache_and_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    from pdx.bench.harness.tiny_llama import make_model

    copy, tuned = tmp_path / "elsewhere", tmp_path / "tuned"
    shutil.copytree(folder, copy)
    make_model(tuned, layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32, seed=1)
    # With long rope vLLM turns the keys by other factors where `--max-model-len` exceeds what the model was trained on.
    rope = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": "longrope"}})
    others = [
        model_of(tuned),
        model_of(folder, dtype="float32"),
        model_of(folder, quantization="fp8"),
        model_of(folder, hf_config=SimpleNamespace(to_dict=lambda: {"a": 1})),
        *(model_of(folder, hf_config=rope, max_model_len=length) for length in (4096, 131072)),
    ]
    own = model_identity(model_of(folder), "auto")
    assert model_identity(model_of(copy), "auto") == own
    assert len({own, *(model_identity(other, "auto") for other in others)}) == 1 + len(others)


def test_an_engines_own_settings_that_change_what_a_model_computes_are_part_of_its_identity(folder: Path) -> None:
    """vLLM has one name for all that is quantized when it is loaded. Llama 4 scales queries if its way of generating
    says so, or by `--max-model-len`. Of a video only those tokens are seen that a method has left."""
    scales = SimpleNamespace(to_dict=lambda: {"text_config": {"attn_temperature_tuning": True}})
    media = [{}, {"video_pruning_rate": 0.5, "video_pruning_method": "evs"}, {"mm_encoder_attn_dtype": "fp8"}]
    media.append({**media[1], "video_pruning_method": "vidcom2"})

    def llama4(length: int = 4096, override: Any = None, own: Any = None) -> Any:
        said = {"override_generation_config": override or {}, "try_get_generation_config": lambda: own or {}}
        return model_of(folder, hf_config=scales, max_model_len=length, **said)

    yes, no = ({"attn_temperature_tuning": each} for each in (True, False))
    engines = [
        *(model_of(folder, quantization_config=each) for each in ({"linear": "mxfp8"}, {"ignore": ["a"]})),
        model_of(folder, model_class_overrides={"LlamaForCausalLM": "ours:Llama"}),
        *(model_of(folder, multimodal_config=SimpleNamespace(**each)) for each in media),
        *(llama4(), llama4(65536), llama4(override=yes), llama4(override=no)),
    ]
    found = [model_identity(each, "auto") for each in engines]
    assert len(set(found)) == len(found)
    assert model_identity(llama4(own=yes), "auto") == model_identity(llama4(override=yes, own=no), "auto") in found
    for setting in ({"quantization_config": None}, {"model_class_overrides": {}}, {"multimodal_config": None}):
        assert model_identity(model_of(folder, **setting), "auto") == model_identity(model_of(folder), "auto")


def hub_model(revision: str | None, commit: str | None) -> Any:
    """As vLLM has it of a repository whose configuration was read at this commit."""
    config = SimpleNamespace(to_dict=dict, _commit_hash=commit)
    return SimpleNamespace(
        model="org/name", revision=revision, dtype="x", quantization=None, seed=0, hf_config=config, max_model_len=1
    )


def test_identity_of_a_hub_model_is_its_commit_whatever_led_there() -> None:
    """A branch that moves is another model, and one commit is one, by a branch, a tag, its number or none of them."""
    old, new = "a" * 40, "b" * 40
    by_name = [model_identity(hub_model(name, old), "auto") for name in (None, "main", "v1", old)]
    assert len(set(by_name)) == 1
    assert model_identity(hub_model(old, None), "auto") == by_name[0]
    assert model_identity(hub_model("main", new), "auto") not in by_name


UNNAMED = {
    "a branch alone": (hub_model("main", None), "auto"),
    "no revision": (hub_model(None, None), "auto"),
    "an object store": (
        SimpleNamespace(**vars(hub_model(None, None)) | {"model_weights": "s3://b/m"}),
        "runai_streamer",
    ),
    "weights from elsewhere": (hub_model(None, "a" * 40), "tensorizer"),
    "a loader that nobody knows": (hub_model(None, "a" * 40), "of a plugin"),
}


@pytest.mark.parametrize("case", [*UNNAMED, "a folder without weights", "scales of the first prompt"])
def test_weights_without_a_content_are_named_for_one_life(
    folder: Path, halves: Callable[..., Any], node_here: NodeThread, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """Two engines share nothing, and each says so once."""
    model, load_format = UNNAMED.get(case, (model_of(folder), "auto"))
    cache = SimpleNamespace(calculate_kv_scales=case == "scales of the first prompt")
    if case == "a folder without weights":
        for file in folder.glob("*.safetensors"):
            file.rename(file.with_suffix(".tensors"))
    assert why_unnamed(model, load_format, cache)
    if not cache.calculate_kv_scales:
        assert model_identity(model, load_format) != model_identity(model, load_format)
    engines = [f"{case} {number}" for number in range(2)]
    for engine in engines:
        more = {"model": model, "load_format": load_format, "cache": cache, "engine": engine}
        halves(KVConnectorRole.SCHEDULER, **more).set_xfer_handshake_metadata({})
    found = [model_at(node_here, engine) for engine in engines]
    assert found[0].shape["model"] != found[1].shape["model"]
    assert caplog.text.count("chunks of this engine are found by no other one") == 2


def test_weights_of_a_folder_a_commit_or_a_seed_are_named_by_content(folder: Path) -> None:
    cache = SimpleNamespace()
    for model, load_format in ((model_of(folder), "auto"), (hub_model("main", "a" * 40), "safetensors")):
        assert not why_unnamed(model, load_format, cache)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert not why_unnamed(model_of(folder), "dummy", cache)
    assert model_identity(model_of(folder), "dummy") == model_identity(model_of(folder), "dummy")


# ---- layouts --------------------------------------------------------------------------------


class FullAttentionSpec(SimpleNamespace):
    """Named like vLLM's, because the name is what is looked at."""


class CrossAttentionSpec(SimpleNamespace):
    """Named like vLLM's."""


class MambaSpec(SimpleNamespace):
    """Named like vLLM's."""


def group(kind: type[SimpleNamespace] = FullAttentionSpec, **changes: Any) -> Any:
    import torch

    spec = kind(block_size=128, page_size_bytes=1 << 16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16, **changes)
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0", "layers.1"])


def configs(folder: Path, groups: list[Any], **changes: Any) -> tuple[Any, Any]:
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changes.get("pipeline", 1),
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=changes.get("ranks", 1),
            use_ubatching=False,
        ),
        model_config=model_of(folder),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=changes.get("hashing", "sha256"), cache_dtype=changes.get("cache_dtype", "auto")
        ),
        load_config=SimpleNamespace(load_format="auto"),
        attention_config=SimpleNamespace(backend=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=8, long_prefill_token_threshold=0),
    )
    cache = SimpleNamespace(
        kv_cache_groups=groups, hash_block_size=changes.get("hash_block_size", 128), kv_cache_layout="LBHNC"
    )
    return vllm_config, cache


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


# ---- the releases of vLLM --------------------------------------------------------------------
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


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it 0.28 is refused."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def on_gpu_build() -> bool:
    return not (current_platform.is_cpu() or current_platform.is_cuda())


# The GPU build has no configuration where there is no GPU.
configured = pytest.mark.skipif(on_gpu_build(), reason="this vLLM configures nothing without a GPU")


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


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ((0, 27), "is too old: PDX is tested with 0.28 to 0.33"),
        ((0, 28), "PYTHONHASHSEED=0 for all engines"),  # else they find nothing
        *((each, 'is not known to PDX: .* or set "any_release": true') for each in ((0, 34), (1, 0), (0, 0))),
    ],
)
def test_releases_that_are_not_known_or_find_nothing_are_refused(
    halves: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, release: tuple[int, int], words: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(releases, "RELEASE", release)
    with pytest.raises(ConfigError, match=words):
        halves(KVConnectorRole.WORKER)
    if "any_release" not in words:
        with pytest.raises(ConfigError, match=words):
            releases.check_release(any_release=True)


def test_releases_that_are_known_start_in_silence_and_newer_ones_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    for release in ((0, 28), (0, 33), (0, 34), (1, 0), (0, 0)):
        monkeypatch.setattr(releases, "RELEASE", release)
        releases.check_release(any_release=True)
        told.append((releases.release_name(), len(caplog.messages)))
    assert told == [("0.28", 0), ("0.33", 0), ("0.34", 1), ("1.0", 2), (releases.__version__, 3)]
    assert "is not known to PDX: PDX is tested with 0.28 to 0.33" in caplog.messages[-1]


def test_the_order_of_a_page_is_what_the_workers_say_where_only_they_know(
    halves: Callable[..., Any], node_here: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 0.28, whose `KVCacheConfig` does not have it: two orders under one name would be wrong tokens."""
    monkeypatch.setattr(releases, "RELEASE", (0, 28))
    backends = "vllm.v1.attention.backends.utils.get_kv_cache_layout"
    found = []
    for order in ("HND", "NHD"):
        monkeypatch.setattr(backends, lambda order=order: order, raising=False)
        with set_current_vllm_config(SimpleNamespace(kv_transfer_config=transfer_config(kv_connector="PdxConnector"))):
            worker = halves(KVConnectorRole.WORKER, chosen=("B", "B"), has_order=False, engine=order)
        worker.register_kv_caches(caches())
        scheduler = halves(KVConnectorRole.SCHEDULER, has_order=False, engine=order)
        scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
        found.append(model_at(node_here, order).shape)
    assert [(shape["order"], shape["backend"]) for shape in found] == [("HND", "B"), ("NHD", "B")]
    with (
        set_current_vllm_config(inside("recompute")),
        pytest.raises(ConfigError, match=r"inside another connector needs vLLM 0\.29"),
    ):
        halves(KVConnectorRole.WORKER, has_order=False)


def test_how_blocks_are_hashed_and_adapters_loaded_is_where_pdx_steps_in() -> None:
    """Without these nothing of a request with media or an adapter is saved."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.request import Request

    assert "self._block_hasher(self)" in inspect.getsource(Request.update_block_hashes)
    assert list(inspect.signature(WorkerLoRAManager._load_adapter).parameters) == ["self", "lora_request"]
    assert {"lora_int_id", "lora_name", "lora_path", "load_inplace"} <= set(LoRARequest.__struct_fields__)
    assert isinstance(ModelConfig.is_prefix_caching_supported, property)


def test_every_hook_that_pdx_overrides_is_one_of_vllms_and_none_is_left_open() -> None:
    """A hook that vLLM has renamed is never called. Hooks of newer releases than the installed one are named here."""
    since = {
        "get_transfer_results": (0, 30), "get_loaded_kv_cache_group_ids": (0, 32),
        "unregister_kv_caches": (0, 33), "restore_kv_caches": (0, 33),
    }  # fmt: skip
    newer = {name for name, release in since.items() if release > releases.RELEASE}
    own = {name for name in vars(connector.PdxConnector) if not name.startswith("_")} - {"scheduler", "worker"}
    assert own - {*dir(KVConnectorBase_V1), *dir(SupportsHMA)} == newer
    assert not connector.PdxConnector.__abstractmethods__
    assert supports_hma(connector.PdxConnector) == releases.moves_groups()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("sleep", 1), ["unregister", "sleep"]),
        (("discard", ("kv_cache",)), ["unregister", "discard"]),
        (("discard", ("runtime",)), ["discard"]),
        (("wake_up", None), ["wake_up", "restore"]),
        (("wake_up", ["weights"]), ["wake_up"]),
        (("wake_up", ["kv_cache"]), ["wake_up", "restore"]),
    ],
    ids=str,
)
def test_the_connector_hears_of_sleep_before_memory_goes_and_of_waking_when_it_is_back(
    folder: Path,
    halves: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    call: tuple[str, Any],
    told: list[str],
) -> None:
    """vLLM's workers tell of it since 0.33; before, PDX steps in where an engine may sleep."""
    from vllm.v1.worker.gpu_worker import Worker

    name, argument = call
    own, calls = getattr(Worker, name, None), list[str]()
    if own is None:
        pytest.skip(f"vLLM's worker has no {name} in this release")

    class Heard(connector.PdxConnector):
        worker = Mock(unregister=lambda: calls.append("unregister"), restore=lambda: calls.append("restore"))

    for each in {"sleep", "discard", "wake_up"} & vars(Worker).keys():
        monkeypatch.setattr(Worker, each, lambda self, _, each=each: calls.append(each))
    made = halves(KVConnectorRole.WORKER, model=model_of(folder, enable_sleep_mode=True), kind=Heard)
    releases.tell_of_sleep(made)  # as another one in this process would
    getattr(Worker, name)(Mock(), argument)
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        assert list(inspect.signature(own).parameters) == ["self", {"sleep": "level"}.get(name, "tags")]
        assert calls == told
        return
    assert calls == [name], "vLLM tells of it by itself"
    hook = "restore_kv_caches" if name == "wake_up" else "unregister_kv_caches"
    assert f"get_kv_transfer_group().{hook}()" in inspect.getsource(own)
    getattr(made, hook)()
    assert calls == [name, hook.partition("_")[0]]
    assert made.supports_sleep_mode(None)


def test_cache_formats_that_are_stored_alike_are_different_layouts(folder: Path) -> None:
    auto, fp8 = (
        layouts_of(*configs(folder, [group()], cache_dtype=dtype), 256, model="m") for dtype in ("auto", "bfloat16")
    )
    assert auto.fingerprint() != fp8.fingerprint()


# ---- the connector's configuration ----------------------------------------------------------


def transfer_config(**changes: Any) -> Any:
    good = {"kv_connector_extra_config": {}, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return SimpleNamespace(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_role": "kv_producer"}, "kv_role is 'kv_producer'"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy is 'fail'"),
        ({"kv_connector_extra_config": {"chunk_size": 256}}, "chunk_size.*chunk_tokens"),
        ({"kv_connector_extra_config": {"chunk_tokens": "many"}}, "chunk_tokens"),
        ({"kv_connector_extra_config": {"lease_s": -1}}, "lease_s"),
    ],
)
def test_bad_configuration_is_refused_with_what_to_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _checked_config(transfer_config(**changes))


# ---- what the proxy must know ---------------------------------------------------------------


def facts(folder: Path, **flags: Any) -> EngineFacts:
    """Of vLLM's own configuration."""
    return facts_of(SimpleNamespace(model_config=ModelConfig(model=str(folder), **flags), watermark_config=None))


HAS_PENALTIES = releases.RELEASE >= (0, 31)  # before it they are no defaults, whatever the command line says


OWN_CONFIG = {"frequency_penalty": 0.5, "max_new_tokens": 9, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("has_own", "flags", "cap", "looks_back"),
    [
        (False, {}, 0, False),
        (False, {"override_generation_config": {"presence_penalty": 1.0, "max_new_tokens": 7}}, 7, HAS_PENALTIES),
        (False, {"override_generation_config": {"frequency_penalty": -0.5}}, 0, HAS_PENALTIES),
        (False, {"override_generation_config": {"presence_penalty": 0, "repetition_penalty": 1.5}}, 0, False),
        (False, {"logits_processors": ["some.module:Processor"]}, 0, True),
        (True, {}, 0, HAS_PENALTIES),  # the model's own cap is for chats that ask for none
        (True, {"generation_config": "vllm"}, 0, False),
        (True, {"generation_config": "FOLDER"}, 9, HAS_PENALTIES),
        (True, {"generation_config": "FOLDER", "override_generation_config": {"frequency_penalty": 0.0}}, 9, False),
        (True, {"override_generation_config": {"max_new_tokens": 5}}, 5, HAS_PENALTIES),
    ],
)
def test_what_a_command_line_and_a_models_own_configuration_add_to_every_request(
    folder: Path, has_own: bool, flags: dict[str, Any], cap: int, looks_back: bool
) -> None:
    if has_own:
        (folder / "generation_config.json").write_text(json.dumps(OWN_CONFIG))
    if flags.get("generation_config") == "FOLDER":
        flags = {**flags, "generation_config": str(folder)}
    assert facts(folder, max_model_len=512, **flags) == EngineFacts(512, cap, looks_back)


@configured
def test_logits_processors_that_are_installed_and_watermarks_look_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = VllmConfig(model_config=ModelConfig(model=str(folder)))
    assert facts_of(plain) == EngineFacts(plain.model_config.max_model_len, 0, False)
    assert not [record for record in caplog.records if record.name.partition(".")[0] == "pdx"]
    plain.watermark_config = "of a key"
    assert facts_of(plain).looks_back
    plain.watermark_config = None
    assert not facts_of(plain).looks_back
    installed = tmp_path / "site" / "theirs-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{LOGITSPROCS_GROUP}]\ntheirs = their.module:Processor\n")
    monkeypatch.syspath_prepend(installed.parent)
    assert facts_of(plain).looks_back
    assert "their.module:Processor may look at the tokens" in caplog.messages[-1]


# ---- hooks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
def test_the_hooks_of_micro_batches_are_left_out(halves: Callable[..., Any], is_split: bool) -> None:
    """A layer of a step that is computed in several parts is complete behind its last part, and nobody says which it
    is: `wait_for_save` gathers what no hook was called for."""
    assert isinstance(ParallelConfig.use_ubatching, property)
    called: list[str] = []

    class Heard(connector.PdxConnector):
        worker = SimpleNamespace(save_layer=called.append, end_forward=lambda: called.append("end"))

    made = halves(KVConnectorRole.WORKER, is_split=is_split, kind=Heard)
    made.save_kv_layer("layers.0", None, None)
    made.wait_for_save()
    assert called == (["end"] if is_split else ["layers.0", "end"])


# ---- what only the workers know, and only the outer connector ---------------------------------


def connector_of(
    folder: Path,
    node: str,
    role: KVConnectorRole,
    *,
    engine: str = "e",
    ranks: int = 1,
    flag: Any = None,
    chosen: tuple[str, ...] = (),
    has_order: bool = True,
    model: Any = None,
    load_format: str = "auto",
    is_split: bool = False,
    kind: Any = connector.PdxConnector,
    **more: Any,
) -> Any:
    """A half of the connector of an engine whose layers have the `chosen` backends; `flag`: --attention-backend."""
    config, cache = configs(folder, [group()], ranks=ranks)
    if model is not None:
        config.model_config = SimpleNamespace(**vars(model_of(folder)) | vars(model))
    config.load_config.load_format = load_format
    vars(config.cache_config).update(vars(more.get("cache", SimpleNamespace())))
    if not has_order:
        del cache.kv_cache_layout
    config.kv_transfer_config = transfer_config(
        engine_id=engine,
        kv_connector="PdxConnector",
        kv_connector_extra_config={"node": node, "start_node": False},
    )
    config.attention_config.backend = flag
    config.parallel_config.use_ubatching = is_split
    names = cache.kv_cache_groups[0].layer_names
    config.compilation_config = SimpleNamespace(
        static_forward_context={
            name: SimpleNamespace(get_attn_backend=lambda kind=kind: SimpleNamespace(get_name=lambda: kind))
            for name, kind in zip(names, chosen, strict=False)
        }
    )
    cache.num_blocks = 1
    return kind(config, role, cache)


def place_worker(monkeypatch: pytest.MonkeyPatch, rank: int = 0, stage: int = 0) -> None:
    """vLLM says so of a worker, which has no process group here."""
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: SimpleNamespace(rank_in_group=stage))


@pytest.fixture
def halves(folder: Path, node_here: NodeThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes halves as `connector_of` does, of engines at a node; closes them."""
    with contextlib.ExitStack() as stack:

        def make(role: KVConnectorRole, *, node: str = node_here.address, rank: int = 0, **said: Any) -> Any:
            place_worker(monkeypatch, rank)
            made = connector_of(folder, node, role, **said)
            stack.callback(made.shutdown)
            return made

        yield make


def caches() -> dict[str, Any]:
    """Of the layers of `group`, in one block."""
    import torch

    return {f"layers.{number}": torch.zeros(1, 4, 128, 64, dtype=torch.bfloat16) for number in range(2)}


def models_at(node: NodeThread) -> dict[str, Model]:
    """What a node is told of its engines, by their names."""
    with attached(node.address, kind="controller") as wire:
        return {model.engine: model for model in wire.ask(Models()).models}


def model_at(node: NodeThread, engine: str) -> Model:
    """Of one that comes, if it is not there yet."""
    return wait_until(lambda: models_at(node).get(engine), what=f"{engine} is attached")


def shake_hands(halves: Callable[..., Any], *ranks: tuple[str, ...], flag: Any = None, **more: Any) -> None:
    """An engine starts: the workers register their caches, and the scheduler half hears of what they say."""
    told = {}
    for rank, chosen in enumerate(ranks):
        worker = halves(KVConnectorRole.WORKER, rank=rank, ranks=len(ranks), chosen=chosen, flag=flag, **more)
        worker.register_kv_caches(caches())
        told[0, rank] = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))  # noqa: S301  as vLLM does
    scheduler = halves(KVConnectorRole.SCHEDULER, ranks=len(ranks), flag=flag, **more)
    scheduler.set_xfer_handshake_metadata_pp_aware(told)


def test_the_attention_backend_is_the_one_that_vllm_has_chosen(
    halves: Callable[..., Any], node_here: NodeThread
) -> None:
    """Who names it and who leaves the choice to vLLM share; two kinds of GPU that choose otherwise do not."""
    flash, other = "FLASH_ATTN", "FLASHINFER"
    shake_hands(halves, (flash, flash), engine="a")
    shake_hands(halves, (flash, flash), flag=AttentionBackendEnum.FLASH_ATTN, engine="b")
    shake_hands(halves, (other, other), engine="c")
    shake_hands(halves, (flash, other), engine="d")
    shake_hands(halves, (flash, flash), (other, other), engine="e")
    found = models_at(node_here)
    backends = {name: model.shape["backend"] for name, model in found.items()}
    assert backends == {"a": flash, "b": flash, "c": other, "d": f"{other}+{flash}", "e": f"{other}+{flash}"}
    assert found["a"].layout == found["b"].layout != found["c"].layout


def leg_without_a_name() -> Request:
    """As a router made for NIXL sends the prefill leg of a transfer."""
    extra = {"kv_transfer_params": {"do_remote_decode": True}}
    return Request("leg", [1, 2, 3], SamplingParams(max_tokens=1, extra_args=extra), None)


def test_an_engine_has_its_node_when_it_has_started(
    halves: Callable[..., Any], address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As far as there is one: the first request comes at once, and would be answered without it."""
    told = {(0, 0): connector.PdxHandshake("FLASH_ATTN", "LBHNC", [])}
    monkeypatch.setattr(connector, "ATTACH_S", 0.3)
    half = halves(KVConnectorRole.SCHEDULER, node=address)
    started = time.monotonic()
    half.set_xfer_handshake_metadata_pp_aware(told)
    assert time.monotonic() - started > 0.2, "there is none"
    monkeypatch.setattr(connector, "ATTACH_S", 1000.0)
    half = halves(KVConnectorRole.SCHEDULER)
    half.set_xfer_handshake_metadata_pp_aware(told)
    half.on_new_request(leg_without_a_name())
    assert "transfer_id" not in caplog.text, "its answer would name one"
    nested = halves(KVConnectorRole.SCHEDULER, node=address)
    nested.set_xfer_handshake_metadata_pp_aware({})  # inside another connector it is a request that would wait
    nested.on_new_request(leg_without_a_name())
    assert "a leg without a transfer_id" in caplog.text, "two answers would end the engine"


def inside(policy: str) -> Any:
    outer = SimpleNamespace(kv_connector="MultiConnector", kv_load_failure_policy=policy)
    return SimpleNamespace(kv_transfer_config=outer)


def test_the_other_children_of_a_connector_get_nothing_that_they_do_not_know(
    halves: Callable[..., Any], node_here: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend is what the command line says then, and what others have told is left alone. What becomes of loads
    that fail is for the outer one to say."""
    with (
        set_current_vllm_config(inside("fail")),
        pytest.raises(ConfigError, match="kv_load_failure_policy is 'fail' for MultiConnector"),
    ):
        halves(KVConnectorRole.WORKER)
    monkeypatch.setattr(releases, "RELEASE", releases.NEWEST)  # 0.28 is refused there
    with set_current_vllm_config(inside("recompute")):
        worker = halves(KVConnectorRole.WORKER, chosen=("FLASH_ATTN", "FLASH_ATTN"))
    worker.register_kv_caches(caches())
    assert worker.get_handshake_metadata() is None
    for engine, flag in (("", None), ("FLASHINFER", AttentionBackendEnum.FLASHINFER)):
        scheduler = halves(KVConnectorRole.SCHEDULER, flag=flag, engine=engine)
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(of="another connector")})
        assert model_at(node_here, engine).shape["backend"] == engine


def test_a_worker_half_that_is_off_switches_the_scheduler_half_off(halves: Callable[..., Any]) -> None:
    worker = halves(KVConnectorRole.WORKER)
    assert worker.build_connector_worker_meta() is None
    worker.worker.switch_off("of a test")
    told = worker.build_connector_worker_meta()
    scheduler = halves(KVConnectorRole.SCHEDULER)
    for meta in (None, told.aggregate(told)):
        assert not scheduler.scheduler.is_off
        output = SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=None, invalid_block_ids=set())
        scheduler.update_connector_output(output)
    assert scheduler.scheduler.is_off
    assert scheduler.has_pending_push_work(), "the other workers must hear of it"
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    assert worker.build_connector_worker_meta() is None
    assert not scheduler.has_pending_push_work()


@pytest.mark.skipif(
    not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"),
    reason="what a worker that fails has told is lost before vLLM 0.33",
)
def test_what_a_worker_has_told_in_a_step_that_failed_is_told_in_the_next_one() -> None:
    def told(step: int) -> Any:
        meta = connector.PdxWorkerNews([WorkerNews(step=step)], is_off=False, adapters={})
        return KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}, kv_connector_worker_meta=meta)

    aggregator = KVOutputAggregator(2)
    aggregator.ft_defer_kv_connector_outputs([told(7), None])
    outputs = [SimpleNamespace(kv_connector_output=each) for each in (None, told(8))]
    found = aggregator.aggregate(outputs).kv_connector_output
    assert (found.finished_recving, found.failed_recving) == ({"a"}, {"a"})
    assert [each.step for each in found.kv_connector_worker_meta.news] == [7, 8], "the scheduler half takes the oldest"


def test_every_load_is_asynchronous_and_what_failed_is_known_before_the_news_of_workers(
    halves: Callable[..., Any],
) -> None:
    news = [WorkerNews(["a"]), WorkerNews(["a"])]

    class Standing(connector.PdxConnector):
        scheduler = Mock(matched_tokens=lambda request, local: 256)
        worker = Mock(has_news=False, take_news=Mock(side_effect=[*news, None]))

    scheduler, worker = (halves(role, kind=Standing) for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER))
    assert scheduler.get_num_new_matched_tokens(SimpleNamespace(request_id="a"), 0) == (256, True)
    told = worker.build_connector_worker_meta().aggregate(worker.build_connector_worker_meta())
    assert worker.build_connector_worker_meta() is None, "a step that changes nothing is not told of"
    told = pickle.loads(pickle.dumps(told))  # as it comes from the processes of several workers
    output = SimpleNamespace(kv_connector_worker_meta=told, finished_recving=None, invalid_block_ids={3})
    scheduler.update_connector_output(output)
    assert Standing.scheduler.method_calls == [call.not_loaded({3}), call.heard(news)], "what failed is known first"


# ---- a request's claims ---------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
claims = st.dictionaries(
    st.sampled_from(
        [
            "do_remote_prefill",
            "do_remote_decode",
            "transfer_id",
            "prefill_tokens",
            "decode_node",
            "prefill_node",
            "remote_prefill_cached_tokens",  # for vLLM
            "other",
        ]
    ),
    anything,
)


@given(anything | claims)
def test_params_are_taken_or_refused_and_nothing_else(params: Any) -> None:
    try:
        parsed = parse_params(params)
    except ProtocolError:
        return
    if parsed != TransferParams():
        assert parsed.do_remote_decode is not parsed.do_remote_prefill
        assert len(parsed.transfer_id or "") >= 16
        assert max(len(parsed.decode_node), len(parsed.prefill_node)) <= 256


# ---- keys, as others make them --------------------------------------------------------------

BLOCK_TOKENS, PER_CHUNK = 4, 3


SALTS = st.none() | st.sampled_from(["cache_salt", "a", "é"]) | st.text(max_size=300)


def theirs(tokens: list[int], salt: str | None, algorithm: str) -> list[bytes]:
    """The block hashes of a request in vLLM, which has decoded the salt from what came over HTTP."""
    from vllm.utils.hashing import get_hash_fn_by_name

    request = SimpleNamespace(
        all_token_ids=tokens, num_tokens=len(tokens), block_hashes=[], lora_request=None, mm_features=[],
        cache_salt=salt.encode().decode() if salt is not None else None, prompt_embeds=None,
    )  # fmt: skip
    return kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, get_hash_fn_by_name(algorithm))(request)


LAYOUT = KvLayout(
    model="m", dtype="torch.bfloat16 as auto", num_layers=2, num_heads=2, head_dim=8, block_tokens=BLOCK_TOKENS,
    page_bytes=BLOCK_TOKENS * 2 * 8 * 2 * 2, chunk_tokens=BLOCK_TOKENS * PER_CHUNK, order="LBHNC", backend="CPU_ATTN",
    isa="", num_shards=1, hashing="sha256",
)  # fmt: skip


@given(
    st.lists(st.integers(0, 300_000) | st.sampled_from([23, 24, 255, 256, 65_535, 65_536]), min_size=12, max_size=80),
    SALTS,
    st.sampled_from(["sha256", "sha256_cbor"]),
    st.sampled_from([None, "0", "seed"]),
    st.sampled_from(["", "fp8", "int8"]),
)
def test_who_knows_the_tokens_makes_the_keys_that_the_engine_makes(
    tokens: list[int], salt: str | None, algorithm: str, seed: str | None, codec: str
) -> None:
    """Also those of a request with a lossy codec, which are nobody else's."""
    layout = msgspec.structs.replace(LAYOUT, hashing=algorithm)
    form = str(form_of(layout, codec)) if codec else ""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PYTHONHASHSEED") if seed is None else patched.setenv("PYTHONHASHSEED", seed)
        cache = SimpleNamespace(prefix_caching_hash_algo=algorithm)
        naming = naming_of(SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(get_vocab_size=lambda: 0)))
        hashes = theirs(tokens, apart_salt(form, salt or "") if form else salt, algorithm)
    model = Model("e", "", layout.fingerprint(), {**layout.described(), **naming})
    fingerprint = lossy_fingerprint(layout.fingerprint(), form) if form else layout.fingerprint()
    found = chunk_keys(model, tokens, salt or "", codec) if codec else chunk_keys(model, tokens, salt or "")
    assert found == [chunk_key(fingerprint, bytes(hashed)) for hashed in hashes[PER_CHUNK - 1 :: PER_CHUNK]]
    assert not codec or not set(found) & set(chunk_keys(model, tokens, salt or ""))
