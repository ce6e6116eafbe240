"""Sends a batch of requests to a running system and determines where their time went, after they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdx.bench.breakdown import parts
from pdx.bench.breakdown.parts import Clock
from pdx.bench.breakdown.records import Engines, Parts
from pdx.bench.harness import interrupts
from pdx.bench.harness.ask import Answer, ask, gather_or_cancel, session
from pdx.bench.systems import engine_metrics
from pdx.bench.systems.engine_metrics import Watch
from pdx.telemetry import trace
from pdx.telemetry.timeline import Breakdown, Event, Moment, breakdown
from pdx.telemetry.trace import TraceSpan
from pdx.testing.waiting import came_true

if TYPE_CHECKING:
    from pdx.bench.systems.system import Running, System

REPORTED_S = 10.0  # until the proxy has every moment: nodes report once a second
WRITTEN_S = 5.0  # until every span has been written to a file
NO_PARTS = "what the engines or the proxy should have told, so there are no parts"


async def ask_together(url: str, bodies: Sequence[tuple[str, dict[str, Any]]]) -> list[Answer]:
    """Post all (request id, body) pairs at once; return the answers in the same order.

    :raises AskFailed: a request was not answered; the others are then canceled.
    """
    async with session() as client:
        return await gather_or_cancel(ask(client, url, body, name) for name, body in bodies)


@dataclass(frozen=True, slots=True)
class Observed:
    """One answered request and what is known about it."""

    answer: Answer
    engines: Engines | None = None
    parts: Parts | None = None
    decode_first_ms: float | None = None
    moved_bytes: int = 0
    hidden_share: float | None = None
    clock: Clock | None = None
    spans: list[TraceSpan] = field(default_factory=list)
    lacks: str = ""  # data that should be known but are missing


class Observer:
    """Observes one running system. `traces`: the folder where its processes write spans; None: they write none."""

    def __init__(self, system: System, running: Running, traces: Path | None, *, is_gather_beside: bool) -> None:
        self._system = system
        self._running = running
        self._traces = traces
        self._is_gather_beside = is_gather_beside

    def observe(self, bodies: Sequence[tuple[str, dict[str, Any]]]) -> list[Observed]:
        """Send requests together and wait for everything that is reported about them.

        :raises AskFailed, OSError: the system did not answer.
        """
        watch = Watch(self._running.prefill_url, self._running.decode_url)
        answers = interrupts.run(ask_together(self._running.url, bodies))
        sums = watch.end(len(answers))
        engines = None if sums is None else engine_metrics.engines(*sums)
        if self._system.is_pdx:
            return self._from_timelines(answers, engines)
        if self._system.engines == 1:
            whole = parts.of_one_engine([answer.ttft_ms for answer in answers], engines) if engines else None
            return [Observed(answer, engines, whole, lacks="" if whole else NO_PARTS) for answer in answers]
        return self._from_moments(answers, engines)

    def _from_moments(self, answers: Sequence[Answer], engines: Engines | None) -> list[Observed]:
        found = [self._running.moments(answer.request_id) for answer in answers]
        known = [moments for moments in found if moments is not None]
        mean = parts.of_moments(known, engines) if engines and len(known) == len(answers) else None
        return [
            Observed(
                answer=answer,
                engines=engines,
                parts=mean,
                decode_first_ms=None if at is None else at["decode_first"] - answer.sent_ns / 1e6,
                lacks="" if mean else NO_PARTS,
            )
            for answer, at in zip(answers, found, strict=True)
        ]

    def _from_timelines(self, answers: Sequence[Answer], engines: Engines | None) -> list[Observed]:
        transfers = [answer.transfer for answer in answers]
        timelines = self._timelines(transfers)
        sums = [breakdown(moments) for moments in timelines]
        spans, are_whole = self._spans(transfers, sums)
        clocks = [Clock(moments) for moments in timelines]
        wholes = self._parts(clocks, spans, engines)
        lacks = "" if are_whole else "some spans, so gather and wire are too short"
        return [
            Observed(
                answer=answer,
                engines=engines,
                parts=wholes[index],
                decode_first_ms=(clock[Event.DECODE_FIRST] - answer.sent_ns) / 1e6 if clock.is_complete else None,
                moved_bytes=sums[index].pushed_bytes or sums[index].moved_bytes,
                hidden_share=sums[index].hidden_share,
                clock=clock if clock.is_complete else None,
                spans=spans[index],
                lacks=lacks if wholes[index] is not None else NO_PARTS,
            )
            for index, (answer, clock) in enumerate(zip(answers, clocks, strict=True))
        ]

    def _parts(
        self, clocks: Sequence[Clock], spans: Sequence[list[TraceSpan]], engines: Engines | None
    ) -> Sequence[Parts | None]:
        """The parts of each request of a batch; all None if metrics or moments of any request are missing."""
        if engines is None or not all(clock.is_complete for clock in clocks):
            return [None for _ in clocks]
        queued = parts.queued_ms([clock.to_admitted_ms for clock in clocks], engines.prefill_queue_ms)
        return [
            parts.of_transfer(
                clock,
                spans[index],
                queued_ms=queued[index],
                first_step_ms=engines.decode_first_ms,
                is_gather_beside=self._is_gather_beside,
            )
            for index, clock in enumerate(clocks)
        ]

    def _timelines(self, transfers: Sequence[str]) -> list[list[Moment]]:
        found: list[list[Moment]] = []

        def are_reported() -> bool:
            found[:] = [self._running.timeline(transfer) or [] for transfer in transfers]
            return all(map(_is_reported, found))

        came_true(are_reported, REPORTED_S, pause_s=0.1)
        return found

    def _spans(self, transfers: Sequence[str], sums: Sequence[Breakdown]) -> tuple[list[list[TraceSpan]], bool]:
        """The spans of each transfer, and whether they cover all bytes that were gathered and sent."""
        found: list[list[TraceSpan]] = [[] for _ in transfers]
        folder = self._traces
        if folder is None:
            return found, False

        def are_written() -> bool:
            everything = trace.read(folder)
            found[:] = [[span for span in everything if span.transfer == transfer] for transfer in transfers]
            return all(
                _nbytes(spans, "gather") >= each.moved_bytes and _nbytes(spans, "wire") >= each.pushed_bytes
                for spans, each in zip(found, sums, strict=True)
            )

        return found, came_true(are_written, WRITTEN_S, pause_s=0.1)


def _is_reported(moments: Sequence[Moment]) -> bool:
    """Whether every moment has been reported; a transfer between two nodes has more of them."""
    events = {moment.event for moment in moments}
    needed = parts.NEEDED | {Event.SEALED}
    return events >= (needed | {Event.PUSHED, Event.LANDED} if Event.ACROSS in events else needed)


def _nbytes(spans: Sequence[TraceSpan], lane: str) -> int:
    return sum(span.nbytes for span in spans if span.lane == lane)
