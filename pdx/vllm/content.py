"""Content names for the inputs of a request other than tokens: media and LoRA adapters.

vLLM hashes media by a name that their sender chose, by a counter, or by their bytes and the model's path; adapters by
name and path. That suffices for vLLM's own cache, which ends with the process, but chunks are found later and by other
engines. So blocks of a request with media or an adapter are hashed here as vLLM hashes them, with content digests in
place of those names. A request without such digests is neither saved nor found.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from blake3 import blake3  # vLLM depends on it, and it takes less than half of SHA-256's time
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

from pdx.engine.step import BlockHashing, LeftOut
from pdx.memory.form import apart_salt
from pdx.telemetry.recent import remember
from pdx.vllm.adapters import MAX_KNOWN, Adapter, AdapterDigests, Claim, adapter_of
from pdx.vllm.releases import can_reuse, skips_cache, trims_session_hashes

log = logging.getLogger("pdx.vllm")

_HEX = 64  # digits of a digest
# Others would find its blocks in vLLM's own cache under their hashes, and save them. Before 0.31 vLLM hashes the name
# of an adapter like a salt, which a request without one may have.
_MISNAMED = "misnamed"
_NO_MEDIA = LeftOut(
    "unnamed_media",
    "the media of request %s are neither saved nor found: their content is not in the engine's core process (see "
    "docs/vllm.md#media)",
)
_NO_ADAPTER = LeftOut(
    "unnamed_adapter",
    "request %s is neither saved nor found: the files of its LoRA adapter cannot be read here, or were changed while "
    "they were loaded (see docs/vllm.md#lora)",
)
_UNTOLD_ADAPTER = LeftOut("untold_adapter", "")  # the first request of each adapter: no reason to warn
_NO_HASHES = LeftOut(
    "unnamed_inputs", "request %s is neither saved nor found: this vLLM has hashed its blocks for good"
)
_STALE_SESSION = LeftOut(
    "unnamed_inputs",
    "request %s is neither saved nor found: vLLM keeps what a streaming session discards, hashes before 0.32, accepted "
    "drafts without async scheduling, and states with it; install 0.32 or newer, propose drafts with async scheduling "
    "alone, and run a model with states with --no-async-scheduling",
)
_MIXED = LeftOut(
    "unnamed_inputs",
    "request %s is neither saved nor found: vLLM's hashes do not tell its tokens from its prompt embeddings; send a "
    "prompt of either",
)
_NO_REUSE = LeftOut("", "")  # as intended: neither counted nor logged


class Content(BlockHashing):
    """Names the inputs of one engine's requests by content. Used on the scheduler's thread."""

    def __init__(self, vllm_config: Any, *, has_state: bool = False) -> None:
        """`has_state`: the model keeps states instead of some layers' KV."""
        super().__init__(tail_hash)
        self.claims: dict[str, Claim] = {}  # by request id, until the request ends
        self._can_reuse = can_reuse(vllm_config.model_config)
        if not self._can_reuse:
            log.warning("nothing is saved or found for this model: vLLM does not let it reuse prefixes")
        lora = getattr(vllm_config, "lora_config", None)
        self._lora_dtype = str(getattr(lora, "lora_dtype", ""))
        modules = getattr(lora, "target_modules", None)
        self._lora_modules = modules if modules is None else sorted(modules)  # the only ones adapted; None: all
        drafts = getattr(vllm_config, "speculative_config", None)
        keeps_drafts = drafts is not None and not vllm_config.scheduler_config.async_scheduling  # behind answers' ends
        keeps_states = has_state and vllm_config.scheduler_config.async_scheduling  # that the discarded token advanced
        self._has_stale_sessions = keeps_drafts or keeps_states or not trims_session_hashes()
        self._has_towers = bool(getattr(lora, "enable_tower_connector_lora", False))
        # An external encoder knows media by vLLM's names, and this process has only their sizes.
        self._media = _Media(is_whole=getattr(vllm_config, "ec_transfer_config", None) is None)
        self._digests = AdapterDigests()
        self._loaded: OrderedDict[int, Claim] = OrderedDict()  # as the workers report, by adapter number
        self._claimed: OrderedDict[int, Claim] = OrderedDict()  # the latest by requests since then, by adapter number

    @staticmethod
    def keep_apart(request: Any, form: str) -> bool:
        """Keep vLLM's prefix cache from sharing blocks between this request and requests without the same `form`.

        The form goes into the cache salt, which is in the hash of the first block and thereby in all hashes; no
        client's salt can equal it. False: vLLM cannot hash the request's blocks again.
        """
        salt = request.cache_salt or ""
        if (apart := apart_salt(form, salt)) == salt:
            return True
        if not hasattr(request, "update_block_hashes"):
            return False
        request.cache_salt = apart
        request.block_hashes.clear()
        request.update_block_hashes()
        return True

    def beside(self, request: Any) -> bytes | None:
        """The digest of the request's adapter, empty without one. None with media or embeddings, which are in blocks'
        hashes, too, in a session, whose later inputs may bring them, or if the adapter is not known."""
        has_more = request.mm_features or getattr(request, "prompt_embeds", None) is not None
        if has_more or getattr(request, "resumable", False):
            return None
        if not request.lora_request:
            return b""
        hasher = getattr(request, "_block_hasher", None)
        if not isinstance(hasher, ByContent) or not hasher.adapter or request.request_id not in self.claims:
            return None
        return hasher.adapter.encode()

    def tokens(self, request: Any, first: int, end: int) -> Sequence[int]:
        found: Sequence[int] = request.all_token_ids[first:end]
        return found

    def name_inputs(self, request: Any, is_new: bool) -> LeftOut | None:
        """Have the request's blocks hashed by content, or say why it is left out. `is_new`: vLLM has not looked up any
        of them yet; afterwards it is too late. Never fails: a request whose inputs raise an exception is left out."""
        try:
            return self._name(request, is_new)
        except Exception as error:  # inputs can be anything, and files can fail
            log.debug("the inputs of request %s could not be named", request.request_id, exc_info=True)
            why = f"{type(error).__name__}: {str(error)[:200]!r}".replace("%", "%%")
            return LeftOut("naming_failed", f"request %s is neither saved nor found, its inputs have no names: {why}")

    def _name(self, request: Any, is_new: bool) -> LeftOut | None:
        if not self._can_reuse:
            return _NO_REUSE
        lora, media = request.lora_request, request.mm_features
        hasher = getattr(request, "_block_hasher", None)
        may_get_media = hasher is not None and getattr(request, "resumable", False)  # by a later input of its session
        is_stale = may_get_media and self._has_stale_sessions
        is_mixed = getattr(request, "prompt_is_token_ids", None)  # where an embedding lies, 0 is hashed
        needs_all = skips_cache(request)
        if is_new and (is_stale or is_mixed or (lora and needs_all)):
            self.keep_apart(request, _MISNAMED)
        if is_stale or is_mixed:
            return _STALE_SESSION if is_stale else _MIXED
        if needs_all:
            return _NO_REUSE
        if not lora and not media and not may_get_media:
            return None
        if hasher is None or not is_new:
            return _NO_HASHES
        claim = self._claim(lora) if lora else None
        if claim and not claim.digest:
            self.keep_apart(request, _MISNAMED)
            return _NO_ADAPTER
        adapter = self._adapter(lora, claim.digest) if claim else None
        if lora and not claim:  # vLLM's own cache has blocks under the adapter's name, perhaps of other weights
            adapter = secrets.token_hex(_HEX // 2)
        tower = adapter if self._has_towers else None
        if not all(self._media.name(each, tower) for each in media):
            return _NO_MEDIA
        _hash_again(request, ByContent(hasher, self._media, adapter, tower))
        if claim:
            self.claims[request.request_id] = remember(self._claimed, claim.adapter.number, claim, MAX_KNOWN)
        return _UNTOLD_ADAPTER if lora and not claim else None

    def shorten(self, request: Any) -> bool:
        """Drop the prompt's last token, as `NixlConnector` does. vLLM has only read the tokens of a new request."""
        length = request.num_prompt_tokens - 1
        ends = (each.mm_position.offset + each.mm_position.length for each in request.mm_features)
        is_text = request.prompt_token_ids and not request.prompt_is_token_ids and max(ends, default=0) <= length
        if not length or not is_text or request.resumable:
            return False
        request.prompt_token_ids = request.prompt_token_ids[:length]  # the list may be shared with others
        del request._all_token_ids[length:]
        request.num_prompt_tokens = length
        request.block_hashes.clear()
        request.update_block_hashes()
        return True

    def forget(self, request_id: str) -> bool:
        """The request is over. True: it is hashed by other weights than those loaded, and must not be found."""
        claim = self.claims.pop(request_id, None)
        return claim is not None and self._loaded.get(claim.adapter.number, claim) != claim

    def heard(self, loaded: Mapping[Adapter, str]) -> bool:
        """Note that workers have loaded these adapters. True: requests, perhaps finished ones, were hashed by other
        weights meanwhile, so no block in vLLM's own cache may be found."""
        is_other = False
        for adapter, digest in loaded.items():
            claim = remember(self._loaded, adapter.number, Claim(adapter, digest), MAX_KNOWN)
            is_other |= self._claimed.pop(adapter.number, claim) != claim
        return is_other

    def _adapter(self, lora: Any, files: str) -> str:
        is_3d = bool(getattr(lora, "is_3d_lora_weight", False))
        told = f"{files}:{self._lora_dtype}:{is_3d}:{self._lora_modules}"
        return hashlib.sha256(told.encode()).hexdigest()

    def _claim(self, lora: Any) -> Claim | None:
        """The adapter's weights as the workers report them; None: they have not yet, an empty digest: they do not know.
        The files may have changed since they were loaded, and vLLM's own cache goes by the adapter's name, too."""
        adapter = adapter_of(lora)
        if getattr(lora, "load_inplace", False) and (digest := self._digests.of(adapter.path)):
            return Claim(adapter, digest)  # vLLM reads it for each step
        claim = self._loaded.get(adapter.number)
        if claim is None or claim.adapter != adapter:
            return None
        return remember(self._loaded, adapter.number, claim, MAX_KNOWN)


def _hash_again(request: Any, hasher: ByContent) -> None:
    """Hash the request's blocks by `hasher` from now on. On an error the request stays as it was."""
    before = request._block_hasher, list(request.block_hashes)
    request._block_hasher = hasher
    request.block_hashes.clear()
    try:
        request.update_block_hashes()
    except Exception:
        request._block_hasher, request.block_hashes[:] = before
        raise


class ByContent:
    """vLLM's block hasher, which is given the request with content names.

    Content names are bytes where vLLM's names are text, so no client can choose one.
    """

    def __init__(
        self, hasher: Callable[[Any], list[Any]], media: _Media, adapter: str | None, tower: str | None
    ) -> None:
        self._hasher, self._media, self._tower = hasher, media, tower
        self._seen: list[Any] = []
        self.adapter = adapter

    def __call__(self, request: Any) -> list[Any]:
        return self._hasher(_Seen(request, self))

    def media_of(self, request: Any) -> list[Any]:
        """The request's media as they are hashed. vLLM hashes after each input of a session, and only adds media: each
        is named once, before vLLM's encoder cache has it, which could not free it under another name."""
        self._seen += [self._media.seen(each, self._tower) for each in request.mm_features[len(self._seen) :]]
        return self._seen


def tail_hash(request: Any, parent: bytes | None, start: int, end: int) -> bytes:
    """vLLM's chained block hash of tokens [start, end), which need not be a whole number of blocks.

    It covers everything that a block's hash covers: LoRA and multimodal inputs by content, cache salt, embeddings.
    Values are serialized with CBOR: vLLM's default, pickle, may give different bytes for equal objects.
    """
    extra_keys, _ = kv_cache_utils.generate_block_hash_extra_keys(as_hashed(request), start, end, 0)
    tokens = request.all_token_ids[start:end]
    return bytes(kv_cache_utils.hash_block_tokens(sha256_cbor, parent, tokens, extra_keys))


def as_hashed(request: Any) -> Any:
    """The request as its block hashes see it: with content names, if it was given any."""
    hasher = getattr(request, "_block_hasher", None)
    return _Seen(request, hasher) if isinstance(hasher, ByContent) else request


class _Seen:
    """A view of a request with content names for its adapter and its media. Made for one use."""

    def __init__(self, request: Any, names: ByContent) -> None:
        self._request, self._adapter = request, names.adapter
        self.mm_features = names.media_of(request)

    @property
    def lora_request(self) -> Any:
        if self._adapter is None:
            return None
        return SimpleNamespace(lora_name=bytes.fromhex(self._adapter), lora_path="", lora_int_id=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Media:
    """Names images, audio and videos by the processor's output, which is what the model sees.

    A name is stored where vLLM stores its own, so vLLM's encoder cache goes by content, too. It begins with a random
    prefix of this engine, so no client's name can collide with it.
    """

    def __init__(self, *, is_whole: bool) -> None:
        """`is_whole`: this process has the processor's output, not only its sizes."""
        self._is_whole = is_whole
        self._life = secrets.token_hex(16)
        self._known: dict[int, tuple[weakref.ref[Any], bytes]] = {}  # by identity: vLLM's cache returns items again

    def name(self, feature: Any, tower: str | None) -> bool:
        """Name one of a request's `mm_features` by content. False: the content is not here, or of an unknown type.
        `tower`: the adapter that also changes the encoder's weights."""
        content = self._content(feature.data) if self._is_whole else None
        if content is None:
            return False
        place = feature.mm_position
        digest = blake3(content)
        told = [feature.modality, tower, place.length, getattr(place, "is_embed", None)]
        if not _feed(digest, told):
            return False
        feature.identifier = self._life + digest.hexdigest()
        return True

    def seen(self, feature: Any, tower: str | None) -> Any:
        """The feature as it is hashed. One without a name comes from a session: nothing behind it is ever found."""
        try:
            is_named = self.name(feature, tower)
        except Exception:  # an exception here would end vLLM
            log.debug("media of a session could not be named", exc_info=True)
            is_named = False
        name = bytes.fromhex(feature.identifier[-_HEX:]) if is_named else secrets.token_bytes(_HEX // 2)
        return SimpleNamespace(identifier=name, mm_position=feature.mm_position)

    def _content(self, item: Any) -> bytes | None:
        if item is None or "address" in item:  # it is in memory that only the workers read
            return None
        known = self._known.get(id(item))
        if known is not None and known[0]() is item:
            return known[1]
        digest = blake3(b"pdx-media-1")
        for key in sorted(item):
            if not (_feed(digest, key) and _feed(digest, item[key].data)):
                return None
        where = id(item)
        kept = weakref.ref(item, lambda _: self._known.pop(where, None))
        self._known[where] = (kept, digest.digest())
        return digest.digest()


def _feed(digest: Any, value: Any) -> bool:
    """Feed a value into a digest, unambiguously. False: its type is not supported."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        _part(digest, "tensor", f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy())
        return True
    if isinstance(value, numpy.ndarray):
        if value.dtype.hasobject:
            return False
        _part(digest, "array", f"{value.dtype.str}{value.shape}".encode())
        digest.update(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
        return True
    if isinstance(value, list | tuple):
        _part(digest, "list", str(len(value)).encode())
        return all(_feed(digest, each) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        _part(digest, type(value).__name__, repr(value).encode())
        return True
    return False


def _part(digest: Any, kind: str, content: bytes) -> None:
    digest.update(f"{kind}:{len(content)}:".encode() + content)
