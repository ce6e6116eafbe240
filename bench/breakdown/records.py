"""The result file of `pdx bench breakdown`: plain values, from which tables, plots and checks are made.

Times are milliseconds unless a name says otherwise.
"""

from __future__ import annotations

import msgspec

from pdx.bench.systems import plan


class Part(msgspec.Struct, frozen=True):
    """One part of a request's latency: its whole length, and how much of it the request had to wait for."""

    total_ms: float
    exposed_ms: float

    @property
    def hidden_ms(self) -> float:
        """How much of it ran beside something else."""
        return max(0.0, self.total_ms - self.exposed_ms)


NOTHING = Part(0.0, 0.0)


class Parts(msgspec.Struct, frozen=True):
    """From the request's arrival at the proxy to the decode engine's first token; the exposed parts add up to that.

    `is_mean`: means of requests that ran together, because their engine reports only sums. For a system that does not
    separate gather, wire and scatter, `wire` has all of them.
    """

    queue: Part  # waiting for a turn, on either engine
    prefill: Part
    rest: Part  # HTTP, tokenizer, lookups, scheduling
    gather: Part = NOTHING  # pages to chunks
    wire: Part = NOTHING  # chunks from node to node; 0 with one node
    scatter: Part = NOTHING  # chunks to pages
    first_decode: Part = NOTHING  # the decode engine's first step
    is_mean: bool = False


class Engines(msgspec.Struct, frozen=True):
    """vLLM's own metrics of a request (or the mean of requests that ran together), the same for every system."""

    prefill_queue_ms: float
    prefill_ms: float  # scheduled -> first token, prefill engine
    decode_queue_ms: float  # arrived -> scheduled, decode engine: includes waiting for the KV cache
    decode_first_ms: float  # scheduled -> first token, decode engine
    computed_tokens: float  # prompt tokens that the decode engine computed itself


class Request(msgspec.Struct, frozen=True):
    """One request of one system."""

    system: str
    round: int
    prompt_tokens: int
    concurrency: int
    index: int  # among the requests sent together
    ttft_ms: float  # sent -> first token, at the client
    itl_ms: list[float]  # between events with text, at the client; a busy server puts several tokens into one event
    e2e_ms: float
    output_tokens: int
    decode_first_ms: float | None  # sent -> decode engine's first token at the proxy; None: one engine, or unknown
    is_same: bool | None  # the answer equals plain vLLM's; None: there was none to compare with
    parts: Parts | None = None
    engines: Engines | None = None
    moved_bytes: int = 0
    hidden_share: float | None = None

    @property
    def mean_itl_ms(self) -> float | None:
        """Per token, even if an event had several."""
        return sum(self.itl_ms) / (self.output_tokens - 1) if self.itl_ms and self.output_tokens > 1 else None


class Span(msgspec.Struct, frozen=True):
    """One bar of the layer-by-layer picture. `lane`: prefill, gather, wire or scatter."""

    lane: str
    first_layer: int
    num_layers: int
    start_ms: float  # since the request's arrival
    end_ms: float
    nbytes: int


class Trace(msgspec.Struct, frozen=True):
    """One request in detail."""

    system: str
    prompt_tokens: int
    spans: list[Span]
    marks: dict[str, float]  # name of a moment -> ms since the request's arrival


class Copy(msgspec.Struct, frozen=True):
    """A plain memcpy of a prompt's KV, timed after a batch as a reference for handoffs: the median of five to the same
    target, after a first one that does not count because the memory was idle."""

    round: int
    nbytes: int
    copy_ms: float


class Result(plan.Result, kw_only=True):
    kind: str = "pdx-bench-breakdown"
    version: int = 1
    requests: list[Request] = []
    copies: list[Copy] = []
    traces: list[Trace] = []
