"""Asks every engine whether it serves: GET /health every few seconds, and one token where requests have failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pdx.errors import Exhausted, LegFailed
from pdx.proxy.health import Health, Reason
from pdx.proxy.leg import Legs
from pdx.proxy.roster import Engine
from pdx.telemetry.faults import Faults

_AT_ONCE = 64  # GET /health under way; where hosts are gone, each takes 5 s
_ANSWER_S = 5.0
_ONE_TOKEN = msgspec.json.encode({"prompt": "a", "max_tokens": 1, "temperature": 0, "stream": False})


class _Completion(msgspec.Struct):
    choices: list[msgspec.Raw]


class Probes:
    """The probes under way; `look` begins those that are due, `close` ends all."""

    def __init__(
        self,
        health: Health,
        legs: Legs,
        *,
        engines: Callable[[], list[Engine]],
        faults: Faults,
        first_byte_timeout_s: float,
    ) -> None:
        self._faults = faults
        self._health = health
        self._legs = legs
        self._engines = engines
        self._first_byte_timeout_s = first_byte_timeout_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self) -> None:
        """Begin what is due."""
        for engine in self._engines():
            if self._health.due(engine.url):
                task = asyncio.create_task(self._probe(engine))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all probes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe(self, engine: Engine) -> None:
        record = self._health.of(engine.url)
        began_at = self._health.clock()
        try:
            async with self._slots:
                began_at = self._health.clock()
                answer, _ = await self._legs.ask(engine, "/health", headers={}, timeout_s=_ANSWER_S)
            if answer.status != 200:
                self._health.probed(record, f"GET /health answered {answer.status}")
            elif record.unproven:
                fault, generates = await self._generates(engine)
                self._health.probed(record, fault, generates=generates)
            else:
                self._health.probed(record, "")
        except LegFailed as failure:
            if failure.reason is Reason.TIMEOUT and record.heard_at >= began_at:
                self._health.not_probed(record)  # it is busy: streams go on
            else:
                self._health.probed(record, f"GET /health: {failure.reason}")
        except Exhausted:
            self._health.not_probed(record)
        except Exception as error:  # noqa: BLE001 - the root of a probe's task
            self._faults.unexpected("a probe", error)
            self._health.not_probed(record)

    async def _generates(self, engine: Engine) -> tuple[str, bool]:
        """What is wrong, and whether the engine is known to generate. One that wants a key does not say.

        Nobody waits for this answer, so a busy engine has as long as for a user's first byte.
        """
        try:
            answer, raw = await self._legs.ask(
                engine, "/v1/completions", headers={}, timeout_s=self._first_byte_timeout_s, payload=_ONE_TOKEN
            )
        except LegFailed as failure:
            return f"one token: {failure.reason}", False
        if answer.status != 200:
            is_fault = answer.failure is not None and answer.status != 429
            return (f"one token: status {answer.status}" if is_fault else ""), False
        try:
            is_one = bool(msgspec.json.decode(raw, type=_Completion).choices)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            is_one = False
        return ("" if is_one else "one token: malformed"), is_one
