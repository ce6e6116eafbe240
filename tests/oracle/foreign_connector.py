"""A connector of somebody else's, whose synchronous loads fail: it promises tokens for the step that computes the rest,
and then reports their blocks, as vLLM's contract wants of any store that can lose something."""

from __future__ import annotations

from typing import Any

from exact_runner import BLOCK
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

CLAIMS: dict[str, int] = {}  # request id -> so many leading tokens are promised, once


class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks


class ForeignConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Writes nothing anywhere."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._promised: list[int] = []
        self._failed: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return max(0, CLAIMS.get(request.request_id, 0) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            end = CLAIMS.pop(request.request_id) // BLOCK
            self._promised += blocks.get_block_ids()[0][end - num_external_tokens // BLOCK : end]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        promised, self._promised = self._promised, []
        return _Metadata(promised)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._failed |= set(connector_metadata.blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

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
