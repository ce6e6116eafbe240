"""The weights of LoRA adapters: digests of their files, and which of them an engine's workers have loaded.

vLLM identifies an adapter by name and path, and may load it at any time: when it is registered, when a request needs
one that was dropped, or in each step if it is replaced in place. So the workers report what they have loaded, the
scheduler half says under which digest a request is saved and found, and each worker compares the two.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdx.engine.plan import NO_EPOCH, StepPlan
from pdx.telemetry.recent import remember

log = logging.getLogger("pdx.vllm")

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_FILES = (_CONFIG, *_WEIGHTS, "new_embeddings.safetensors", "new_embeddings.bin")
_SETTLED_NS = 100_000_000  # a file changed more recently may change again within the same timestamp
MAX_KNOWN = 1024

_Signature = tuple[tuple[str, int, int, int, int, int], ...]


class Adapter(NamedTuple):
    """An adapter as vLLM identifies it."""

    number: int
    name: str
    path: str


class Claim(NamedTuple):
    """The adapter of a request, and the digest by which its chunks are named."""

    adapter: Adapter
    digest: str


def adapter_of(lora_request: Any) -> Adapter:
    """The adapter of vLLM's `LoRARequest`."""
    return Adapter(int(lora_request.lora_int_id), str(lora_request.lora_name), str(lora_request.lora_path))


class AdapterDigests:
    """Digests of the files of adapters. A file is read again only where its size, its times or its inode changed."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[_Signature, str]] = OrderedDict()

    def of(self, path: str) -> str:
        """64 hex digits over the whole configuration and weights at vLLM's `lora_path`; empty: they cannot be read, or
        are changing. Never fails."""
        return self.read(path)[1]

    def read(self, path: str) -> tuple[_Signature, str]:
        """The files' signature, which changes whenever they are written, and the digest as in `of`."""
        try:
            folder = _folder(path)
            signature = _signature(folder)
            known = self._known.get(path)
            if known is not None and known[0] == signature:
                return known
            read = signature, _digest(folder, [name for name, *_ in signature])
            if signature != _signature(folder):
                return (), ""
        except Exception:  # the disk's, a hub client's: vLLM, which loads the adapter, goes on
            log.debug("the adapter at %s has no digest", path, exc_info=True)
            return (), ""
        if time.time_ns() - max(changed for *_, changed in signature) > _SETTLED_NS:
            remember(self._known, path, read, MAX_KNOWN)
        return read


class LoadedAdapters:
    """The adapters that the workers of this process have loaded. Used on the thread that runs the model."""

    def __init__(self) -> None:
        self._digests = AdapterDigests()
        self._loaded: OrderedDict[int, Claim] = OrderedDict()  # by vLLM's adapter number
        self._untold: OrderedDict[Adapter, str] = OrderedDict()

    def take_news(self) -> dict[Adapter, str]:
        """The digests of adapters loaded since the last call; empty: the files changed during the load."""
        news, self._untold = self._untold, OrderedDict()
        return news

    def load(self, load: Any, lora_request: Any) -> Any:
        """Load the adapter by `load` and note the digest of its files, if it is the same before and after."""
        adapter = adapter_of(lora_request)
        before = self._digests.read(adapter.path)
        loaded = load(lora_request)
        digest = before[1] if before == self._digests.read(adapter.path) else ""
        remember(self._loaded, adapter.number, Claim(adapter, digest), MAX_KNOWN)
        remember(self._untold, adapter, digest, MAX_KNOWN)
        return loaded

    def checked(self, plan: StepPlan, claims: Mapping[str, Claim]) -> tuple[StepPlan, int]:
        """The plan without saves and loads of other weights than those loaded, and how many those were.

        Such saves are dropped and their room is given back; such loads fail. A load for an adapter that is not loaded
        yet goes on: the adapter will be loaded before its request computes.
        """
        if not claims:
            return plan, 0
        lost, failing = set[str](), set[str]()
        for request_id, claim in claims.items():
            number = claim.adapter.number
            loaded = self._loaded.get(number)
            if loaded is not None:
                remember(self._loaded, number, loaded, MAX_KNOWN)
            if loaded != claim:
                lost.add(request_id)
                failing.update([request_id] if loaded is not None else ())
        saves = [save for save in plan.saves if save.request_id not in lost]
        aborts = [pages.slots for save in plan.saves if save.request_id in lost for pages in save.pages]
        loads = [
            msgspec.structs.replace(load, epoch=NO_EPOCH) if load.request_id in failing else load for load in plan.loads
        ]
        count = len(plan.saves) - len(saves) + sum(load.request_id in failing for load in plan.loads)
        if not count:
            return plan, 0
        return msgspec.structs.replace(plan, saves=saves, loads=loads, aborts=[*plan.aborts, *aborts]), count


_watching: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()


def watch(adapters: LoadedAdapters) -> None:
    """Have `adapters` note vLLM's loads in this process: vLLM itself does not record which weights it has.

    If a release loads adapters elsewhere, none is ever known to be loaded, and nothing is saved for them.
    """
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager

        own = WorkerLoRAManager._load_adapter
    except (ImportError, AttributeError) as error:
        log.warning("nothing is saved for LoRA adapters: this vLLM does not show what it loads (%s)", error)
        return
    if not hasattr(own, "__wrapped__"):

        @functools.wraps(own)
        def noted(manager: Any, lora_request: Any) -> Any:
            load = functools.partial(own, manager)
            for each in list(_watching):
                load = functools.partial(each.load, load)
            return load(lora_request)

        WorkerLoRAManager._load_adapter = noted
    _watching.add(adapters)


def _folder(path: str) -> Path:
    """The folder that vLLM's `get_adapter_absolute_path` finds, without asking a hub again. Raises OSError or
    ValueError if there is none."""
    place = Path(os.path.expanduser(path))
    if place.is_absolute() or place.exists():
        return place
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))


def _signature(folder: Path) -> _Signature:
    """Device, inode, size and times of each file. Raises OSError if a file that an adapter needs is missing."""
    found = []
    for name in _FILES:
        try:
            told = (folder / name).stat()
        except FileNotFoundError:
            continue
        found.append((name, told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns))
    names = {name for name, *_ in found}
    if _CONFIG not in names or names.isdisjoint(_WEIGHTS):
        raise FileNotFoundError(f"{folder} has not the files of an adapter")
    return tuple(found)


def _digest(folder: Path, names: list[str]) -> str:
    whole = hashlib.sha256(b"pdx-adapter-1")
    for name in names:
        with (folder / name).open("rb") as file:
            whole.update(f"{name}:".encode() + hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
