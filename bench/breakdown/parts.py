"""Where the time of a request went: moments and spans in, `records.Parts` out. Arithmetic only.

PDX reports every moment, so each instant between a request's arrival and the decode engine's first token is assigned
to one part: the first one in a fixed order that claims it. Unclaimed time is `rest`, so exposed parts add up to the
whole. Other systems report less: six moments of their proxy, and vLLM's metrics of both engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from pdx.bench.breakdown.records import Engines, Part, Parts, Span, Trace
from pdx.telemetry.timeline import Event, Moment
from pdx.telemetry.trace import TraceSpan

Interval = tuple[int, int]  # CLOCK_MONOTONIC ns, start <= end
NEEDED = frozenset(
    {
        Event.RECEIVED,
        Event.PREFILL_SENT,
        Event.ADMITTED,
        Event.PREFILL_END,
        Event.LOAD_START,
        Event.LOAD_END,
        Event.RUNNABLE,
        Event.DECODE_FIRST,
    }
)


class Clock:
    """When each event of a transfer happened: at its last shard, but `LOAD_START` at its first."""

    def __init__(self, moments: Iterable[Moment]) -> None:
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        for moment in moments:
            self._first[moment.event] = min(moment.at_ns, self._first.get(moment.event, moment.at_ns))
            self._last[moment.event] = max(moment.at_ns, self._last.get(moment.event, moment.at_ns))

    @property
    def is_complete(self) -> bool:
        """Whether every moment that the parts are computed from is known."""
        return self._last.keys() >= NEEDED

    @property
    def to_admitted_ms(self) -> float:
        """From the prefill leg's start until the engine admitted it: HTTP, tokenizer and waiting for a turn."""
        return (self[Event.ADMITTED] - self[Event.PREFILL_SENT]) / 1e6

    def __getitem__(self, event: Event) -> int:
        return (self._first if event is Event.LOAD_START else self._last)[event]

    def marks_ms(self) -> dict[str, float]:
        """The last time of each event, since the request's arrival."""
        return {event: (at_ns - self._last[Event.RECEIVED]) / 1e6 for event, at_ns in self._last.items()}


def queued_ms(to_admitted_ms: Sequence[float], mean_queue_ms: float) -> list[float]:
    """How long each request of a batch waited for its turn, given their mean, `mean_queue_ms`.

    HTTP and the tokenizer, the rest of the way to the engine, are assumed to take equally long for all requests.
    """
    on_the_way_ms = max(0.0, fmean(to_admitted_ms) - mean_queue_ms)
    return [max(0.0, each - on_the_way_ms) for each in to_admitted_ms]


def of_transfer(
    clock: Clock, spans: Sequence[TraceSpan], *, queued_ms: float, first_step_ms: float, is_gather_beside: bool
) -> Parts:
    """The parts of one request through PDX.

    `queued_ms`: its wait for a turn on the prefill engine. `first_step_ms`: the decode engine's first step.
    `is_gather_beside`: pages are copied beside the forward pass (on a GPU), and only what is copied after its end costs
    time; otherwise the forward pass stops meanwhile.
    """
    start, end = clock[Event.RECEIVED], clock[Event.DECODE_FIRST]
    admitted, prefill_end, runnable = clock[Event.ADMITTED], clock[Event.PREFILL_END], clock[Event.RUNNABLE]
    time = _Claims(start, end)
    gathers = [(span.start_ns, span.end_ns) for span in spans if span.lane == "gather"]
    writes = [(span.start_ns, span.end_ns) for span in spans if span.lane == "wire"]
    load = (clock[Event.LOAD_START], clock[Event.LOAD_END])
    gather_ns = time.claim(_after(gathers, prefill_end) if is_gather_beside else gathers)
    prefill_ns = time.claim([(admitted, prefill_end)])
    waits = [(admitted - round(queued_ms * 1e6), admitted), (load[1], runnable)]
    queue_ns = time.claim(waits)
    scatter_ns = time.claim([load])
    wire_ns = time.claim(_after(writes, prefill_end))
    first = (runnable, runnable + round(first_step_ms * 1e6))
    first_ns = time.claim([first])
    return Parts(
        queue=_exposed(queue_ns),
        prefill=_exposed(prefill_ns),
        gather=_overlapped(gather_ns, gathers),
        wire=_overlapped(wire_ns, writes),
        scatter=_overlapped(scatter_ns, [load]),
        first_decode=_overlapped(first_ns, [first]),
        rest=_exposed(time.unclaimed_ns),
    )


