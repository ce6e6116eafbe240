"""For pipelines on CPUs: there vLLM 0.32 never makes the buffers in which a later stage gets what the one before it has
computed, because it makes them while it profiles a GPU's memory. `Buffers` is its `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Buffers:
    """Nothing but the reason for which each worker imports this."""


_sync = GPUModelRunner.sync_and_gather_intermediate_tensors


def _sync_with_buffers(runner: Any, *args: Any) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return _sync(runner, *args)


GPUModelRunner.sync_and_gather_intermediate_tensors = _sync_with_buffers
