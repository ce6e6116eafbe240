"""The smallest connector that is right for every kind of cache group: what PdxConnector is measured against, and the
rules that both follow. Its store is a dict of pages by content, which all engines of this process share.

- A page of attention is final in the step that fills it, and is saved then: a window's blocks go to others later. The
  tables of blocks are vLLM's own at that moment, since blocks of windows and states change places.
- A state is there only where a step has ended, in the slot of the last token, and is saved behind that step.
- Where a prompt ends inside a block, each group's last block is saved as it is then: a tail.
- A hit needs of each group what the next token looks at, no more; where all of it is there, the hit counts.
- A hit leaves one token to compute: vLLM would step back by one, for which windows and states are wrong.
- Loads are under way between steps. In a step they would be too late for states, which it moves before it binds.
- A load that fails has failed for its request. Told of blocks, vLLM would keep those before the first that failed: they
  are no hit where a group looks at its last ones alone; and with several groups it does not know whose a block is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

REFERENCE = {"kv_connector": "ReferenceConnector", "kv_connector_module_path": "reference_connector"}

# Of (model, group, name of the tokens): a page of each layer. The oldest go.
STORE: dict[tuple[str, int, int], list[torch.Tensor]] = {}


class Slot(NamedTuple):
    """A slot in a group's table, as it is when the first `end` tokens are computed."""

    group: int
    number: int
    end: int


class Copy(NamedTuple):
    """Of a page: its name, and the block that it lies in."""

    group: int
    name: int
    block: int


def needed(number: int, spec: Any, end: int, computed: int = 0) -> Iterator[Slot]:
    """What the token behind the first `end` ones needs of group `number`, if vLLM has all for the first `computed`."""
    block, first = spec.block_size, 0
    last = -(-end // block) - 1
    if isinstance(spec, MambaSpec):
        yield Slot(number, last, end)
        return
    if isinstance(spec, SlidingWindowSpec):
        first = max(0, end - spec.sliding_window + 1)
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        first = end - end % spec.attention_chunk_size
    for slot in range(max(first, computed) // block, last + 1):
        yield Slot(number, slot, min((slot + 1) * block, end))


def written(number: int, spec: Any, start: int, end: int, length: int) -> Iterator[Slot]:
    """What is final of group `number` behind a step over tokens [start, end) of a prompt of `length` tokens."""
    block = spec.block_size
    if isinstance(spec, MambaSpec):
        if end % block == 0 or end == length:
            yield Slot(number, -(-end // block) - 1, end)
        return
    for slot in range(start // block, end // block):
        yield Slot(number, slot, (slot + 1) * block)
    if end == length and end % block:
        yield Slot(number, end // block, end)


class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self) -> None:
        self.saves: list[Copy] = []
        self.loads: dict[str, list[Copy]] = {}  # of requests


class ReferenceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both halves. `faults`: what its loads suffer, if the engine says so (`exact_engine.Faults`).

    In `kv_connector_extra_config`: `model`, under whose name pages are stored; `asynchronous`, whether loads are under
    way between steps; `pages`, how many the store holds; `holes`, of so many one is not saved.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._model, self._is_async = extra["model"], extra.get("asynchronous", True)
        self._most, self._holes = extra.get("pages", 10_000), extra.get("holes", 0)
        self._groups = kv_cache_config.kv_cache_groups
        self._specs = [group.kv_cache_spec for group in self._groups]
        self._whole = math.lcm(*(spec.block_size for spec in self._specs))
        self._hits: dict[str, int] = {}  # tokens, of requests that are not allocated
        self._loads: dict[str, list[Copy]] = {}
        self._lengths: dict[str, int] = {}  # of prompts
        self._names: dict[str, list[int]] = {}  # of a prompt's beginnings, by their length
        self._tensors: dict[str, torch.Tensor] = {}
        self._ended: set[str] = set()
        self._failed: dict[str, list[int]] = {}  # blocks, of requests
        self.faults: Any = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- the scheduler half -----------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        names, most = self._names_of(request), request.num_tokens - 1
        self._lengths[request.request_id] = request.num_prompt_tokens
        for end in (most, *range(most // self._whole * self._whole, num_computed_tokens, -self._whole)):
            slots = self._needed(end, num_computed_tokens)
            if end > num_computed_tokens and all((self._model, each.group, names[each.end]) in STORE for each in slots):
                self._hits[request.request_id] = end
                return end - num_computed_tokens, self._is_async
        return 0, False

    def _needed(self, end: int, computed: int) -> list[Slot]:
        return [slot for number, spec in enumerate(self._specs) for slot in needed(number, spec, end, computed)]

    def _names_of(self, request: Any) -> list[int]:
        known = self._names.setdefault(request.request_id, [0])
        for token in request.all_token_ids[len(known) - 1 : request.num_tokens]:
            known.append(hash((known[-1], token)))
        return known

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A load under way is told of twice, with no tokens when it has ended."""
        if num_external_tokens:
            end, names, tables = self._hits[request.request_id], self._names_of(request), blocks.get_block_ids()
            copies = [
                Copy(slot.group, names[slot.end], tables[slot.group][slot.number])
                for slot in self._needed(end, end - num_external_tokens)
            ]
            assert all(each.block for each in copies), f"the null block among {copies}"
            self._loads[request.request_id] = copies

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, cached = _Metadata(), scheduler_output.scheduled_cached_reqs
        metadata.loads, self._loads = self._loads, {}
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for name, start in {**starts, **dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))}.items():
            length = self._lengths[name]
            end = min(length, start + scheduler_output.num_scheduled_tokens[name])
            tables = scheduler_output.kv_connector_block_state.get_block_ids(name)
            for number, spec in enumerate(self._specs):
                for slot in written(number, spec, start, end, length) if start < end else ():
                    if block := tables[slot.group][slot.number]:
                        metadata.saves.append(Copy(number, self._names[name][slot.end], block))
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        for table in (self._lengths, self._names, self._hits, self._loads):
            table.pop(request.request_id, None)
        return False, None

    # ---- the worker half --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._tensors = kv_caches

    def _pages(self, group: int, block: int) -> Iterator[torch.Tensor]:
        for name in self._groups[group].layer_names:
            yield self._tensors[name][block]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, copies in self._get_connector_metadata().loads.items():
            is_lost = self.faults.of_next_load() if self.faults is not None else lambda chunk: False
            for number, copy in enumerate(copies):
                if is_lost(number):
                    self._failed.setdefault(name, []).append(copy.block)
                    continue
                for page, saved in zip(self._pages(copy.group, copy.block), self._saved(copy), strict=True):
                    page.copy_(saved)
            if self._is_async:
                self._ended.add(name)

    def _saved(self, copy: Copy) -> list[torch.Tensor]:
        return STORE[self._model, copy.group, copy.name]

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for copy in self._get_connector_metadata().saves:
            key = self._model, copy.group, copy.name
            if key not in STORE and not (self._holes and hash(key[1:]) % self._holes == 0):
                STORE[key] = [page.clone() for page in self._pages(copy.group, copy.block)]

        while len(STORE) > self._most:
            del STORE[next(iter(STORE))]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        ended, failed, self._ended, self._failed = self._ended, self._failed, set(), {}
        return base.KVConnectorTransferResults(finished_recving=ended, failed_recving=set(failed))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        ended, self._ended = self._ended, set()
        return None, ended
