"""The model that KV is measured with: a causal Hugging Face model, computed by transformers in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdx.memory.rope import Rope, rope_of


class Model:
    """KV is a float32 tensor [layers, 2, KV heads, tokens, head_dim]: keys, turned for positions from 0, and values."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config: Any = self.causal.config

    @property
    def rope(self) -> Rope:
        """:raises LayoutError: the keys of this model cannot be turned."""
        return rope_of(self.config.to_dict(), self.causal.base_model.layers[0].self_attn.head_dim)

    def kv(self, tokens: Sequence[int]) -> Tensor:
        """The KV of these tokens, each of which attends to all before it."""
        cache = self._cache()
        with torch.inference_mode():
            self.causal.base_model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])

    def scores(self, kv: Tensor, following: Sequence[int]) -> Tensor:
        """Log probabilities [tokens - 1, vocabulary] of the next token after each of `following` except the last.
        `following` comes directly after the tokens of `kv`."""
        cache = self._cache()
        for number, (keys, values) in enumerate(kv):
            cache.update(keys[None], values[None], number)
        ids = torch.tensor([following[:-1]])
        with torch.inference_mode():
            return self.causal(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.config)
