"""The meaning of a vLLM engine's KV bytes: its `KvLayout`, derived from vLLM's own configuration.

`KVCacheConfig` and the attention specs give the geometry; on CPU the attention kernel's instruction set decides how a
page is packed, so it is part of the layout, and so is vLLM's release (`pdx.vllm.releases`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from pdx.engine.weights import SUFFIXES, weight_files, weights_digest
from pdx.errors import ConfigError, LayoutError
from pdx.memory.layout import CacheGroups, KvLayout, Place
from pdx.vllm.releases import (
    cpu_isa,
    hashed_tokens,
    is_causal,
    is_diffusion,
    is_watermarked,
    moves_groups,
    page_order,
    release_name,
    root_hash,
    salt_tag,
)
from pdx.vllm.stages import WHOLE, Cut
from pdx.wire.messages import EngineFacts

log = logging.getLogger("pdx.vllm")

# For each of vLLM's cache group specs: its `KvLayout.kind`, and the field that holds its `window`.
_KINDS = {
    "FullAttentionSpec": ("full", ""),
    "MLAAttentionSpec": ("full", ""),
    "SlidingWindowSpec": ("window", "sliding_window"),
    "ChunkedLocalAttentionSpec": ("local", "attention_chunk_size"),
    "MambaSpec": ("state", ""),
}
_INCIDENTAL = ("_name_or_path", "transformers_version")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")  # of a layer, in its name
_COMMON = ("model", "chunk_tokens", "order", "backend", "num_shards", "hashing", "release")  # in an engine's layouts
_HASHES = ("sha256", "sha256_cbor")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_SCALES = "attn_temperature_tuning"  # queries: vLLM reads it from the generation config, not from Llama 4's
# Settings of a server that change what a model computes, or what it sees of media; not every release has them.
_SETTINGS = (
    *("quantization_config", "model_class_overrides"),
    *("mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method"),
)
# The values of vLLM's --load-format that read the files of the model's folder or repository.
_READ_FROM_FILES = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "gguf"),
    *("bitsandbytes", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
)

# How models' configurations name the number of KV heads, or of query heads that share one.
_KV_HEADS = re.compile(r"kv_(n_)?heads|key_value_|head_kv|heads_in_group|attention_groups|query_group")
_COUNT_GENERATED = ("presence_penalty", "frequency_penalty")
_PLUGINS = "vllm.logits_processors"  # vLLM loads every entry point of this group


class Part(NamedTuple):
    """The model's own layers, or its draft model's, in one of vLLM's groups. A group has one block table."""

    table: int
    names: list[str]
    spec: Any


def parts_of(vllm_config: Any, kv_cache_config: Any) -> tuple[list[Part], list[Part]]:
    """vLLM's groups, split into the model's own layers and its draft model's: vLLM may put both into one group."""
    own, drafts = list[Part](), list[Part]()
    has_drafter = getattr(vllm_config, "speculative_config", None) is not None
    total = int(vllm_config.model_config.get_total_num_hidden_layers()) if has_drafter else 0
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        is_draft = {name: has_drafter and _is_draft(name, total) for name in group.layer_names}
        for parts, are_drafts in ((own, False), (drafts, True)):
            names = [name for name in group.layer_names if is_draft[name] == are_drafts]
            if names or not (are_drafts or group.layer_names):  # none: the group's layers are in other pipeline stages
                parts.append(Part(table, names, _spec_of(group.kv_cache_spec, names)))
    return own, drafts


def _is_draft(name: str, total: int) -> bool:
    """Whether a layer is a draft model's: its name says so, or its number is beyond the model's `total` layers."""
    found = _NUMBER.search(name)
    return name.startswith("draft_model.") or (found is not None and int(found[1]) >= total)


def _spec_of(spec: Any, names: list[str]) -> Any:
    """The spec of these layers of a group. A group with layers of several shapes has a spec per layer."""
    by_name = getattr(spec, "kv_cache_specs", None)
    if not by_name:
        return spec
    each = [by_name[name] for name in names]
    return each[0] if all(one == each[0] for one in each) else spec


