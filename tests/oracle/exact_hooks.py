"""In which order vLLM's model runners call a connector's worker side: the first runner as in
kv_connector_model_runner_mixin.py, the second one by vLLM's own class, of the release that is there."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector


class Hooks(Protocol):
    """What a step calls of a worker side. `ends_late`: a draft model runs after the step's transfers were asked for."""

    worker: Any
    ends_late: bool

    def begin(self, step: Any) -> None:
        """Before the forward pass."""

    def end(self, step: Any, *, is_late: bool) -> KVConnectorOutput:
        """Behind it; `is_late`: a draft model runs yet, and `finish` follows."""

    def finish(self) -> None: ...


class FirstRunner:
    ends_late = True

    def __init__(self, worker: Any, tensors: dict[str, Any]) -> None:
        self.worker = worker
        self._loads_first = True
        worker.register_kv_caches(tensors)

    def begin(self, step: Any) -> None:
        self.worker.bind_connector_metadata(step.kv_connector_metadata)
        self._loads_first = getattr(step, "has_sync_kv_loads", True)  # before 0.29 always
        if self._loads_first:
            self.worker.start_load_kv(None)

    def end(self, step: Any, *, is_late: bool) -> KVConnectorOutput:
        if not self._loads_first:
            self.worker.start_load_kv(None)
        if not is_late:
            self.worker.wait_for_save()
        output = KVConnectorOutput()
        if hasattr(KVConnectorBase_V1, "get_transfer_results"):  # else this release calls the older one
            results = self.worker.get_transfer_results(step.finished_req_ids)
            output.finished_sending = results.finished_sending or None
            output.finished_recving = results.finished_recving or None
            output.failed_recving = results.failed_recving
        else:
            output.finished_sending, output.finished_recving = self.worker.get_finished(step.finished_req_ids)
        output.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = self.worker.get_kv_connector_stats()
        output.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        if not is_late:
            self.worker.clear_connector_metadata()
        return output

    def finish(self) -> None:
        self.worker.wait_for_save()
        self.worker.clear_connector_metadata()


class SecondRunner:
    ends_late = "defer_finalize" in inspect.signature(ActiveKVConnector.post_forward).parameters  # since 0.33

    def __init__(self, worker: Any, tensors: dict[str, Any], config: Any) -> None:
        self.worker = worker
        with patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker):
            self._own = ActiveKVConnector(config, tensors)
        self._takes_batch = "input_batch" in inspect.signature(self._own.pre_forward).parameters

    def begin(self, step: Any) -> None:
        names = list(step.num_scheduled_tokens)
        batch = SimpleNamespace(idx_mapping=None, req_ids=names, num_tokens=step.total_num_scheduled_tokens)
        self._own.pre_forward(step, **({"input_batch": batch} if self._takes_batch and names else {}))

    def end(self, step: Any, *, is_late: bool) -> KVConnectorOutput:
        if hasattr(self._own, "finish_forward"):
            self._own.finish_forward()
        settings = {"defer_finalize": True} if is_late else {}
        return self._own.post_forward(step.finished_req_ids, **settings)

    def finish(self) -> None:
        self._own.finalize_step()
