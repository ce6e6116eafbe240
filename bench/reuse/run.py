"""One run of `pdx bench reuse`: every system at every load, from its plan to its files, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from pdx.bench.harness import interrupts
from pdx.bench.harness.ask import AskFailed, ask, completion, gather_or_cancel, session
from pdx.bench.harness.interrupts import deferred_signals, shielded
from pdx.bench.harness.progress import ProgressBar
from pdx.bench.harness.prompts import Prompts
from pdx.bench.harness.report import machine
from pdx.bench.reuse import report
from pdx.bench.reuse.figures import reference
from pdx.bench.reuse.records import ALONE, BURST, DOCUMENTS, FIRST, Asked, Point, Result
from pdx.bench.reuse.systems import SOURCES, CentralRunning, Source
from pdx.bench.reuse.workload import Message, Passage, Session, Turn, order, sessions_of
from pdx.bench.systems import engine_metrics
from pdx.bench.systems import plan as systems_plan
from pdx.bench.systems.fleet import Fleet
from pdx.bench.systems.system import Running
from pdx.testing.waiting import came_true

SAVED_S = 1.5  # for a connector to finish saving after the answer
STORED_S = 60.0  # at most, until a store beyond this host has everything
LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(systems_plan.Plan):
    """The plan of one run."""

    targets: tuple[float, ...]


def run(plan: Plan) -> int:
    """Measure, write the results however the run ends, and leave no process behind; returns the exit status.

    0: a system was measured, and no answer was wrong. 130: SIGINT or SIGTERM. 1: no system could be measured, or an
    answer was wrong.
    """
    result = Result(**plan.initial_fields())
    result.settings["targets"] = plan.targets

    def measure(progress: ProgressBar) -> None:
        fleet = Fleet(plan.bed, list(plan.systems.values()), plan.max_engines)
        try:
            Reuse(result, plan.out / report.RESULT, plan, fleet, progress).run()
        finally:
            with deferred_signals():
                fleet.close()

    def write() -> None:
        result.machine = machine()  # includes the machine's load, now at the end
        report.write(result, plan.out)

    status = plan.carry_out(measure, write)
    is_wrong = any(asked.is_same is False for point in result.points for asked in point.asked)
    return status or int(not result.points or is_wrong)


class Reuse(systems_plan.Measuring[Result, Turn]):
    """The measurements of one run. State, beside the result: which running systems are warm."""

    def __init__(self, result: Result, path: Path, plan: Plan, fleet: Fleet, progress: ProgressBar) -> None:
        super().__init__(result, path, fleet, progress)
        self._plan = plan
        self._settings = plan.settings
        prompts = Prompts.of(plan.bed.model, is_tiny=False)
        self._player = Player(prompts, plan.bed.served_name, plan.settings.output_tokens)
        self._warm: dict[str, Running] = {}

    def run(self) -> None:
        with shielded(asyncio.Runner()) as self._runner:
            self._run_turns(order(self._settings, list(self._plan.systems), all_at_once=self._fleet.holds_all))

    def _amount(self, turn: Turn) -> float:
        return 1.0

    def _has(self, system: str) -> bool:
        return any(point.system == system for point in self.result.points)

    def _measure(self, turn: Turn, running: Running) -> str:
        self.result.points.append(interrupts.run(self._point(turn, running), runner=self._runner.run))
        compare(self.result.points)
        return report.line(self.result.points[-1])

    async def _point(self, turn: Turn, running: Running) -> Point:
        async with session() as client:
            if self._warm.get(turn.system) is not running:
                await self._warm_up(client, running)
                self._warm[turn.system] = running
            is_first = turn.load == FIRST
            if SOURCES[turn.system] is Source.KEPT and not is_first:
                await asyncio.to_thread(engine_metrics.reset, running.url)
            burst_per_s = _burst_per_s(self.result.points, turn)
            sessions = sessions_of(self._settings, turn, burst_per_s)
            # A store for all hosts is filled by another engine than the one that is asked later.
            url = running.prefill_url if is_first and turn.workload == DOCUMENTS else running.url
            watch = engine_metrics.Watch(url)
            asked = await self._player.play(client, url, sessions, is_alone=turn.load in ALONE)
            sums = await asyncio.to_thread(watch.end, len(asked))
            if sums is None:
                raise AskFailed(f"{url} was sent {len(asked)} requests and has counted another number: other clients?")
            await asyncio.to_thread(_wait_until_stored, running)
        rate = turn.rate if turn.share is None or burst_per_s is None else turn.share * burst_per_s
        return Point(
            system=turn.system,
            workload=turn.workload,
            repeat=turn.repeat,
            load=turn.load,
            rate=None if turn.load in (*ALONE, BURST) else rate,
            found=sums[0].found,
            asked=asked,
        )

    async def _warm_up(self, client: aiohttp.ClientSession, running: Running) -> None:
        """Send the longest prompt to every engine twice; the second time, KV kept outside the engine is loaded."""
        tokens = self._settings.longest - self._settings.output_tokens
        for round_ in range(2):
            for url in dict.fromkeys((running.prefill_url, running.url)):
                self._progress.set_status(f"warming up {url}, {round_ + 1} of 2")
                await self._player.play(client, url, [_single("warm-up", tokens)], is_alone=True)
            await asyncio.to_thread(_wait_until_stored, running)
            with contextlib.suppress(engine_metrics.CacheNotReset):
                await asyncio.to_thread(engine_metrics.reset, running.url)


class Player:
    """Plays the sessions of one run. A prompt begins with the tokens of all its session's messages and answers before.

    State: the number of requests sent. For one event loop.
    """

    def __init__(self, prompts: Prompts, model: str, output_tokens: int) -> None:
        self._prompts = prompts
        self._model = model
        self._output_tokens = output_tokens
        self._num_sent = 0

    async def play(
        self,
        client: aiohttp.ClientSession,
        url: str,
        sessions: Sequence[Session],
        *,
        is_alone: bool,
    ) -> list[Asked]:
        """Play all sessions; answers are in the order of sessions and turns. `is_alone`: one session after the other.

        :raises AskFailed: a request was not answered as asked; requests in flight are then cancelled.
        """
        start_s = time.monotonic()
        if is_alone:
            each = [
                await self._converse(client, url, session, time.monotonic() - start_s, start_s) for session in sessions
            ]
        else:
            each = await gather_or_cancel(self._converse(client, url, each, each.start_s, start_s) for each in sessions)
        return sum(each, [])

    async def _converse(
        self,
        client: aiohttp.ClientSession,
        url: str,
        session: Session,
        due_s: float,
        start_s: float,
    ) -> list[Asked]:
        prompt = self._ids(session.document) if session.document else []
        asked: list[Asked] = []
        for number, turn in enumerate(session.messages):
            if number:
                due_s = time.monotonic() - start_s + turn.think_s
            prompt += self._ids(turn.passage)
            await asyncio.sleep(start_s + due_s - time.monotonic())
            self._num_sent += 1
            body = completion(self._model, prompt, self._output_tokens, wants_ids=True)
            answer = await ask(client, url, body, f"pdx-bench-reuse-{self._num_sent}")
            if (answer.prompt_tokens, len(answer.token_ids)) != (len(prompt), self._output_tokens):
                raise AskFailed(
                    f"asked for {len(prompt)} tokens of prompt and {self._output_tokens} of answer, got "
                    f"{answer.prompt_tokens} and {len(answer.token_ids)}"
                )
            asked.append(
                Asked(
                    session=session.index,
                    turn=number,
                    due_s=due_s,
                    end_s=time.monotonic() - start_s,
                    ttft_ms=answer.ttft_ms + (answer.sent_ns / 1e9 - start_s - due_s) * 1e3,  # from when it was due
                    itl_ms=answer.itl_ms,
                    prompt_tokens=len(prompt),
                    token_ids=answer.token_ids,
                )
            )
            prompt += answer.token_ids
        return asked

    def _ids(self, passage: Passage) -> list[int]:
        made = self._prompts.make(passage.tokens, passage.name)
        assert isinstance(made, list)
        return list(made)


def compare(points: list[Point]) -> None:
    """Set `is_same`, in place, of all answers to loads that the reference has answered, too."""
    right_one = reference(points)
    right = {_key(point): point for point in points if point.system == right_one}
    for at, point in enumerate(points):
        computed = right.get(_key(point))
        if computed is not None and point.system != right_one and any(each.is_same is None for each in point.asked):
            points[at] = msgspec.structs.replace(point, asked=list(_compared(point.asked, computed.asked)))


def _compared(asked: Iterable[Asked], computed: Iterable[Asked]) -> Iterable[Asked]:
    answers = {(each.session, each.turn): each.token_ids for each in computed}
    for each in asked:
        is_same = each.token_ids == answers.get((each.session, each.turn))
        yield msgspec.structs.replace(each, is_same=is_same)


def _key(point: Point) -> tuple[str, int, str]:
    return point.workload, point.repeat, point.load


def _burst_per_s(points: Iterable[Point], turn: Turn) -> float | None:
    """Requests per second that the system answered in this workload's burst, in this repeat, if measured."""
    wanted = (turn.system, turn.workload, turn.repeat, BURST)
    found = [p.requests_per_s for p in points if (p.system, p.workload, p.repeat, p.load) == wanted]
    return found[0] if found else None


def _wait_until_stored(running: Running) -> None:
    """Give a connector time to save; then wait until a store beyond this host, if any, receives nothing more."""
    time.sleep(SAVED_S)
    if not isinstance(running, CentralRunning):
        return
    seen: list[int] = []

    def is_quiet() -> bool:
        # Each query adds a few bytes of its own; a chunk adds many.
        seen.append(running.stored_bytes())
        return len(seen) > 2 and seen[-1] - seen[-3] < 1 << 16

    came_true(is_quiet, STORED_S, pause_s=LOOK_S)


def _single(name: str, tokens: int) -> Session:
    return Session(0, 0.0, (Message(Passage(name, tokens)),))
