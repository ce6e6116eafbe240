"""Everything that differs between the releases of vLLM that PDX runs on; no other module asks for the release.

Each difference is a function here. Tests of `tests/connector` (`.ci/releases` names them) check them against vLLM's own
classes: those of the installed release, and with `make releases` those of all.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import weakref
from types import SimpleNamespace
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import KVConnectorOutput
from vllm.version import __version__, __version_tuple__

from pdx.errors import ConfigError

log = logging.getLogger("pdx.vllm")

OLDEST, NEWEST = (0, 28), (0, 33)  # the border's tests run against these, and all between
RELEASE: tuple[int, int] = __version_tuple__[:2]  # (0, 0) where vLLM was built without a version


def check_release(*, any_release: bool) -> None:
    """Raise ConfigError if the release is unknown or too old, or if its engines could not find each other's chunks.
    `any_release`: accept one that is unknown or newer, although its handling of failed loads is not known."""
    tested = f"PDX is tested with {_name(OLDEST)} to {_name(NEWEST)}"
    if RELEASE > NEWEST or RELEASE == (0, 0):
        if not any_release:
            raise ConfigError(
                f"vLLM {__version__} is not known to PDX: {tested}, and wrong tokens are what a connector gives that "
                'takes another release for one of these; install one of them, or set "any_release": true'
            )
        log.warning("vLLM %s is not known to PDX: %s", __version__, tested)
    elif RELEASE < OLDEST:
        raise ConfigError(f"vLLM {__version__} is too old: {tested}; install one of these")
    if RELEASE == (0, 28) and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            "PYTHONHASHSEED is not set: vLLM 0.28 hashes blocks differently in each process then, so no engine finds "
            "another one's chunks. Set PYTHONHASHSEED=0 for all engines, or install vLLM 0.29 or newer"
        )


def release_name() -> str:
    """The release's name in the layout of its pages (`KvLayout.release`)."""
    return __version__ if RELEASE == (0, 0) else _name(RELEASE)


def reports_blocks() -> bool:
    """Whether vLLM is told which blocks were not loaded, and keeps the blocks before them. Otherwise it is told which
    requests failed, and recomputes all of their blocks. Where both are possible, the second would void the first."""
    return any(field.name == "invalid_block_ids" for field in dataclasses.fields(KVConnectorOutput))


def moves_groups() -> bool:
    """Whether several cache groups can be moved: since 0.32 vLLM shows a request's blocks in all of them."""
    return RELEASE >= (0, 32)


def trims_session_hashes() -> bool:
    """Whether a streaming session loses its last token with the hash of that token's block: older releases keep it."""
    return RELEASE >= (0, 32)


def check_nested() -> None:
    """Raise ConfigError if the scheduler half cannot learn the order of a page's bytes: inside another connector no
    worker reports it (`page_order`)."""
    if RELEASE == (0, 28):
        raise ConfigError(
            "PdxConnector inside another connector needs vLLM 0.29 or newer: in 0.28 only the workers know in which "
            "order a page's bytes lie"
        )


_told: weakref.WeakSet[Any] = weakref.WeakSet()  # connectors to be notified of sleep


def tell_of_sleep(connector: Any) -> None:
    """Have vLLM's worker in this process notify `connector` of sleep, as it does by itself since 0.33."""
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("sleep", "discard", "wake_up"):
        own = getattr(Worker, name, None)  # not every release can discard a part
        if own is not None and not hasattr(own, "__wrapped__"):
            setattr(Worker, name, _telling(name, own))
    _told.add(connector)


def _telling(name: str, own: Any) -> Any:
    """Wrap the worker's `own` method of that name, so that it also notifies connectors."""

    @functools.wraps(own)
    def telling(worker: Any, *args: Any, **settings: Any) -> Any:
        tags = settings.get("tags", args[0] if args else None)
        if name == "sleep" or (name == "discard" and "kv_cache" in (tags or ())):
            for each in list(_told):
                each.unregister_kv_caches()
        result = own(worker, *args, **settings)
        if name == "wake_up" and (tags is None or "kv_cache" in tags):
            for each in list(_told):
                each.restore_kv_caches()
        return result

    return telling


def hashed_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash. Before 0.32 only vLLM's scheduler knows; with one group it is the cache's block size."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    return int(told or vllm_config.cache_config.block_size)


def root_hash(algorithm: str) -> bytes:
    """The hash that a prompt's first block is chained to. vLLM initializes it only after the scheduler half was made.
    With the hash algorithms that PDX accepts (in 0.28, and a fixed seed) it is always the same."""
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
    return bytes(kv_cache_utils.NONE_HASH)


def salt_tag() -> str:
    """The tag beside a cache salt in the hash of a prompt's first block; empty: the salt is hashed without a tag."""
    request = SimpleNamespace(cache_salt="salt", lora_request=None, mm_features=[], prompt_embeds=None)
    extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, 1, 0)
    return "" if extra == ("salt",) else str(extra[0][0])


def page_order(kv_cache_config: Any) -> str:
    """The physical order of the cache's dimensions. Empty: only the workers know it, as in 0.28."""
    if hasattr(kv_cache_config, "kv_cache_layout"):
        return str(kv_cache_config.kv_cache_layout or "")
    if get_current_vllm_config_or_none() is None:
        return ""
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    return str(get_kv_cache_layout())


def cpu_isa(spec: Any, cache: Any) -> str:
    """The instruction set by which vLLM packs pages on this CPU; empty on GPUs. vLLM has no public function for it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache.cache_dtype))


def is_watermarked(vllm_config: Any) -> bool:
    """Whether the engine watermarks its answers; not every release has such a setting."""
    return getattr(vllm_config, "watermark_config", None) is not None


def is_diffusion(model: Any) -> bool:
    """Whether the model does not generate from left to right; not every release runs such models."""
    return bool(getattr(model, "is_diffusion", False))


def can_reuse(model: Any) -> bool:
    """Whether vLLM lets a model start behind a prefix it has not computed: some pooling models need all of a prompt."""
    return bool(getattr(model, "is_prefix_caching_supported", True))


def skips_cache(request: Any) -> bool:
    """Whether a request needs every token of its prompt computed: for prompt logprobs, or for a vector per token.

    Not every release checks that itself when a connector reports a hit.
    """
    sampling, pooling = getattr(request, "sampling_params", None), getattr(request, "pooling_params", None)
    return (
        bool(getattr(request, "skip_reading_prefix_cache", False))
        or getattr(sampling, "prompt_logprobs", None) is not None
        or getattr(pooling, "task", None) in ("token_embed", "token_classify")
    )


def is_causal(spec: Any) -> bool:
    """Whether the KV of a token depends on no later one; not every release says so of a group of layers."""
    return not getattr(spec, "non_causal", False)


def _name(release: tuple[Any, ...]) -> str:
    return ".".join(map(str, release))
