"""Workloads and SLOs, two ways to serve them with a given number of engines, and the latencies of each way.

Disaggregated: a queue in front of the prefill engines (M/D/c), then decode engines with a steady batch (Little's law).
Mixed: each engine does both, and computes prompts in chunks beside decoding. Seconds, tokens; pure.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from pdx.bench.plan.machines import INF, Engine
from pdx.bench.plan.queue import Queue, fixed_point, poisson_high
from pdx.bench.plan.transfer import Overlap, group_of, load_s, overlap
from pdx.bench.plan.units import show_time
from pdx.errors import ConfigError

MOST_REQUESTS = 1e5  # upper bound for one engine, if its memory is unknown


class Slo(msgspec.Struct, frozen=True):
    """Latency targets, to be kept for `share` of the requests (TTFT) and of the tokens (ITL)."""

    ttft_s: float
    itl_s: float
    share: float = 0.95


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Poisson arrivals of prompts of one length."""

    rate: float  # requests per second
    input_tokens: int  # of each prompt
    output_tokens: int  # mean; the spread does not affect the mean number of decoding requests
    reuse: float = 0.0  # share of each prompt whose KV is loaded instead of computed
    reuse_bytes_s: float = 0.0  # effective, per engine, from host memory or storage

    def check(self) -> None:
        """:raises ConfigError: the rate or the reuse makes no sense."""
        if self.rate <= 0:
            raise ConfigError(f"a rate of {self.rate:g} requests per second needs no engines; give --rate above 0")
        if not 0 <= self.reuse < 1:
            raise ConfigError(f"--reuse {self.reuse:g} is not a share of the prompt; give 0 up to, but not, 1")
        if self.reuse and self.reuse_bytes_s <= 0:
            raise ConfigError("--reuse needs the speed of the link that it comes over: --reuse-link 200Gbps")

    @property
    def reused_tokens(self) -> int:
        """Tokens of a prompt that are loaded; at least one is always computed."""
        return min(self.input_tokens - 1, int(self.input_tokens * self.reuse))

    @property
    def new_tokens(self) -> int:
        """Tokens of a prompt that are computed."""
        return self.input_tokens - self.reused_tokens

    def load_s(self, token_bytes: float) -> float:
        """Time to load the reused part of a prompt: the request waits, and the engine serves others meanwhile."""
        return load_s(self.reused_tokens, token_bytes, self.reuse_bytes_s) if self.reused_tokens else 0.0

    @property
    def context(self) -> float:
        """Context tokens of a decoding request, averaged over its output."""
        return self.input_tokens + self.output_tokens / 2


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The path of KV from a prefill engine to a decode engine; effective speeds per engine."""

    wire_bytes_s: float
    scatter_bytes_s: float  # from the node into the decode engine's pages
    control_s: float  # from the end of prefill until the decode engine may load, without the wire
    latency_s: float = 50e-6


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a mean request up to its second token; `second_gap_s` is between its first two tokens."""

    request_s: float  # HTTP, tokenizer
    queue_s: float
    load_s: float  # of the reused part
    prefill_s: float
    wire_s: float  # not hidden behind prefill
    wire_hidden_s: float
    control_s: float
    scatter_s: float
    first_decode_s: float

    @property
    def ttft_s(self) -> float:
        """Without the handoff: the prefill engine's token goes to the client at once."""
        return self.request_s + self.queue_s + self.load_s + self.prefill_s

    @property
    def handoff_s(self) -> float:
        """From the end of prefill until the decode engine may run the request."""
        return self.wire_s + self.control_s + self.scatter_s

    @property
    def second_gap_s(self) -> float:
        return self.handoff_s + self.first_decode_s

    @property
    def total_s(self) -> float:
        """All parts that are not hidden."""
        return self.ttft_s + self.second_gap_s


class Limit(msgspec.Struct, frozen=True):
    """A reason why a deployment is insufficient, and which of its engines are too few (or too slow in any number)."""

    part: Literal["prefill", "decode"]
    text: str


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """The performance of one deployment. `limits`: why it cannot serve the load or keep the SLO; empty: it keeps it."""

    kind: str  # disaggregated or mixed
    prefillers: int  # mixed: all engines
    decoders: int  # mixed: 0
    tp: int
    chunk: int
    prefill_utilisation: float  # mixed: share of the time spent in steps with a chunk
    decode_batch: float  # mean number of requests that decode on one engine
    decode_batch_most: float  # requests that fit into its memory
    ttft_s: float
    ttft_high_s: float  # at the SLO's percentile; never below the mean, which a few slow requests can lift above it
    itl_s: float
    itl_high_s: float  # likewise
    longest_gap_s: float  # between tokens: once per request, at the handoff; mixed: at each chunk of another prompt
    request: Request | None = None
    overlap: Overlap | None = None
    limits: list[Limit] = []

    @property
    def gpus(self) -> int:
        return (self.prefillers + self.decoders) * self.tp

    @property
    def is_kept(self) -> bool:
        return not self.limits


