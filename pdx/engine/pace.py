"""How fast an engine computes prompts, as its worker sees it, and how long its steps take, as its scheduler does."""

from __future__ import annotations

from pdx.engine.plan import WorkerNews

MIN_TOKENS = 64  # of a step: one that only decodes says nothing about prompts
HALF_TOKENS = 8192  # so many tokens later an earlier step counts half
MEAN_STEPS = 10  # the weight of a new step in a mean is one over this
STEPS_AHEAD = 2  # an engine schedules so many steps before the first of them has ended


class Pace:
    """Seconds to compute a chunk's tokens; large and recent steps count more.

    `step` is called by one thread at a time, the one that a step's copies end on.
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
    """Seconds between the steps of an engine with running requests; recent ones count more. The scheduler's thread.

    A step's tokens are known when it begins, but an engine that schedules ahead ends it a step or two later. So a step
    counts as one without a prompt only if its neighbors have none, either.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.news = WorkerNews()  # what the workers have measured, the slowest of them
        self._chunk_tokens = chunk_tokens
        self._begun = 0.0  # when the last step began
        self._num_quiet = 0  # steps without a prompt, up to the last one
        self._quiet_s = self._any_s = 0.0
        self._prompt_tokens = 0.0

    def step(self, now: float, tokens: int, *, goes_on: bool) -> None:
        """A step of so many tokens begins. `goes_on`: requests of the last one run on, so this one begins behind it."""
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
        """Seconds by which one more token of a prompt lengthens a step. `pace_s`: per token, with its share of the
        step's own time, which is subtracted; 0: not known. It comes from quiet steps: others mostly compute tokens."""
        own_s = self._quiet_s / self._prompt_tokens if self._prompt_tokens else 0.0
        return max(0.0, pace_s - own_s)

    def pays(self, tokens: int, num_waiting: int) -> bool:
        """Whether it pays to load so many tokens before the step that computes the rest, while others run (ADR 47).

        If it loads, the request misses the step being scheduled now, which the running requests take anyway. Computing
        the tokens makes that step longer, for this request and for all that wait behind it.
        """
        if not self.news.chunk_s:  # no prompt was measured
            return tokens >= MIN_TOKENS
        loading_s = max(self.step_s, self.news.load_s * tokens / self._chunk_tokens)
        computing_s = self.token_s(self.news.chunk_s / self._chunk_tokens) * tokens
        return computing_s * max(1, num_waiting) >= loading_s


def _mean(before: float, now: float) -> float:
    return before + (now - before) / MEAN_STEPS if before else now
