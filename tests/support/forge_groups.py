"""What `forge` forks for `Forge.groups_of`: what cache groups vLLM makes of a family, without an engine.

The model is made on the meta device, which has no memory, and asked by vLLM's own engine core for its cache, whose
executor is a stand-in: nothing is allocated and nothing runs. So families whose kernels CPUs do not have are told of,
too.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from families import FAMILIES, ONLY_GROUPS
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, record_kv_cache_layout
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import get_current_attn_backends


class Executor:
    """What the engine core asks of one, where there is nothing but a model on the meta device."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [GPUModelRunner.get_kv_cache_spec(SimpleNamespace(vllm_config=self._config, shared_kv_cache_layers={}))]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(self._config))]]

    def set_kv_cache_layout(self, name: str) -> None:
        record_kv_cache_layout(self._config.cache_config, name)

    def determine_available_memory(self) -> list[int]:
        return [self._config.cache_config.kv_cache_memory_bytes]

    def initialize_from_config(self, configs: list[Any]) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass


def cache_config(folder: Path, options: dict[str, Any]) -> Any:
    """vLLM's `KVCacheConfig` of the model whose configuration is in `folder`."""
    config = EngineArgs(model=str(folder), **options).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            initialize_model(vllm_config=config)  # its layers are in the configuration's context
        current_platform.update_block_size_for_backend(config)
        core = object.__new__(EngineCore)
        core.model_executor = Executor(config)
        return core._initialize_kv_caches(config)


def main() -> None:
    order = json.loads(sys.argv[1])
    family = {**FAMILIES, **ONLY_GROUPS}[order["family"]]
    if family.prepare is not None:
        family.prepare()
    folder = Path(order["folder"])
    family.config_of().save_pretrained(folder)
    Path(order["result"]).write_bytes(pickle.dumps(cache_config(folder, order["options"])))


if __name__ == "__main__":
    main()
