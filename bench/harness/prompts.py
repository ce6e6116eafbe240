"""Prompts of an exact length that no cache has seen: equal for all systems, different in every run."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdx.bench.harness.ask import completion
from pdx.cli.serve import flag
from pdx.errors import ConfigError

LETTERS = "abcdefghijklmnopqrstuvwxyz     "


class Prompts:
    """Prompts for one model. For the tiny model a prompt is text with one token per character; for others, a list of
    token ids.

    `salt` makes the prompts specific to a run. Not shared between threads.
    """

    def __init__(self, config: dict[str, Any] | None, salt: str | None = None) -> None:
        self._vocabulary = None if config is None else int(config["vocab_size"])
        self._salt = secrets.token_hex(8) if salt is None else salt

    @classmethod
    def of(cls, model: Path, *, is_tiny: bool) -> Prompts:
        return cls(None if is_tiny else text_config(model))

    def make(self, tokens: int, name: object) -> str | list[int]:
        """The prompt of this length and name; prompts of different names do not even share their first block."""
        draw = random.Random(f"{self._salt} {tokens} {name}")
        if self._vocabulary is None:
            return "".join(draw.choices(LETTERS, k=tokens))
        # Tokenizers keep special tokens at the ends of their vocabulary.
        return draw.choices(range(self._vocabulary // 8, self._vocabulary * 3 // 4), k=tokens)


def text_config(model: Path) -> dict[str, Any]:
    """A model's configuration in Hugging Face format; the text part's, if there are several."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text


Body = tuple[str, dict[str, Any]]  # request id, and body


class Bodies:
    """The request bodies of one run. Its state is the number created."""

    def __init__(self, prompts: Prompts, model: str, output_tokens: int) -> None:
        self._prompts = prompts
        self._model = model
        self._output_tokens = output_tokens
        self._num_made = 0

    def make(self, system: str, tokens: int, names: Sequence[str]) -> list[Body]:
        made = []
        for name in names:
            self._num_made += 1
            body = completion(self._model, self._prompts.make(tokens, name), self._output_tokens)
            made.append((f"pdx-bench-{system}-{self._num_made}", body))
        return made


DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS = 128, 16  # vLLM's defaults


def model_facts(model: Path, name: str, flags: Sequence[str], *, is_on_gpu: bool) -> dict[str, Any]:
    """The model as described in `records.Result.model`.

    :raises ConfigError: the folder has no such model, or its KV cache is not plain keys and values.
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