def layouts_of(
    vllm_config: Any,
    kv_cache_config: Any,
    chunk_tokens: int,
    *,
    model: str,
    shards: int = 0,
    cut: Cut = WHOLE,
    layers: Sequence[Sequence[int]] = (),
) -> CacheGroups:
    """The layouts of one shard of `model` (see `model_identity`; only needed to make keys), by cache group.

    Their `backend` is what the command line asks for, empty if that leaves the choice to vLLM: `attention_backend`
    tells what vLLM chose. With several groups, chunks are as long as the next multiple of all groups' blocks. `shards`:
    see `ConnectorConfig`; by default, heads that several ranks replicate are one shard. `cut`: how layers are cut into
    parts. `layers`: for each of vLLM's groups, the layer numbers in all pipeline stages; without them only this
    process's stage is laid out. Raises LayoutError for what PDX does not move yet and for chunks that are no multiple
    of blocks, ConfigError for block hashes that are not cryptographic.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise LayoutError(f"{name} {getattr(parallel, name)}: PDX moves only 1 so far")
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise LayoutError("this model has no KV cache; run it without PdxConnector")
    hashed = hashed_tokens(vllm_config, kv_cache_config)
    if len(groups) > 1 and not moves_groups():
        raise LayoutError(
            f"hybrid model with {len(groups)} KV cache groups ({_kinds(groups)}): PDX moves several groups of vLLM "
            "0.32 or newer; run this model without PdxConnector"
        )
    parts = parts_of(vllm_config, kv_cache_config)[0]
    is_hashed_otherwise = hashed != parts[0].spec.block_size
    if len(groups) > 1 and (len(parts) > 1 or is_hashed_otherwise):
        unit = math.lcm(hashed, *(part.spec.block_size for part in parts))
        chunk_tokens = -(-chunk_tokens // unit) * unit
    elif is_hashed_otherwise:
        raise LayoutError(f"block hashes of {hashed} tokens over blocks of {parts[0].spec.block_size} tokens")
    cache = vllm_config.cache_config
    common: dict[str, Any] = {
        "model": model,
        "chunk_tokens": chunk_tokens,
        "order": page_order(kv_cache_config),
        "backend": getattr(vllm_config.attention_config.backend, "name", ""),
        "num_shards": shards or _num_shards(vllm_config, [part.spec for part in parts]),
        "hashing": _checked_hash(cache),
        "release": release_name(),
    }
    if len(parts) > 1 or is_hashed_otherwise:
        common["hash_tokens"] = hashed
    found, places = [], []
    for table, names, spec in parts:
        shape = _shape_of(vllm_config, spec, shards, len(parts))
        if not cut.text:
            numbers = tuple(map(layer_number, names)) if len(parts) > 1 else ()
            found.append(KvLayout(num_layers=len(names), layers=numbers, **shape, **common))
            places.append(Place(table, table))
            continue
        told = layers[table] if layers else list(map(layer_number, names))
        for part, of_part in cut.split(told).items():
            found.append(KvLayout(num_layers=len(of_part), layers=of_part, **shape, **common))
            places.append(Place(cut.number_of(table, of_part[0]), table, cut.stages[part]))
    is_part = len(set(cut.stages)) > 1 and not layers
    return CacheGroups.of(found, places, num_tables=len(groups), stages=cut.text, is_part=is_part)


def drafts_of(
    vllm_config: Any, kv_cache_config: Any, groups: CacheGroups, *, drafter: str, shards: int = 0
) -> CacheGroups | None:
    """The layouts of a draft model's layers, beside the model's own `groups`. None: it has no KV cache, or one that PDX
    does not move, and fewer drafts are accepted. `drafter`: see `drafter_identity`."""
    own, parts = parts_of(vllm_config, kv_cache_config)
    first, numbered_from = groups[0], 1 + max(place.number for place in groups.places)
    common = {name: getattr(first, name) for name in _COMMON} | {"drafter": drafter}
    found, places = list[KvLayout](), list[Place]()
    try:
        if vllm_config.parallel_config.pipeline_parallel_size > 1 and parts:
            raise LayoutError("the engine has a pipeline")
        if getattr(kv_cache_config, "needs_kv_cache_zeroing", False) and parts:  # unloaded blocks would not be zeroed
            raise LayoutError("blocks have to be zeroed before their first use")
        for table, names, spec in parts:
            shape = _shape_of(vllm_config, spec, shards, len(parts))
            heads = {_num_heads(vllm_config, each, 2) for each in (spec, own[0].spec)}
            if shape["kind"] != "full" or (
                groups.num_shards < vllm_config.parallel_config.tensor_parallel_size and len(heads) > 1
            ):
                raise LayoutError(f"{type(spec).__name__} of {len(names)} layers, {sorted(heads)} heads")
            common["hash_tokens"] = 0 if first.tokens_per_hash == shape["block_tokens"] else first.tokens_per_hash
            numbers = tuple(map(layer_number, names)) if len(parts) > 1 else ()
            found.append(KvLayout(num_layers=len(names), layers=numbers, **shape, **common))
            places.append(Place(numbered_from + len(places), table))
    except LayoutError as error:
        log.warning("the KV of the draft model is not shared, and after a load it drafts worse: %s", error)
        return None
    return CacheGroups.of(found, places, num_tables=groups.num_tables) if found else None


def drafter_identity(vllm_config: Any) -> str:
    """A name for the draft model's weights and its way of drafting; empty: there is no draft model."""
    told: Any = getattr(vllm_config, "speculative_config", None)
    model = getattr(told, "draft_model_config", None)
    if model is None or model is told.target_model_config:  # n-grams need none
        return ""
    load = getattr(told, "draft_load_config", None) or vllm_config.load_config
    own = [str(getattr(told, name, None)) for name in ("method", "attention_backend", "kv_cache_dtype")]
    return " ".join([*own, model_identity(model, load.load_format)])


