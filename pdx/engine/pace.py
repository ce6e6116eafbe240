"""How fast an engine computes prompts, as its worker sees it."""

from __future__ import annotations

from pdx.memory.layout import KvLayout

MIN_TOKENS = 64  # of a step: what only decodes says nothing of prompts
HALF_TOKENS = 8192  # so many tokens later an earlier step counts half


class Pace:
    """Seconds for a chunk's tokens; steps that computed many tokens, and lately, count more.

    `step` is called by one thread at a time, whichever the copies of a step end on.
    """

    def __init__(self, layout: KvLayout) -> None:
        self._chunk_tokens = layout.chunk_tokens
        self._tokens = 0.0
        self._ns = 0.0
        self._end_ns = 0

    def step(self, tokens: int, start_ns: int, end_ns: int) -> None:
        """A step has computed so many tokens, from when it began until its last page was copied (CLOCK_MONOTONIC)."""
        if tokens >= MIN_TOKENS:
            keep = 0.5 ** (tokens / HALF_TOKENS)
            self._tokens = self._tokens * keep + tokens
            self._ns = self._ns * keep + end_ns - max(start_ns, self._end_ns)  # steps of a GPU are begun ahead
        self._end_ns = max(self._end_ns, end_ns)

    @property
    def chunk_s(self) -> float:
        """Seconds to compute a chunk's tokens; 0: not known."""
        return self._ns / self._tokens * self._chunk_tokens / 1e9 if self._tokens else 0.0