class Batch(msgspec.Struct, frozen=True):
    """The steady state of one decode engine by Little's law: batch = rate x tokens x time per token."""

    mean: float
    step_s: float
    step_high_s: float


def prefill_queue(engine: Engine, work: Workload, servers: int) -> Queue:
    """The queue in front of `servers` prefill engines."""
    return Queue(work.rate, engine.prefill_s(work.new_tokens, work.reused_tokens), servers)


def steady_batch(engine: Engine, rate: float, work: Workload, share: float) -> Batch | None:
    """The batch of one decode engine that gets `rate` requests per second; None: no batch that fits is steady.

    Decoding requests are independent of each other, so their number has a Poisson distribution, and a request sees the
    mean number of others beside itself.
    """
    context, tokens = work.context, work.output_tokens - 1
    mean = fixed_point(lambda batch: rate * tokens * engine.step_s(1 + batch, context), _max_others(engine, work))
    if mean is None:
        return None
    high = poisson_high(mean, share)
    return Batch(mean, engine.step_s(1 + mean, context), engine.step_s(1 + high, context))


def max_batch(engine: Engine, work: Workload) -> float:
    """Requests whose KV fits into one engine."""
    return engine.kv_room_tokens / (work.input_tokens + work.output_tokens)


def _max_others(engine: Engine, work: Workload) -> float:
    """Upper bound for other requests beside a decoding one."""
    return min(max_batch(engine, work), MOST_REQUESTS) - 1


def transfer(engine: Engine, link: Link, tokens: int, reused: int = 0) -> Overlap:
    """The transfer of one prompt to the decode engine's node: the reused part first, the rest layer by layer."""
    shapes, steps = engine.shapes, engine.prefill_steps(tokens - reused, reused)
    if reused:
        steps = [(reused, 0.0), *steps]
    return overlap(
        steps,
        layers=shapes.layers,
        layer_token_bytes=engine.kv_token_bytes / shapes.layers,
        wire_bytes_s=link.wire_bytes_s,
        group=group_of(engine.kv_token_bytes / shapes.layers / engine.tp, shapes.layers),
        latency_s=link.latency_s,
    )


def disaggregated(
    engine: Engine, work: Workload, slo: Slo, link: Link, *, prefillers: int, decoders: int, request_s: float
) -> Service:
    """The service of `prefillers` prefill and `decoders` decode engines."""
    queue = prefill_queue(engine, work, prefillers)
    batch = steady_batch(engine, work.rate / decoders, work, slo.share)
    kv_overlap = transfer(engine, link, work.input_tokens, work.reused_tokens)
    loads_s = work.load_s(engine.kv_token_bytes)
    request = Request(
        request_s=request_s,
        queue_s=queue.wait_s,
        load_s=loads_s,
        prefill_s=queue.service_s,
        wire_s=kv_overlap.exposed_s,
        wire_hidden_s=max(0.0, kv_overlap.wire_s - kv_overlap.exposed_s),
        control_s=link.control_s,
        scatter_s=work.input_tokens * engine.kv_token_bytes / link.scatter_bytes_s,
        first_decode_s=batch.step_s if batch else INF,
    )
    gaps = max(1, work.output_tokens - 1)  # one of them includes the handoff
    itl_s = request.first_decode_s + request.handoff_s / gaps
    high_s = batch.step_high_s if batch else INF
    service = Service(
        kind="disaggregated",
        prefillers=prefillers,
        decoders=decoders,
        tp=engine.tp,
        chunk=engine.budget,
        prefill_utilisation=queue.utilisation,
        decode_batch=batch.mean if batch else INF,
        decode_batch_most=max_batch(engine, work),
        ttft_s=request.ttft_s,
        ttft_high_s=max(request.ttft_s, request_s + loads_s + queue.response_s(slo.share)),
        itl_s=itl_s,
        longest_gap_s=max(high_s, request.second_gap_s),
        itl_high_s=max(itl_s, high_s, request.second_gap_s if 1 / gaps > 1 - slo.share else 0.0),
        request=request,
        overlap=kv_overlap,
    )
    load = work.rate * kv_overlap.nbytes / link.wire_bytes_s
    busy: dict[Literal["prefill", "decode"], float] = {"prefill": load / prefillers, "decode": load / decoders}
    return msgspec.structs.replace(
        service, limits=_limits(service, slo, busy) + _reuse_limits(engine, work, prefillers)
    )