def _shape_of(vllm_config: Any, spec: Any, shards: int, num_parts: int) -> dict[str, Any]:
    """`_shape` of one shard, where a chunk has so many."""
    shape, ranks = _shape(spec, vllm_config.cache_config), vllm_config.parallel_config.tensor_parallel_size
    if shards not in (0, ranks):
        shape.update(_cut(shape, shards, _num_heads(vllm_config, spec, num_parts), ranks))
    return shape


def _shape(spec: Any, cache: Any) -> dict[str, Any]:
    """The fields of a `KvLayout` that a group's spec decides. Raises LayoutError for a kind that PDX does not move."""
    if not is_causal(spec):
        raise LayoutError(
            "non-causal attention layers: the KV of a prefix depends on the tokens behind it, so it cannot be used "
            "again; run this model without PdxConnector"
        )
    kind, window = _KINDS.get(type(spec).__name__, ("", ""))
    if not kind or (kind != "full" and not moves_groups()):
        raise LayoutError(
            f"a KV cache group of {type(spec).__name__}: PDX moves full attention, and with vLLM 0.32 or newer "
            "windows, chunked local attention and states; run this model without PdxConnector"
        )
    shape = {"kind": kind, "window": getattr(spec, window) if window else 0, "block_tokens": spec.block_size}
    if kind != "state":
        return shape | {
            "dtype": f"{spec.dtype} as {cache.cache_dtype}",  # the FP8 formats are all stored as uint8
            "num_heads": spec.num_kv_heads,
            "head_dim": spec.head_size,
            "page_bytes": getattr(spec, "real_page_size_bytes", spec.page_size_bytes),  # the latter may be padded
            "isa": cpu_isa(spec, cache),
        }
    if (mode := str(getattr(spec, "mamba_cache_mode", ""))) != "align":
        raise LayoutError(
            f"states that vLLM keeps in mode {mode!r}: PDX moves those that are kept at the ends of blocks; use "
            "--enable-prefix-caching, and --mamba-cache-mode align"
        )
    if getattr(spec, "num_speculative_blocks", 0):
        raise LayoutError(
            "states with speculative decoding: a state is then in one of several blocks, by how many drafts were "
            "accepted; run this model without drafts, or without PdxConnector"
        )
    sizes = [math.prod(each) * dtype.itemsize for each, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    told = ", ".join(f"{dtype}{tuple(each)}" for each, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return shape | {"dtype": told, "num_heads": 1, "head_dim": 1, "page_bytes": sum(sizes), "isa": ""}


def _num_heads(vllm_config: Any, spec: Any, num_groups: int) -> int:
    """The number of KV heads over all ranks; heads that several ranks replicate count once. 0: a state has none."""
    if type(spec).__name__ == "MLAAttentionSpec":
        return 1
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    heads = int(getattr(spec, "num_kv_heads", 0)) * ranks
    if heads != ranks or num_groups > 1:
        return heads
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    totals = [_kv_heads(model) for model in (vllm_config.model_config, draft) if model is not None]
    is_even = len(totals[0]) == 1 and all(each == totals[0] for each in totals)
    return min(heads, *totals[0]) if is_even else heads


def _kv_heads(model: Any) -> set[int]:
    """All numbers of KV heads in a model's configuration; vLLM reports one. Several or none: layers may differ."""
    config = getattr(model, "hf_text_config", None) or model.hf_config
    if any(getattr(each, "is_heterogeneous", False) for each in (model.hf_config, config)):
        return set()
    return {int(model.get_total_num_kv_heads()), *_named(config.to_dict(), _KV_HEADS)}


def _named(value: Any, name: re.Pattern[str], *, is_found: bool = False) -> Iterator[int]:
    """The integers under keys that match `name`, at any depth of a configuration."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _named(inner, name, is_found=name.search(str(key)) is not None)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _named(inner, name, is_found=is_found)
    elif is_found and isinstance(value, int):
        yield value


def _num_shards(vllm_config: Any, specs: Sequence[Any]) -> int:
    """One shard per rank, or per head if there are more ranks than heads."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    counts = {_num_heads(vllm_config, spec, len(specs)) for spec in specs}
    fewer = counts.pop() if len(counts) == 1 else 0
    return fewer if 0 < fewer < ranks and not ranks % fewer else ranks


def _cut(shape: dict[str, Any], shards: int, heads: int, ranks: int) -> dict[str, int]:
    """The fields that change in a shard if a chunk does not have one shard per rank."""
    if shape["kind"] == "state":
        raise LayoutError(f"shards {shards} of {ranks} ranks: a state cannot be cut; leave `shards` out")
    if heads % shards or (shards % ranks and (shards != heads or ranks % shards)):
        raise LayoutError(
            f"shards {shards}, where {ranks} ranks have {heads} KV heads: set `shards` to a number that divides "
            f"{heads} and that {ranks} divides, the same for all engines"
        )
    return {"num_heads": heads // shards, "page_bytes": shape["page_bytes"] * ranks // max(shards, ranks)}


def layer_number(name: str) -> int:
    """The layer's number in the model: the first number in its name."""
    found = _NUMBER.search(name)
    if found is None:
        raise LayoutError(f"the layer {name!r} has no number: PDX cannot tell it from those of other cache groups")
    return int(found[1])


def _kinds(groups: Any) -> str:
    return ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))


def naming_of(vllm_config: Any) -> dict[str, str]:
    """What other processes need, beside the layout, to name the chunks of this engine's prompts (`pdx.wire.tokens`)."""
    return {
        "root": root_hash(str(vllm_config.cache_config.prefix_caching_hash_algo)).hex(),
        "salt_tag": salt_tag(),
        "vocabulary": str(vllm_config.model_config.get_vocab_size()),
    }


def check_no_state(model: Any) -> None:
    """Raise LayoutError if some of the model's layers keep a state instead of tokens' KV, which PDX cannot move in
    every release."""
    if model.is_hybrid and not moves_groups():
        raise LayoutError(
            f"hybrid model with state-space layers ({', '.join(model.architectures)}): PDX moves models whose layers "
            "fit into one group of full attention; run this model without PdxConnector"
        )


def attention_backend(vllm_config: Any, kv_cache_config: Any) -> str:
    """The attention backends that vLLM chose for the model's layers with a KV cache; only where the model runs."""
    layers = vllm_config.compilation_config.static_forward_context
    parts = parts_of(vllm_config, kv_cache_config)[0]
    return "+".join(sorted({layers[name].get_attn_backend().get_name() for part in parts for name in part.names}))


def model_identity(model: Any, load_format: Any) -> str:
    """A name for the weights: for a folder, the digest of its files (`weights_digest`); for a hub name, its commit.

    The location of the weights does not matter, so the same model on two hosts has one identity. Its quantization, its
    configuration, and server settings that change what it computes do matter. If the content of the weights is unknown,
    a part of the name is random.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"pdx-model-1")
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _INCIDENTAL}
    parts = [json.dumps(config, sort_keys=True, default=str), str(model.dtype), str(model.quantization)]
    # Above a limit vLLM turns keys by other factors, or scales queries by default.
    if "longrope" in parts[0] or _SCALES in parts[0]:
        parts.append(f"max_model_len {model.max_model_len}")
    if _SCALES in parts[0]:
        said = {**model.try_get_generation_config(), **model.override_generation_config}
        parts.append(f"{_SCALES} {said.get(_SCALES)}")
    for place in (model, getattr(model, "multimodal_config", None)):
        parts += [f"{name} {told!r}" for name in _SETTINGS if (told := getattr(place, name, None))]
    parts.append(_weights(model, str(load_format)))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def why_unnamed(model: Any, load_format: Any, cache: Any) -> str:
    """Why other engines cannot give this model's chunks the same names; empty: they can."""
    place = _place(model)
    if str(load_format) == "dummy":
        pass
    elif str(load_format) not in _READ_FROM_FILES:
        return f"--load-format {load_format} takes the weights from elsewhere than the model's own files"
    elif place.exists() and not weight_files(place):
        return f"{str(place)!r} has no weights of a known format ({', '.join(SUFFIXES)})"
    elif not place.exists() and not _commit(model):
        return f"the weights of {str(_place(model))!r} are no files here, and have no commit"
    if getattr(cache, "calculate_kv_scales", False):
        return "--calculate-kv-scales scales the cache by the first prompt that an engine gets"
    return ""


def _weights(model: Any, load_format: str) -> str:
    if load_format == "dummy":
        return f"dummy weights from seed {model.seed}"
    if why_unnamed(model, load_format, None):
        return f"of this life: {secrets.token_hex(16)}"
    place = _place(model)
    return f"files {weights_digest(weight_files(place)).hex()}" if place.exists() else f"{model.model}@{_commit(model)}"


def _place(model: Any) -> Path:
    """Where the weights are. The configuration may be elsewhere: vLLM copies it from an object store."""
    return Path(getattr(model, "model_weights", "") or model.model)


def _commit(model: Any) -> str:
    """The commit that the model's branch or tag named when the configuration was read; empty: unknown."""
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return str(commit)
    return model.revision if _COMMIT.fullmatch(model.revision or "") else ""


def _checked_hash(cache: Any) -> str:
    name = str(cache.prefix_caching_hash_algo)
    if name not in _HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo {name!r} can be made to collide; PDX needs one of {', '.join(_HASHES)} "
            "(--prefix-caching-hash-algo sha256)"
        )
    return name


