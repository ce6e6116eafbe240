"""What is asked of a deployment: requests, their lengths, the latency they were promised. Seconds, bytes, tokens."""

from __future__ import annotations

import statistics

import msgspec

from pdx.bench.plan.queue import spread
from pdx.errors import ConfigError

LOAD_LATENCY_S = 0.002


class Slo(msgspec.Struct, frozen=True):
    """Kept by `share` of the requests (first token) and of the tokens (the time between two)."""

    ttft_s: float
    itl_s: float
    share: float = 0.95


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Poisson arrivals."""

    rate: float  # requests per second
    input_tokens: int  # mean
    output_tokens: int  # mean; its spread does not matter to the mean number of requests that decode
    input_variation: float = 0.0  # coefficient of variation of the prompt's length
    reuse: float = 0.0  # share of each prompt whose KV is loaded instead of computed
    reuse_bytes_s: float = 0.0  # from host memory or storage, in effect

    def check(self) -> None:
        """:raises ConfigError: it makes no sense."""
        if self.rate <= 0:
            raise ConfigError(f"a rate of {self.rate:g} requests per second needs no engines; give --rate above 0")
        if not 0 <= self.reuse < 1:
            raise ConfigError(f"--reuse {self.reuse:g} is not a share of the prompt; give 0 up to, but not, 1")
        if self.reuse and self.reuse_bytes_s <= 0:
            raise ConfigError("--reuse needs the speed of the link that it comes over: --reuse-link 200Gbps")

    def prompts(self) -> tuple[int, ...]:
        """Equally likely lengths."""
        return spread(self.input_tokens, self.input_variation)

    def reused(self, tokens: int) -> int:
        """Tokens of such a prompt that are loaded; at least one is always computed."""
        return min(tokens - 1, int(tokens * self.reuse))

    def load_s(self, tokens: int, token_bytes: float) -> float:
        """Loading what is reused of such a prompt, while the request waits and the engine does others."""
        reused = self.reused(tokens)
        return LOAD_LATENCY_S + reused * token_bytes / self.reuse_bytes_s if reused else 0.0

    @property
    def context(self) -> float:
        """Tokens behind a request that decodes, on average over its life."""
        return self.mean_prompt + self.output_tokens / 2

    @property
    def mean_prompt(self) -> float:
        """Tokens."""
        return statistics.fmean(self.prompts())


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How KV goes from a prefill engine to a decode engine; effective speeds of one instance."""

    wire_bytes_s: float
    scatter_bytes_s: float  # from the decode engine's node into its pages
    control_s: float  # prefill has ended -> the decode engine may load, without the wire
    latency_s: float = 50e-6
