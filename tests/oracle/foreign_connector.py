"""A connector of somebody else's: it promises tokens for the step that computes the rest, and keeps its promise or
reports the blocks, as vLLM's contract wants of any store that can lose something."""

from __future__ import annotations

from typing import Any, NamedTuple

from exact_kinds import BLOCK
from exact_model import MASKS, WORDS, Word, keys
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Claim(NamedTuple):
    """What is promised of a request, once: so many leading tokens, of which `kept` ones are there."""

    tokens: int
    kept: int = 0


NO_BLOCK = 1 << 30  # reported with those that failed: nothing keeps a connector from it
CLAIMS: dict[str, Claim] = {}  # by request id


class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, loads: list[tuple[list[int], int, list[int]]]) -> None:
        self.loads = loads  # (blocks, number of the first one in its request, tokens up to what is kept)


class ForeignConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Its store is the oracle."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._loads: list[tuple[list[int], int, list[int]]] = []
        self._pages: list[Any] = []  # [num_blocks, BLOCK, WORDS] of each layer
        self._failed: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        claim = CLAIMS.get(request.request_id, Claim(0))
        return max(0, claim.tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            claim = CLAIMS.pop(request.request_id)
            first, end = (claim.tokens - num_external_tokens) // BLOCK, claim.tokens // BLOCK
            self._loads.append((blocks.get_block_ids()[0][first:end], first, request.all_token_ids[: claim.kept]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        return _Metadata(loads)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._pages = [cache[:, 0].numpy().view(Word) for cache in kv_caches.values()]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for blocks, first, kept in self._get_connector_metadata().loads:
            there = max(0, len(kept) // BLOCK - first)
            self._failed.update(blocks[there:], [NO_BLOCK] * (there < len(blocks)))
            for pages, words in zip(self._pages, keys(kept) if there else (), strict=False):
                masked = (words[first * BLOCK :, None] ^ MASKS).reshape(-1, BLOCK, WORDS)
                pages[blocks[:there]] = masked[: len(blocks)]

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
