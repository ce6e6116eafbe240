"""What measuring costs: requests with and without tracing in turns on the same engines, and one span by itself."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pdx.bench.breakdown.observer import Asker, Observer
from pdx.bench.breakdown.records import Overhead
from pdx.telemetry import trace
from pdx.telemetry.trace import Lane, Tracer
from pdx.testing.waiting import came_true

RESAMPLES = 2000
CONFIDENCE = 0.95
SPANS = 20_000  # to time one
STEP_SPANS = 64  # that are written together
SETTLED_S = 5.0  # until the spans of a request are in files

Bodies = Sequence[tuple[str, dict[str, Any]]]


def measure(observer: Observer, bodies: Iterator[Bodies], folder: Path, asker: Asker) -> Iterator[Overhead]:
    """Send `bodies` two by two, one with tracing and one without; after each pair, what is known by then.

    Tracing is on in `folder` before and afterwards.

    :raises AskFailed: the system did not answer.
    """
    span_us = time_span_us()
    ratios: list[float] = []
    e2e_ms: list[float] = []
    spans: list[int] = []
    try:
        for pair in zip(bodies, bodies, strict=False):
            is_on_first = len(ratios) % 2 == 0
            taken = {}
            for one, is_on in zip(pair, (is_on_first, not is_on_first), strict=True):
                trace.switch(folder, is_on)
                answer = observer.ask(one)[0]
                taken[is_on] = answer.e2e_ms
                if is_on:
                    spans.append(_count_spans(folder, answer.transfer))
            ratios.append(taken[True] / taken[False])
            e2e_ms += taken.values()
            low, high = interval_of_median(ratios)
            yield Overhead(
                e2e_ratio=statistics.median(ratios),
                e2e_ratio_low=low,
                e2e_ratio_high=high,
                pairs=len(ratios),
                spans_per_request=statistics.fmean(spans),
                span_us=span_us,
                span_share=statistics.fmean(spans) * span_us / 1e3 / statistics.median(e2e_ms),
                bench_core_share=asker.cpu_s / asker.wall_s,
            )
    finally:
        trace.switch(folder, True)


def _count_spans(folder: Path, transfer: str) -> int:
    """Of one transfer, once no more come."""
    counts = [-1]

    def has_settled() -> bool:
        counts.append(sum(span.transfer == transfer for span in trace.read(folder)))
        return counts[-1] == counts[-2] > 0

    came_true(has_settled, SETTLED_S, pause_s=0.1)
    return max(0, counts[-1])


def time_span_us() -> float:
    """To record one span in this process, with its share of asking whether it is wanted and of writing."""
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as name:
        folder = Path(name)
        trace.switch(folder, True)
        with Tracer(folder, "bench") as tracer:
            start = time.perf_counter()
            for number in range(SPANS):
                if number % STEP_SPANS == 0 and tracer.is_on:
                    tracer.flush()
                now = time.monotonic_ns()
                tracer.span(Lane.GATHER, "0123456789abcdef0123456789abcdef", number % 32, 1, now, now, 1 << 20)
            tracer.flush()
            return (time.perf_counter() - start) / SPANS * 1e6


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence, by drawing from `values` again and again; always the same."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = (1 - CONFIDENCE) / 2
    return medians[int(outside * RESAMPLES)], medians[int((1 - outside) * RESAMPLES) - 1]
