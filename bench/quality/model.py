"""A causal model of Hugging Face with transformers' own forward pass, in float32 on the CPU: what KV is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdx.memory.rope import Rope, rope_of


class Model:
    """Its KV is one tensor [layers, 2, KV heads, tokens, head_dim] in float32: keys, turned for their positions, which
    begin with 0, and values."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config: Any = self.causal.config

    @property
    def rope(self) -> Rope:
        """:raises LayoutError: the keys of such a model cannot be turned."""
        return rope_of(self.config.to_dict(), self.causal.base_model.layers[0].self_attn.head_dim)

    def kv(self, tokens: Sequence[int]) -> Tensor:
        """Of these tokens, each computed in sight of all before it."""
        cache = self._cache()
        with torch.inference_mode():
            self.causal.base_model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])

    def scores(self, kv: Tensor, following: Sequence[int]) -> Tensor:
        """Log probabilities [tokens - 1, vocabulary] of what comes behind each of the tokens that follow `kv` but the
        last one."""
        cache = self._cache()
        for number, (keys, values) in enumerate(kv):
            cache.update(keys[None], values[None], number)
        ids = torch.tensor([following[:-1]])
        with torch.inference_mode():
            return self.causal(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.config)
