"""Models, configurations and halves of the connector, as vLLM has them, for the tests of what is taken from vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_harness import NodeThread, attached
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform

from pdx.testing.waiting import wait_until
from pdx.vllm import connector
from pdx.wire.verbs import Model, Models


def on_gpu_build() -> bool:
    return not (current_platform.is_cpu() or current_platform.is_cuda())


# The GPU build has no configuration where there is no GPU.
configured = pytest.mark.skipif(on_gpu_build(), reason="this vLLM configures nothing without a GPU")


def model_of(folder: Path, **changes: Any) -> Any:
    config = json.loads((folder / "config.json").read_text())
    fields = {
        "model": str(folder), "revision": None, "dtype": "bfloat16", "quantization": None, "seed": 0,
        "hf_config": SimpleNamespace(to_dict=lambda: config), "max_model_len": 4096, "generation_config": "auto",
        "override_generation_config": {}, "get_diff_sampling_param": dict, "logits_processors": None,
        "get_vocab_size": lambda: 32_000, "enable_sleep_mode": False, **changes,
    }  # fmt: skip
    return SimpleNamespace(**fields)


class FullAttentionSpec(SimpleNamespace):
    """Named like vLLM's, because the name is what is looked at."""


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


def transfer_config(**changes: Any) -> Any:
    good = {"kv_connector_extra_config": {}, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return SimpleNamespace(**{**good, **changes})


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


def models_at(node: NodeThread) -> dict[str, Model]:
    """What a node is told of its engines, by their names."""
    with attached(node.address, kind="controller") as wire:
        return {model.engine: model for model in wire.ask(Models()).models}


def model_at(node: NodeThread, engine: str) -> Model:
    """Of one that comes, if it is not there yet."""
    return wait_until(lambda: models_at(node).get(engine), what=f"{engine} is attached")


def inside(policy: str) -> Any:
    outer = SimpleNamespace(kv_connector="MultiConnector", kv_load_failure_policy=policy)
    return SimpleNamespace(kv_transfer_config=outer)
