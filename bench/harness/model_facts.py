"""What a benchmark must know of a model, from its config.json and vLLM's flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdx.bench.harness.prompts import text_config
from pdx.cli.serve import flag
from pdx.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS = 128, 16  # vLLM's, unless a flag says otherwise


def model_facts(model: Path, name: str, flags: Sequence[str], *, is_on_gpu: bool) -> dict[str, Any]:
    """As `records.Result.model` has them.

    :raises ConfigError: no such model in this folder, or one whose KV cache is not plain keys and values.
    """
    try:
        config = text_config(model)
    except FileNotFoundError as error:
        raise ConfigError(f"{model} has no config.json: --model takes the folder of a downloaded model") from error
    if "kv_lora_rank" in config:
        raise ConfigError(f"{model} has latent attention: how many bytes its KV cache takes is not known here")
    dtype = flag(flags, "--dtype") or str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype == "auto":
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype {dtype!r} (known: {', '.join(DTYPE_BYTES)})")
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    layers, kv_heads = int(config["num_hidden_layers"]), int(config.get("num_key_value_heads") or heads)
    block = flag(flags, "--block-size")
    return {
        "name": name,
        "kv_bytes_per_token": 2 * layers * kv_heads * head_dim * DTYPE_BYTES[dtype],
        "layers": layers,
        "dtype": dtype,
        "block_tokens": int(block) if block else GPU_BLOCK_TOKENS if is_on_gpu else CPU_BLOCK_TOKENS,
        "config": {key: value for key, value in config.items() if isinstance(value, (int, float, str, bool))},
    }
