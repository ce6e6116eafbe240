"""How fast an engine computes prompts, as its worker sees it, and how long its steps take, as its scheduler does."""

from __future__ import annotations

from pdx.engine.plan import WorkerNews

MIN_TOKENS = 64  # of a step: what only decodes says nothing of prompts
HALF_TOKENS = 8192  # so many tokens later an earlier step counts half
MEAN_STEPS = 10  # a step's share of the mean is one of so many
STEPS_AHEAD = 2  # an engine schedules so many before the first of them has ended


class Pace:
    """Seconds for a chunk's tokens; steps that computed many tokens, and lately, count more.

    `step` is called by one thread at a time, whichever the copies of a step end on.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
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


class StepTimes:
    """Seconds between the steps of an engine whose requests run on; later ones count more. The scheduler's thread.

    What a step has computed is known when it begins, and of an engine that works ahead it ends a step or two later. So
    a step without a prompt is one whose neighbours have none, either.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.news = WorkerNews()  # what the workers have measured, the slowest of them
        self._chunk_tokens = chunk_tokens
        self._begun = 0.0  # the last step
        self._num_quiet = 0  # steps without a prompt, up to the last one
        self._quiet_s = self._any_s = 0.0
        self._prompt_tokens = 0.0

    def step(self, now: float, tokens: int, *, goes_on: bool) -> None:
        """A step of so many tokens begins. `goes_on`: requests of the last one run on, so that it begins behind it."""
        if goes_on and self._begun:
            took_s = now - self._begun
            self._any_s = _mean(self._any_s, took_s)
            if self._num_quiet > STEPS_AHEAD:
                self._quiet_s = _mean(self._quiet_s, took_s)
        self._begun = now
        self._num_quiet = self._num_quiet + 1 if tokens < MIN_TOKENS else 0
        if not self._num_quiet:
            self._prompt_tokens = _mean(self._prompt_tokens, tokens)

    @property
    def step_s(self) -> float:
        """Seconds of a step without a prompt, or of any where there was none; 0: not known."""
        return self._quiet_s or self._any_s

    def token_s(self, pace_s: float) -> float:
        """Seconds by which one more token of a prompt makes a step longer, where each takes `pace_s` with its share of
        the step's own time; 0: not known. Of the time of steps with a prompt much is not their own, but its tokens'."""
        own_s = self._quiet_s / self._prompt_tokens if self._prompt_tokens else 0.0
        return max(0.0, pace_s - own_s)

    def pays(self, tokens: int, num_waiting: int) -> bool:
        """Whether to load so many tokens before the step that computes the rest, where others run (ADR 47).

        The request misses the step that is made up now, which takes its time for those that run whatever is loaded.
        Computing the tokens makes that step longer, for this request and for all that wait behind it.
        """
        if not self.news.chunk_s:  # no prompt was measured
            return tokens >= MIN_TOKENS
        loading_s = max(self.step_s, self.news.load_s * tokens / self._chunk_tokens)
        computing_s = self.token_s(self.news.chunk_s / self._chunk_tokens) * tokens
        return computing_s * max(1, num_waiting) >= loading_s


def _mean(before: float, now: float) -> float:
    return before + (now - before) / MEAN_STEPS if before else now
