"""Where the time of a request went: moments and spans in, `records.Parts` out. Arithmetic only.

PDX tells every moment, so each instant between a request's arrival and the decode engine's first token is given to one
part, the first in a fixed order that claims it; what nobody claims is `rest`. Hence exposed parts add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from pdx.bench.breakdown.records import Part, Parts
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
    """When each event of a transfer was: at its last shard, but for those that begin something."""

    def __init__(self, moments: Iterable[Moment]) -> None:
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        for moment in moments:
            self._first[moment.event] = min(moment.at_ns, self._first.get(moment.event, moment.at_ns))
            self._last[moment.event] = max(moment.at_ns, self._last.get(moment.event, moment.at_ns))

    @property
    def is_complete(self) -> bool:
        """Whether every moment that parts are made of is there."""
        return self._last.keys() >= NEEDED

    @property
    def to_admitted_ms(self) -> float:
        """From the prefill leg's start until the engine began with it: HTTP, tokenizer and waiting for a turn."""
        return (self[Event.ADMITTED] - self[Event.PREFILL_SENT]) / 1e6

    def __getitem__(self, event: Event) -> int:
        return (self._first if event is Event.LOAD_START else self._last)[event]

    @property
    def handoff_ms(self) -> float:
        """From the end of prefill until the decode engine may run."""
        return (self[Event.RUNNABLE] - self[Event.PREFILL_END]) / 1e6


def queued_ms(to_admitted_ms: Sequence[float], mean_queue_ms: float) -> list[float]:
    """How long each request of a batch waited for its turn, if on average it was `mean_queue_ms`.

    The rest of the way to the engine, HTTP and the tokenizer, is taken to be the same for all of them.
    """
    on_the_way_ms = max(0.0, fmean(to_admitted_ms) - mean_queue_ms)
    return [max(0.0, each - on_the_way_ms) for each in to_admitted_ms]


def of_transfer(
    clock: Clock, spans: Sequence[TraceSpan], *, queued_ms: float, first_step_ms: float, is_gather_beside: bool
) -> Parts:
    """The parts of one request through PDX.

    `queued_ms`: it waited for its turn on the prefill engine. `first_step_ms`: the decode engine's first step.
    `is_gather_beside`: pages are copied beside the forward pass (on a GPU), and cost time only behind its end;
    otherwise the forward pass stands still meanwhile.
    """
    start, end = clock[Event.RECEIVED], clock[Event.DECODE_FIRST]
    admitted, prefill_end, runnable = clock[Event.ADMITTED], clock[Event.PREFILL_END], clock[Event.RUNNABLE]
    time = _Claims(start, end)
    gathers = [(span.start_ns, span.end_ns) for span in spans if span.lane == "gather"]
    writes = [(span.start_ns, span.end_ns) for span in spans if span.lane == "wire"]
    load = (clock[Event.LOAD_START], clock[Event.LOAD_END])
    gather_ns = time.claim(_behind(gathers, prefill_end) if is_gather_beside else gathers)
    prefill_ns = time.claim([(admitted, prefill_end)])
    waits = [(admitted - round(queued_ms * 1e6), admitted), (load[1], runnable)]
    queue_ns = time.claim(waits)
    scatter_ns = time.claim([load])
    wire_ns = time.claim(_behind(writes, prefill_end))
    first = (runnable, runnable + round(first_step_ms * 1e6))
    first_ns = time.claim([first])
    return Parts(
        queue=_all(queue_ns),
        prefill=_all(prefill_ns),
        gather=_beside(gather_ns, gathers),
        wire=_beside(wire_ns, writes),
        scatter=_beside(scatter_ns, [load]),
        first_decode=_beside(first_ns, [first]),
        rest=_all(time.left_ns),
    )


class _Claims:
    """The time between two moments, of which each instant is given away once."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)] if start < end else []

    @property
    def left_ns(self) -> int:
        """What nobody has claimed."""
        return sum(end - start for start, end in self._free)

    def claim(self, wanted: Iterable[Interval]) -> int:
        """Take what is still free of `wanted`; its length."""
        before = self.left_ns
        for start, end in wanted:
            if start < end:
                self._free = [piece for free in self._free for piece in _without(free, (start, end))]
        return before - self.left_ns


def _without(whole: Interval, cut: Interval) -> list[Interval]:
    pieces = [(whole[0], min(whole[1], cut[0])), (max(whole[0], cut[1]), whole[1])]
    return [(start, end) for start, end in pieces if start < end]


def _behind(intervals: Iterable[Interval], moment: int) -> list[Interval]:
    return [(max(start, moment), end) for start, end in intervals if end > moment]


def _length(intervals: Iterable[Interval]) -> int:
    total, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        total += max(0, end - begin)
        reached = end if reached is None else max(reached, end)
    return total


def _beside(exposed_ns: int, whole: Sequence[Interval]) -> Part:
    """A part that may have run beside others, in these intervals."""
    return Part(max(exposed_ns, _length(whole)) / 1e6, exposed_ns / 1e6)


def _all(ns: int) -> Part:
    """A part that nothing hid."""
    return Part(ns / 1e6, ns / 1e6)
