"""What reaches the model of a request beside its tokens, under names of its content.

vLLM hashes media by what their sender calls them, by a counter, or by their bytes and the model's path; adapters by
name and path. Its own cache ends with the process, so these may mean the same all that time; chunks are found by other
engines, and later. So blocks of a request with media or an adapter are hashed here as vLLM hashes them, but with
digests in the place of those names, and a request that has no such digest is neither saved nor found.
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
from blake3 import blake3  # which vLLM needs, and which takes less than half of SHA-256's time
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

from pdx.engine.step import BlockHashing, LeftOut
from pdx.memory.form import apart_salt
from pdx.telemetry.recent import remember
from pdx.vllm.adapters import MAX_KNOWN, Adapter, AdapterDigests, Claim, adapter_of
from pdx.vllm.releases import can_reuse, skips_cache

log = logging.getLogger("pdx.vllm")

_HEX = 64  # digits of a digest
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
_UNTOLD_ADAPTER = LeftOut("untold_adapter", "")  # the first request of each, which is nothing to warn of
_NO_HASHES = LeftOut(
    "unnamed_inputs", "request %s is neither saved nor found: this vLLM has hashed its blocks for good"
)
_NO_REUSE = LeftOut("", "")  # as it should be


class Content(BlockHashing):
    """Names for the inputs of one engine's requests. On the scheduler's thread."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(tail_hash)
        self.claims: dict[str, Claim] = {}  # of requests with an adapter, until they end
        self._can_reuse = can_reuse(vllm_config.model_config)
        if not self._can_reuse:
            log.warning("nothing is saved or found for this model: vLLM does not let it reuse prefixes")
        lora = getattr(vllm_config, "lora_config", None)
        self._lora_dtype = str(getattr(lora, "lora_dtype", ""))
        modules = getattr(lora, "target_modules", None)
        self._lora_modules = modules if modules is None else sorted(modules)  # the only ones; None: all
        self._has_towers = bool(getattr(lora, "enable_tower_connector_lora", False))
        # An encoder elsewhere is told of media by vLLM's names, and this process has no more than their sizes.
        self._media = _Media(is_whole=getattr(vllm_config, "ec_transfer_config", None) is None)
        self._digests = AdapterDigests()
        self._loaded: OrderedDict[int, Claim] = OrderedDict()  # as workers have told, by number
        self._claimed: OrderedDict[int, Claim] = OrderedDict()  # the last ones of requests since, by number

    @staticmethod
    def keep_apart(request: Any, form: str) -> bool:
        """Let vLLM's prefix cache give no blocks of this request to those without the same `form`, nor theirs to it.

        Its cache salt, which is in the hash of its first block and so in all of them, says the form; no client's salt
        can say the same. False: vLLM has hashed its blocks for good.
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
        """The digest of its adapter. Pictures and embeddings are in blocks' hashes, too, and an input of a session may
        bring them later."""
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
        """Have the request's blocks hashed by content, or say why it is left out. `is_new`: vLLM has looked none of
        them up so far; later it is too late for that. Never fails: a request whose inputs raise is left out."""
        try:
            return self._name(request, is_new)
        except Exception as error:  # of inputs, which are as their makers like, and of files
            log.debug("the inputs of request %s could not be named", request.request_id, exc_info=True)
            why = f"{type(error).__name__}: {str(error)[:200]!r}".replace("%", "%%")
            return LeftOut("naming_failed", f"request %s is neither saved nor found, its inputs have no names: {why}")

    def _name(self, request: Any, is_new: bool) -> LeftOut | None:
        if not self._can_reuse or skips_cache(request):
            return _NO_REUSE
        lora, media = request.lora_request, request.mm_features
        hasher = getattr(request, "_block_hasher", None)
        may_get_media = hasher is not None and getattr(request, "resumable", False)  # by a later input of its session
        if not lora and not media and not may_get_media:
            return None
        if hasher is None or not is_new:
            return _NO_HASHES
        claim = self._claim(lora) if lora else None
        if claim and not claim.digest:
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
        """As `NixlConnector` does it. vLLM has read nothing of a new request but its tokens."""
        length = request.num_prompt_tokens - 1
        ends = (each.mm_position.offset + each.mm_position.length for each in request.mm_features)
        is_text = request.prompt_token_ids and not request.prompt_is_token_ids and max(ends, default=0) <= length
        if not length or not is_text or request.resumable:
            return False
        request.prompt_token_ids = request.prompt_token_ids[:length]  # the list may be its caller's, or other requests'
        del request._all_token_ids[length:]
        request.num_prompt_tokens = length
        request.block_hashes.clear()
        request.update_block_hashes()
        return True

    def forget(self, request_id: str) -> bool:
        """The request is over. Whether other weights are loaded than it is hashed by: nobody should find its blocks."""
        claim = self.claims.pop(request_id, None)
        return claim is not None and self._loaded.get(claim.adapter.number, claim) != claim

    def heard(self, loaded: Mapping[Adapter, str]) -> bool:
        """Workers have loaded these adapters. Whether requests were hashed by other weights meanwhile, some of which
        may be over: nobody should find what is in vLLM's own cache."""
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
        """What the workers have loaded, by their own word; with an empty digest: they do not know it. None: they have
        not told so far. What is in the files now may not be it, and vLLM's own cache goes by this name, too."""
        adapter = adapter_of(lora)
        if getattr(lora, "load_inplace", False) and (digest := self._digests.of(adapter.path)):
            return Claim(adapter, digest)  # it is read for each step
        claim = self._loaded.get(adapter.number)
        if claim is None or claim.adapter != adapter:
            return None
        return remember(self._loaded, adapter.number, claim, MAX_KNOWN)


