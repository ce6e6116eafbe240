"""Runs the latency breakdown: sends the same prompts to every system in turns, and keeps where their time went."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdx.bench.breakdown import parts
from pdx.bench.breakdown.observer import Observed, Observer
from pdx.bench.breakdown.records import Copy, Request, Result
from pdx.bench.harness.ask import AskFailed
from pdx.bench.harness.lists import in_turns
from pdx.bench.harness.prompts import Bodies
from pdx.bench.systems.plan import Measuring

if TYPE_CHECKING:
    from pdx.bench.harness.progress import ProgressBar
    from pdx.bench.systems.fleet import Fleet
    from pdx.bench.systems.system import Running, System

PLAIN = "plain"  # the system whose answers are the reference
TOKEN_WEIGHT = 50  # for the progress bar: an answer token takes as long as this many prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which requests are sent, and how often."""

    tokens: tuple[int, ...]
    concurrency: tuple[int, ...]
    output_tokens: int
    rounds: int
    warmups: int  # batches of the largest kind, after each start of a system


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch of one system: `concurrency` requests of `tokens` at once."""

    round: int
    tokens: int
    concurrency: int
    system: str

    def __str__(self) -> str:
        return f"{self.system}, {self.concurrency} × {self.tokens:,} tokens, round {self.round + 1}"


def order(settings: Settings, systems: Sequence[str], *, all_at_once: bool) -> list[Turn]:
    points = list(product(settings.tokens, settings.concurrency))
    turns = in_turns(settings.rounds, points, systems, all_at_once=all_at_once)
    return [Turn(round_, tokens, concurrency, name) for round_, (tokens, concurrency), name in turns]


class Breakdown(Measuring[Result, Turn]):
    """A run of the latency breakdown; keeps the texts to compare, and the observers of running systems.

    `traces`: a private folder with a subfolder of spans per PDX system, by name. `copy_ms`: waits until engines sleep
    and returns the median time of a memcpy of that many bytes.
    """

    def __init__(
        self,
        result: Result,
        path: Path,
        settings: Settings,
        *,
        systems: Mapping[str, System],
        fleet: Fleet,
        bodies: Bodies,
        traces: Path,
        progress: ProgressBar,
        copy_ms: Callable[[int], float],
        is_gather_beside: bool,
    ) -> None:
        super().__init__(result, path, fleet, progress)
        self._settings = settings
        self._systems = systems
        self._bodies = bodies
        self._traces = traces
        self._copy_ms = copy_ms
        self._is_gather_beside = is_gather_beside
        self._observers: dict[str, tuple[Running, Observer]] = {}
        self._texts: dict[tuple[str, int, int, int, int], str] = {}

    def run(self) -> None:
        self._run_turns(order(self._settings, list(self._systems), all_at_once=self._fleet.holds_all))

    def _amount(self, turn: Turn) -> float:
        return turn.concurrency * (turn.tokens + TOKEN_WEIGHT * self._settings.output_tokens)

    def _has(self, system: str) -> bool:
        return any(request.system == system for request in self.result.requests)

    def _measure(self, turn: Turn, running: Running) -> str:
        observer = self._observer(turn.system, running)
        names = [f"{turn.round} {turn.tokens} {turn.concurrency} {index}" for index in range(turn.concurrency)]
        observed = observer.observe(self._bodies.make(turn.system, turn.tokens, names))
        self._check(observed, turn)
        self._keep(turn, observed)
        self._fleet.pause_pollers()  # no engine takes processor time while the reference is timed
        nbytes = turn.tokens * int(self.result.model["kv_bytes_per_token"])
        self.result.copies.append(Copy(turn.round, nbytes, self._copy_ms(nbytes)))
        self._compare()
        return _line(self.result.requests[-turn.concurrency :], observed)

    def _observer(self, name: str, running: Running) -> Observer:
        """The observer of a running system, which is warmed up first if it was just started."""
        known = self._observers.get(name)
        if known is not None and known[0] is running:
            return known[1]
        system = self._systems[name]
        traces = self._traces / name if system.is_pdx else None
        observer = Observer(system, running, traces, is_gather_beside=self._is_gather_beside)
        tokens, together = max(self._settings.tokens), max(self._settings.concurrency)
        for number in range(self._settings.warmups):
            self._progress.set_status(f"warming up {name}, {number + 1} of {self._settings.warmups}")
            observer.observe(self._bodies.make(name, tokens, [f"warm {number} {index}" for index in range(together)]))
        self._observers[name] = (running, observer)
        return observer

    def _check(self, observed: Sequence[Observed], turn: Turn) -> None:
        for each in observed:
            counts = (each.answer.prompt_tokens, each.answer.output_tokens)
            if counts != (turn.tokens, self._settings.output_tokens):
                asked = f"{turn.tokens} prompt tokens and {self._settings.output_tokens} of answer"
                raise AskFailed(f"asked for {asked}, got {counts[0]} and {counts[1]}")

    def _keep(self, turn: Turn, observed: Sequence[Observed]) -> None:
        for index, each in enumerate(observed):
            answer = each.answer
            self._texts[turn.system, turn.round, turn.tokens, turn.concurrency, index] = answer.text
            self.result.requests.append(
                Request(
                    system=turn.system,
                    round=turn.round,
                    prompt_tokens=answer.prompt_tokens,
                    concurrency=turn.concurrency,
                    index=index,
                    ttft_ms=answer.ttft_ms,
                    itl_ms=answer.itl_ms,
                    e2e_ms=answer.e2e_ms,
                    output_tokens=answer.output_tokens,
                    decode_first_ms=each.decode_first_ms,
                    is_same=None,
                    parts=each.parts,
                    engines=each.engines,
                    moved_bytes=each.moved_bytes,
                    hidden_share=each.hidden_share,
                )
            )
            if each.clock is not None and turn.concurrency == 1:
                self._keep_trace(turn, each.clock, each)

    def _keep_trace(self, turn: Turn, clock: parts.Clock, observed: Observed) -> None:
        """Keep the moments of a request that ran alone, and its spans if it is the first one of its length."""
        has_spans = any(
            trace.spans and (trace.system, trace.prompt_tokens) == (turn.system, turn.tokens)
            for trace in self.result.traces
        )
        spans = [] if has_spans else observed.spans
        self.result.traces.append(parts.trace_of(turn.system, turn.tokens, clock, spans))

    def _compare(self) -> None:
        """Compare every answer with plain vLLM's to the same prompt, once both are known."""
        for at, request in enumerate(self.result.requests):
            if request.is_same is None and request.system != PLAIN:
                key = (request.round, request.prompt_tokens, request.concurrency, request.index)
                right, own = self._texts.get((PLAIN, *key)), self._texts.get((request.system, *key))
                if right is not None:
                    self.result.requests[at] = msgspec.structs.replace(request, is_same=own == right)


def _line(batch: Sequence[Request], observed: Sequence[Observed]) -> str:
    """A one-line summary of a batch."""
    ttft_ms = statistics.fmean(request.ttft_ms for request in batch)
    gaps = [gap for request in batch for gap in request.itl_ms]
    itl = f", {statistics.fmean(gaps):.1f} ms between tokens" if gaps else ""
    wrong = "; an answer DIFFERS from plain vLLM's" if any(request.is_same is False for request in batch) else ""
    lacks = next((f"; it lacks {each.lacks}" for each in observed if each.lacks), "")
    return f"first token after {ttft_ms:,.0f} ms{itl}{wrong}{lacks}"