def facts_of(vllm_config: Any, *, stops_short: bool = False) -> EngineFacts:
    """What this server's own configuration adds to every request; the proxy must know it to forward first tokens.

    `--generation-config` and `--override-generation-config` give defaults to requests that set nothing (in vLLM
    entrypoints/openai/completion/serving.py and protocol.py), since 0.31 for all three penalties. Of these,
    `repetition_penalty` counts the tokens of the prompt like generated ones (model_executor/layers/utils.py); the other
    two count generated tokens only.
    """
    model = vllm_config.model_config
    defaults = model.get_diff_sampling_param()
    backward = list(_looking_back(vllm_config, defaults))
    if backward:
        log.warning(
            "no first token of this engine's completions is forwarded: %s may look at the tokens generated before",
            ", ".join(backward),
        )
    # As in vLLM's own servers: the model's own generation_config.json only has a request's defaults, and no cap.
    own = model.generation_config in ("auto", "vllm")
    cap = model.override_generation_config.get("max_new_tokens") if own else defaults.get("max_tokens")
    return EngineFacts(model.max_model_len, cap or 0, looks_back=bool(backward), stops_short=stops_short)


def _looking_back(vllm_config: Any, defaults: dict[str, Any]) -> Iterator[str]:
    model = vllm_config.model_config
    yield from (f"the default {name} {defaults[name]}" for name in _COUNT_GENERATED if defaults.get(name))
    yield from (f"logits processor {each}" for each in model.logits_processors or ())
    yield from (f"logits processor {each.value}" for each in entry_points(group=_PLUGINS))
    if is_watermarked(vllm_config):
        yield "watermarking"
    if is_diffusion(model):
        yield "the order in which a diffusion model generates"