def _hash_again(request: Any, hasher: ByContent) -> None:
    """Hash the request's blocks so from now on; where that fails, all is as it was."""
    before = request._block_hasher, list(request.block_hashes)
    request._block_hasher = hasher
    request.block_hashes.clear()
    try:
        request.update_block_hashes()
    except Exception:
        request._block_hasher, request.block_hashes[:] = before
        raise


class ByContent:
    """vLLM's function that hashes a request's blocks, which sees the request with names of content.

    These are bytes where vLLM's are text, so that no client's word is ever one of them.
    """

    def __init__(
        self, hasher: Callable[[Any], list[Any]], media: _Media, adapter: str | None, tower: str | None
    ) -> None:
        self._hasher = hasher
        self.media, self.adapter, self.tower = media, adapter, tower

    def __call__(self, request: Any) -> list[Any]:
        return self._hasher(_Seen(request, self))


def tail_hash(request: Any, parent: bytes | None, start: int, end: int) -> bytes:
    """vLLM's chained block hash of tokens [start, end), which need not be a whole number of blocks.

    With everything that is in a block's hash: LoRA and multimodal inputs by their content, cache salt, embeddings.
    Hashed through CBOR: the default goes through pickle, whose bytes may differ between equal objects.
    """
    extra_keys, _ = kv_cache_utils.generate_block_hash_extra_keys(as_hashed(request), start, end, 0)
    tokens = request.all_token_ids[start:end]
    return bytes(kv_cache_utils.hash_block_tokens(sha256_cbor, parent, tokens, extra_keys))


def as_hashed(request: Any) -> Any:
    """The request as the hashes of its blocks see it."""
    hasher = getattr(request, "_block_hasher", None)
    return _Seen(request, hasher) if isinstance(hasher, ByContent) else request


class _Seen:
    """A request with other names for its adapter and its media; all else is its own. Made for one use."""

    def __init__(self, request: Any, names: ByContent) -> None:
        self._request, self._names = request, names
        self._features: list[Any] | None = None

    @property
    def lora_request(self) -> Any:
        if self._names.adapter is None:
            return None
        return SimpleNamespace(lora_name=bytes.fromhex(self._names.adapter), lora_path="", lora_int_id=0)

    @property
    def mm_features(self) -> list[Any]:
        """To which a session may have added some."""
        if self._features is None:
            media, tower = self._names.media, self._names.tower
            self._features = [media.seen(each, tower) for each in self._request.mm_features]
        return self._features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Media:
    """Names of pictures, sounds and videos, by what the processor has made of them: that is what the model sees.

    A name is kept where vLLM keeps its own, so that its cache of encoder outputs goes by content, too, and begins with
    what was drawn for this engine: no client calls there what is not named here by the same letters.
    """

    def __init__(self, *, is_whole: bool) -> None:
        """`is_whole`: this process has what the processor has made of media, and not their sizes alone."""
        self._is_whole = is_whole
        self._life = secrets.token_hex(16)
        self._named: dict[int, weakref.ref[Any]] = {}  # features named here, by identity: letters may be a client's
        self._known: dict[int, tuple[weakref.ref[Any], bytes]] = {}  # by the identity of what vLLM's cache gives again

    def name(self, feature: Any, tower: str | None) -> bool:
        """Name the content of one of a request's `mm_features`; False: it is not here. `tower`: the adapter whose
        weights its encoder has, too."""
        where = id(feature)
        if (named := self._named.get(where)) is not None and named() is feature:
            return True
        content = self._content(feature.data) if self._is_whole else None
        if content is None:
            return False
        place = feature.mm_position
        digest = blake3(content)
        told = [feature.modality, tower, place.length, getattr(place, "is_embed", None)]
        if not _feed(digest, told):
            return False
        feature.identifier = self._life + digest.hexdigest()
        self._named[where] = weakref.ref(feature, lambda _: self._named.pop(where, None))
        return True

    def seen(self, feature: Any, tower: str | None) -> Any:
        """The feature as it is hashed. One without a name was added to a session: nobody finds what is behind it."""
        try:
            is_named = self.name(feature, tower)
        except Exception:  # vLLM, which asks for these hashes, would end
            log.debug("media of a session could not be named", exc_info=True)
            is_named = False
        name = bytes.fromhex(feature.identifier[-_HEX:]) if is_named else secrets.token_bytes(_HEX // 2)
        return SimpleNamespace(identifier=name, mm_position=feature.mm_position)

    def _content(self, item: Any) -> bytes | None:
        if item is None or "address" in item:  # of memory that only the workers read
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
    """Put a value into a digest in one way only; False: it is of a kind that is not known here."""
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
