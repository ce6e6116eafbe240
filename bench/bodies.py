"""Requests ready to be sent: the same names give every system the same prompts, and every request has its own id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdx.bench.ask import completion
from pdx.bench.prompts import Prompts


class Bodies:
    """Of one run. State: how many were made."""

    def __init__(self, prompts: Prompts, model: str, output_tokens: int) -> None:
        self._prompts = prompts
        self._model = model
        self._output_tokens = output_tokens
        self._num_made = 0

    def make(self, system: str, tokens: int, names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """(request id, body) for each name."""
        made = []
        for name in names:
            self._num_made += 1
            body = completion(self._model, self._prompts.make(tokens, name), self._output_tokens)
            made.append((f"pdx-bench-{system}-{self._num_made}", body))
        return made
