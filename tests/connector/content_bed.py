"""Requests, media and adapters as vLLM has them, and the keys that PDX gives them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, StreamingUpdate

from pdx.engine.request_keys import RequestKeys
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.vllm.adapters import LoadedAdapters
from pdx.vllm.content import Content

BLOCK, CHUNK, PROMPT = 16, 64, 152  # two chunks, a block and a half
LAYOUT = KvLayout(
    model="m", dtype="float32", num_layers=2, num_heads=1, head_dim=8, block_tokens=BLOCK, page_bytes=1024,
    chunk_tokens=CHUNK, order="LBHNC", backend="x", isa="", num_shards=1, hashing="sha256", release="0.32",
)  # fmt: skip
numbers = itertools.count()


def engine(**changes: Any) -> Content:
    """The names that one engine gives."""
    lora = SimpleNamespace(lora_dtype="bfloat16", enable_tower_connector_lora=False)
    return Content(SimpleNamespace(**{"model_config": SimpleNamespace(), "lora_config": lora, **changes}))


def picture(content: Any, name: str, offset: int = 20, **more: Any) -> MultiModalFeatureSpec:
    """As a processor has made it of a picture, under vLLM's or a client's name."""
    data = {"pixel_values": content if isinstance(content, torch.Tensor | None) else torch.tensor([content, 7.0])}
    data["grid"] = torch.tensor([1, 2, 2])
    item = MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in {**data, **more}.items()
        }
    )
    return MultiModalFeatureSpec(item, "image", name, PlaceholderRange(offset=offset, length=8), mm_hash=name)


def request_of(tokens: list[int] | None = None, sampling: Any = None, **inputs: Any) -> Any:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    sampling = None if "pooling_params" in inputs else sampling or SamplingParams(max_tokens=1)
    pooling = inputs.pop("pooling_params", None)
    prompt = tokens or list(range(PROMPT))
    return Request(f"r{next(numbers)}", prompt, sampling, pooling, block_hasher=hasher, **inputs)


def add_input(request: Any, tokens: list[int], *media: Any) -> None:
    """To a streaming session, as vLLM's scheduler does."""
    update = StreamingUpdate(list(media), tokens, 1, 0.0, SamplingParams(max_tokens=1))
    stub = SimpleNamespace(hash_block_size=BLOCK, log_stats=False, num_waiting_for_streaming_input=0)
    Scheduler._update_request_as_session(stub, request, update)


def loaded(worker: LoadedAdapters, lora: LoRARequest, content: Content | None = None) -> bool:
    """The worker loads the adapter, and tells of it; whether requests were hashed by other weights."""
    worker.load(lambda request: None, lora)
    return content is not None and content.heard(worker.take_news())


def tell(content: Content, lora: LoRARequest | None) -> None:
    """Workers have loaded the adapter, if they had told nothing of it."""
    if lora is not None and left_out(content, request := request_of(lora_request=lora)) == "untold_adapter":
        loaded(LoadedAdapters(), lora, content)
    elif lora is not None:
        content.forget(request.request_id)


def keys_of(content: Content, request: Any, codec: str = "") -> list[bytes]:
    """Of its two chunks, and of its tail in a transfer. Workers have told what they have loaded."""
    tell(content, request.lora_request)
    assert content.name_inputs(request, True) is None
    assert content.keep_apart(request, codec)
    keys = RequestKeys(request, CacheGroups.of(LAYOUT), LAYOUT.fingerprint())
    tail = keys.tail(content.tail, len(request.all_token_ids), "t" * 20)
    assert tail is not None
    return [*keys.leading(2), tail[0]]


def left_out(content: Content, request: Any) -> str | None:
    """Why nothing of it is saved or found; None: it takes part."""
    why = content.name_inputs(request, True)
    return why.reason if why is not None else None


def make_adapter(folder: Path, weights: str, config: str = "{}") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_text(weights)
    return str(folder)
