"""How an engine of the oracle is configured, and vLLM's own configuration of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exact_kinds import DRAFTED, KINDS, ONE_LAYER, Kind
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

MODEL_LEN = 4096
DRAFTS = 3

PDX = {"kv_connector": "PdxConnector", "kv_connector_module_path": "pdx.vllm.connector"}
FOREIGN = {"kv_connector": "ForeignConnector", "kv_connector_module_path": "foreign_connector"}


@dataclass(frozen=True)
class Shape:
    """How an engine is configured. `kind`: of its model, one of `KINDS`. `connector`: in vLLM's terms, None: it has
    none. `beside`: the connectors that MultiConnector has, empty: `connector` alone.

    `stages`: how many layers each stage of its pipeline has, the later ones a step behind; empty: it has none. `ranks`:
    of each stage, which have the heads among them. `threshold`: tokens of one prompt in a step, 0: no limit. `drafts`:
    whether tokens are proposed and checked. `draft_layers`: so many last layers are a draft model's, which is called
    `drafter`; with `drafts` it proposes them. `graphs`: steps of so many tokens at most call no hooks. `priorities`:
    requests have some. `weights`: of its model. `content`: it has adapters and sees pictures. `runner`: which of vLLM's
    two. `defers`, `caps`: see `exact_releases`. `extra`: settings of the connector.
    """

    asynchronous: bool = False
    kind: str = "full"
    stages: tuple[int, ...] = ()
    ranks: int = 1
    connector: Mapping[str, Any] | None = field(default_factory=lambda: PDX)
    blocks: int = 600
    budget: int = 2048  # tokens in a step
    seqs: int = 8
    threshold: int = 0
    priorities: bool = False
    drafts: bool = False
    draft_layers: int = 0
    drafter: str = "a drafter"
    graphs: int = 0
    weights: int = 0
    content: bool = False
    prefix: bool = True
    runner: int = 1
    defers: bool = False
    caps: bool = False
    beside: tuple[Mapping[str, Any], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_kind(self) -> Kind:
        return {**KINDS, **DRAFTED, **ONE_LAYER}[self.kind]

    @property
    def has_pdx(self) -> bool:
        return self.connector is PDX


def vllm_config(shape: Shape, name: str, model: Path, node: str) -> Any:
    """Of an engine of that name. :param node: PDX's address."""
    model_config = ModelConfig(
        model=str(model), dtype="float32", seed=0, max_model_len=MODEL_LEN, skip_tokenizer_init=True
    )
    kind = shape.model_kind
    assert not kind.state_block or (shape.prefix and not shape.drafts), "the toy has no such states"
    cache = CacheConfig(block_size=kind.block, cache_dtype="auto", enable_prefix_caching=shape.prefix)
    cache.num_gpu_blocks = shape.blocks
    drafts = None
    if shape.drafts:
        drafts = SpeculativeConfig(
            method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=3, prompt_lookup_min=1,
            target_model_config=model_config, target_parallel_config=VllmConfig().parallel_config,
        )  # fmt: skip
    transfer = _transfer(shape, node)
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.seqs,
            max_num_batched_tokens=shape.budget,
            max_model_len=MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            long_prefill_token_threshold=shape.threshold,
            policy="priority" if shape.priorities else "fcfs",
        ),
        cache_config=cache,
        **({"kv_transfer_config": KVTransferConfig(**transfer, engine_id=name)} if transfer else {}),
        **({"speculative_config": drafts} if drafts else {}),
        **({"lora_config": LoRAConfig(max_loras=shape.seqs)} if shape.content else {}),
    )
    config.scheduler_config.async_scheduling = shape.asynchronous
    assert not (shape.stages and shape.asynchronous), "the first stage of the toy does not wait for sampled tokens"
    config.parallel_config.pipeline_parallel_size = len(shape.stages) or 1
    config.parallel_config.tensor_parallel_size = shape.ranks
    cache.block_size = kind.block
    if kind.state_block:  # what vLLM sets where a model has states and its cache is used again
        cache.mamba_cache_mode, cache.mamba_block_size = "align", kind.state_block
    if kind.unit:
        cache.prefix_match_unit = kind.unit
    return config


def _transfer(shape: Shape, node: str) -> dict[str, Any] | None:
    if shape.connector is None:
        return None
    role = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    extra = dict(shape.extra)
    if shape.has_pdx:
        # "always": a toy computes any number of tokens in no time, so that no load would be worth a step.
        extra = {"node": node, "start_node": False, "lookup_s": 5.0, "load": "always", **extra}
    ours = {**shape.connector, **role, "kv_connector_extra_config": extra}
    if not shape.beside:
        return ours
    children = [dict(each) | role if each is not shape.connector else ours for each in shape.beside]
    return {"kv_connector": "MultiConnector", **role, "kv_connector_extra_config": {"connectors": children}}