def of_moments(moments: Sequence[Mapping[str, float]], engines: Engines) -> Parts:
    """The mean of requests that ran together through another system's proxy (its moments, in ms).

    `wire` is the time that the request waited in the decode engine, at most from the prefill engine's answer to the
    decode engine's first step: the transfer, its handshake, polling, and in a batch also the wait for a turn.
    """
    total_ms = fmean(at["decode_first"] - at["received"] for at in moments)
    between_ms = fmean(at["decode_first"] - engines.decode_first_ms - at["prefill_answered"] for at in moments)
    budget = _Budget(total_ms)
    prefill = budget.take(engines.prefill_ms)
    queue = budget.take(engines.prefill_queue_ms)
    first_decode = budget.take(engines.decode_first_ms)
    wire = budget.take(min(engines.decode_queue_ms, between_ms))
    rest, is_mean = budget.take(total_ms), len(moments) > 1
    return Parts(queue=queue, prefill=prefill, wire=wire, first_decode=first_decode, rest=rest, is_mean=is_mean)


def of_one_engine(ttft_ms: Sequence[float], engines: Engines) -> Parts:
    """The mean of requests that ran together on one engine, up to their first tokens."""
    budget = _Budget(fmean(ttft_ms))
    prefill, queue = budget.take(engines.prefill_ms), budget.take(engines.prefill_queue_ms)
    return Parts(queue=queue, prefill=prefill, rest=budget.take(fmean(ttft_ms)), is_mean=len(ttft_ms) > 1)


def trace_of(system: str, prompt_tokens: int, clock: Clock, spans: Sequence[TraceSpan]) -> Trace:
    """One request in detail, for the layer-by-layer picture."""
    start = clock[Event.RECEIVED]
    bars = [
        Span(
            lane=span.lane,
            first_layer=span.first_layer,
            num_layers=span.num_layers,
            start_ms=(span.start_ns - start) / 1e6,
            end_ms=(span.end_ns - start) / 1e6,
            nbytes=span.nbytes,
        )
        for span in sorted(spans, key=lambda span: span.start_ns)
    ]
    return Trace(system=system, prompt_tokens=prompt_tokens, spans=bars, marks=clock.marks_ms())


class _Claims:
    """The time between two moments, each instant of which can be claimed once."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)] if start < end else []

    @property
    def unclaimed_ns(self) -> int:
        """The unclaimed time."""
        return sum(end - start for start, end in self._free)

    def claim(self, wanted: Iterable[Interval]) -> int:
        """Claim the unclaimed parts of `wanted`; return their total length."""
        before = self.unclaimed_ns
        for start, end in wanted:
            if start < end:
                self._free = [piece for free in self._free for piece in _without(free, (start, end))]
        return before - self.unclaimed_ns


class _Budget:
    """An amount of time; a `take` gets at most what is left of it."""

    def __init__(self, total_ms: float) -> None:
        self._left_ms = max(0.0, total_ms)

    def take(self, wanted_ms: float) -> Part:
        taken_ms = min(max(0.0, wanted_ms), self._left_ms)
        self._left_ms -= taken_ms
        return Part(taken_ms, taken_ms)


def _without(whole: Interval, cut: Interval) -> list[Interval]:
    pieces = [(whole[0], min(whole[1], cut[0])), (max(whole[0], cut[1]), whole[1])]
    return [(start, end) for start, end in pieces if start < end]


def _after(intervals: Iterable[Interval], moment: int) -> list[Interval]:
    return [(max(start, moment), end) for start, end in intervals if end > moment]


def _length(intervals: Iterable[Interval]) -> int:
    total, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        total += max(0, end - begin)
        reached = end if reached is None else max(reached, end)
    return total


def _overlapped(exposed_ns: int, whole: Sequence[Interval]) -> Part:
    """A part that ran in the intervals `whole`, which may overlap with other parts."""
    return Part(max(exposed_ns, _length(whole)) / 1e6, exposed_ns / 1e6)


def _exposed(ns: int) -> Part:
    """A part that is exposed as a whole."""
    return Part(ns / 1e6, ns / 1e6)
