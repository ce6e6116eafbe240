"""Requests ready to be sent: the same names give every system the same prompts, and every request has its own id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdx.bench.harness.ask import completion
from pdx.bench.harness.prompts import Prompts

QUESTION_TOKENS = 16
Body = tuple[str, dict[str, Any]]  # request id, and what is posted


class Bodies:
    """Of one run. State: how many were made."""

    def __init__(self, prompts: Prompts, model: str, output_tokens: int) -> None:
        self._prompts = prompts
        self._model = model
        self._output_tokens = output_tokens
        self._num_made = 0

    def make(self, system: str, tokens: int, names: Sequence[str]) -> list[Body]:
        """One for each name."""
        made = []
        for name in names:
            self._num_made += 1
            body = completion(self._model, self._prompts.make(tokens, name), self._output_tokens)
            made.append((f"pdx-bench-{system}-{self._num_made}", body))
        return made

    def again(self, system: str, tokens: int, name: str) -> tuple[Body, Body]:
        """The prompt of that name once more, and another question about its document: the same but for its end."""
        (same,) = self.make(system, tokens, [name])
        (other,) = self.make(system, tokens, [f"{name} another question"])
        document, question = same[1]["prompt"][:-QUESTION_TOKENS], other[1]["prompt"][-QUESTION_TOKENS:]
        return same, (other[0], {**other[1], "prompt": document + question})