def mixed(engine: Engine, work: Workload, slo: Slo, *, engines: int, chunk: int, request_s: float) -> Service:
    """The service of ordinary engines that compute prompts in chunks of at most `chunk` tokens beside decoding."""
    steps = MixedSteps(engine, work, work.rate / engines, chunk)
    rate, room, tokens = work.rate / engines, max_batch(engine, work), work.output_tokens - 1
    batch = fixed_point(lambda mean: rate * tokens * steps.state_at(1 + mean).itl_s, _max_others(engine, work))
    loads_s = work.load_s(engine.kv_token_bytes)
    mean = steps.state_at(1 + batch) if batch is not None else MixedState(INF, INF, steps.state_at(0.0).busy, INF)
    high = steps.state_at(1 + poisson_high(batch, slo.share)) if batch is not None else mean
    ttft_s = ttft_high_s = INF
    if batch is not None and mean.busy < 1:
        queue = Queue(work.rate, steps.chunks * mean.with_chunk_s, engines)
        head_s = request_s + loads_s + (1 - mean.busy) * mean.alone_s / 2  # the rest of a step in progress
        ttft_s = head_s + queue.wait_s + queue.service_s
        ttft_high_s = max(ttft_s, head_s + queue.response_s(slo.share))
    is_often = rate * steps.chunks * mean.itl_s > 1 - slo.share  # share of steps with a chunk
    service = Service(
        kind="mixed",
        prefillers=engines,
        decoders=0,
        tp=engine.tp,
        chunk=chunk,
        prefill_utilisation=mean.busy,
        decode_batch=INF if batch is None else batch,
        decode_batch_most=room,
        ttft_s=ttft_s,
        ttft_high_s=ttft_high_s,
        itl_s=mean.itl_s,
        longest_gap_s=high.with_chunk_s,
        itl_high_s=max(mean.itl_s, high.with_chunk_s if is_often else high.alone_s),
    )
    return msgspec.structs.replace(service, limits=_limits(service, slo, {}) + _reuse_limits(engine, work, engines))


class MixedState(msgspec.Struct, frozen=True):
    """At one batch size: time of a step with a chunk and without, share of time in the former, mean time per token."""

    with_chunk_s: float
    alone_s: float
    busy: float
    itl_s: float


class MixedSteps:
    """The two kinds of steps of a mixed engine that gets `rate` requests per second.

    Chunks come at a known rate, so steps with a chunk take rate x chunks x step time; the rest is decoding alone.
    """

    def __init__(self, engine: Engine, work: Workload, rate: float, chunk: int) -> None:
        self._engine, self._work, self._rate = engine, work, rate
        self.chunks = len(engine.chunks(work.new_tokens, chunk))  # per request
        self._size = work.new_tokens / self.chunks
        self._before = work.input_tokens - work.new_tokens / 2  # tokens before a chunk, on average

    def state_at(self, batch: float) -> MixedState:
        """The state while `batch` requests decode."""
        context = self._work.context
        with_chunk_s = self._engine.step_s(batch, context, self._size, self._before)
        alone_s = self._engine.step_s(max(batch, 1.0), context)
        busy = self._rate * self.chunks * with_chunk_s
        per_s = self._rate * self.chunks + (1 - busy) / alone_s
        return MixedState(with_chunk_s, alone_s, busy, 1 / per_s if busy < 1 else INF)


def _reuse_limits(engine: Engine, work: Workload, engines: int) -> list[Limit]:
    """Reused KV comes over a link of each engine; a limit if the link cannot carry it."""
    if not work.reuse:
        return []
    busy = work.rate / engines * work.reused_tokens * engine.kv_token_bytes / work.reuse_bytes_s
    text = f"the link that reused KV comes over would have to carry {busy:.0%} of what it can"
    return [Limit("prefill", text)] if busy >= 1 else []


def _limits(service: Service, slo: Slo, wires: dict[Literal["prefill", "decode"], float]) -> list[Limit]:
    found = []
    many = f"{service.prefillers} engine" + "s" * (service.prefillers > 1)
    high = f"p{slo.share * 100:g}"
    if service.prefill_utilisation >= 1:
        busy = f"{service.prefill_utilisation:.0%} of the time there is"
        found.append(Limit("prefill", f"prompts come faster than {many} can prefill them: they take {busy}"))
    elif service.ttft_high_s > slo.ttft_s:
        text = f"TTFT: {high} is {show_time(service.ttft_high_s)}, more than {show_time(slo.ttft_s)}"
        found.append(Limit("prefill", text))
    if service.itl_high_s == INF:
        most = math.floor(min(service.decode_batch_most, MOST_REQUESTS))
        text = f"decoding falls behind: no batch is steady, and at most {most:,} requests fit into one engine"
        found.append(Limit("decode", text))
    elif service.itl_high_s > slo.itl_s:
        text = f"ITL: {high} is {show_time(service.itl_high_s)}, more than {show_time(slo.itl_s)}"
        found.append(Limit("decode", text))
    return found + [
        Limit(role, f"the link of each {role} engine would have to carry {busy:.0%} of what it can")
        for role, busy in wires.items()
        if busy >= 1
    ]
