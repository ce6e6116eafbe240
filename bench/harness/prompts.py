"""Prompts of an exact length that no cache has seen: the same ones for every system, other ones in every run."""

from __future__ import annotations

import json
import random
import secrets
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz     "


class Prompts:
    """For one model. With the tiny one a prompt is a text, one character a token; with others a list of token ids.

    `salt` makes the prompts of a run its own. Not shared between threads.
    """

    def __init__(self, config: dict[str, Any] | None, salt: str | None = None) -> None:
        self._vocabulary = None if config is None else int(config["vocab_size"])
        self._salt = secrets.token_hex(8) if salt is None else salt

    @classmethod
    def of(cls, model: Path, *, is_tiny: bool) -> Prompts:
        """For the model in this folder."""
        return cls(None if is_tiny else text_config(model))

    def make(self, tokens: int, name: object) -> str | list[int]:
        """The prompt of this length and name; two names have nothing in common, not even the first block."""
        draw = random.Random(f"{self._salt} {tokens} {name}")
        if self._vocabulary is None:
            return "".join(draw.choices(LETTERS, k=tokens))
        # Tokenizers keep special tokens at the ends of their vocabulary.
        return draw.choices(range(self._vocabulary // 8, self._vocabulary * 3 // 4), k=tokens)


def text_config(model: Path) -> dict[str, Any]:
    """A model's configuration as Hugging Face has it; of its text part, where there are several."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text
