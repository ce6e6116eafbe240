"""Requests to engines beside those of clients: whether they serve (GET /health every few seconds, one token after a
request failed), and which models they have.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from aiohttp import web

from pdx.errors import Exhausted, LegFailed, RequestRefused
from pdx.proxy.engines import Engine, Engines
from pdx.proxy.health import FULL, PROBE_S, EngineState, Reason
from pdx.proxy.leg import Legs, failed
from pdx.proxy.reply import error_body
from pdx.proxy.routes import Route
from pdx.telemetry.env import Env
from pdx.telemetry.recent import remember

_AT_ONCE = 64  # concurrent GET /health; if hosts are gone, each takes 5 s
_ANSWER_S = 5.0
_LISTED_S = 30.0  # how often a healthy engine is asked for its models: each time adds a line to its log
_ONE_TOKEN = b'{"prompt":"a","max_tokens":1,"temperature":0,"stream":false}'
_GOOD_S = 3.0
_LIST_S = 2.0
_ALL_S = 4.0  # no further engine is asked after this
_MOST_KEPT = 64  # answers, one per Authorization header: engines may show different models to different clients
_LISTS_AT_ONCE = 16
_AGAIN_S = 1.0  # delay before a list is asked for again that lacked a requested model
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_HAS_NONE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)  # other refusals may be due to a client's headers


class _Kept:
    """The answer for one client, and a lock held while it is asked for."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.until = float("-inf")
        self.status = 0
        self.body = b""


class Probes:
    """Probes engines when `look` finds it due, and fetches their lists of models: for clients, whose answer is kept for
    a few seconds, and to find out which engine has a requested model (`Record.models`). Engines that require a key are
    asked for their lists with the client's key."""

    def __init__(self, engines: Engines, legs: Legs, env: Env, *, first_byte_timeout_s: float) -> None:
        self._health = engines.health
        self._legs = legs
        self._faults = env.faults
        self._engines = engines
        self._first_byte_timeout_s = first_byte_timeout_s
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._tasks: set[asyncio.Task[object]] = set()
        self._probe_slots = asyncio.Semaphore(_AT_ONCE)
        self._list_slots = asyncio.Semaphore(_LISTS_AT_ONCE)  # for all clients together; besides, one per engine
        self._search_slots = asyncio.Semaphore(_LISTS_AT_ONCE)  # of `holder`

    def look(self) -> None:
        """Start the probes that are due."""
        for engine in self._engines.all():
            if self._health.due(engine.url):
                self._begin(self._probe(engine))

    def _begin(self, asking: Coroutine[Any, Any, object]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(asking)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # of a list: if this process lacks resources, the request's legs will notice

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- whether they are well --------------------------------------------------------------

    async def _probe(self, engine: Engine) -> None:
        record = self._health.of(engine.url)
        began_at = self._health.clock()
        try:
            async with self._probe_slots:
                began_at = self._health.clock()
                answer, _ = await self._legs.ask(engine, "/health", headers={}, timeout_s=_ANSWER_S)
                is_old = began_at - record.listed_at >= _LISTED_S
                if answer.status == 200 and (is_old or record.state is not EngineState.WELL):
                    record.listed_at = began_at
                    with suppress(LegFailed):
                        await self.learn(engine, {})
            if answer.status != 200:
                self._health.probed(record, f"GET /health answered {answer.status}", answers=False)
            elif record.unproven:
                fault, generates = await self._generates(engine)
                self._health.probed(record, fault, generates=generates)
            else:
                self._health.probed(record, "")
        except LegFailed as failure:
            if failure.reason is Reason.TIMEOUT and record.heard_at >= began_at:
                self._health.not_probed(record)  # it is busy: its streams go on
            else:
                if failure.unsent and record.state is EngineState.SUSPECT and not engine.named:
                    # Unless it is reported, it is forgotten: another server may get its address.
                    record.well_at = float("-inf")
                self._health.probed(record, f"GET /health: {failure.why}", answers=False)
        except Exhausted:
            self._health.not_probed(record)
        except Exception as error:  # noqa: BLE001 - the root of a probe's task
            self._faults.unexpected("a probe", error)
            self._health.not_probed(record)

    async def _generates(self, engine: Engine) -> tuple[str, bool]:
        """What is wrong, and whether the engine is known to generate. An engine that requires a key does not tell.

        No user waits for this answer, so a busy engine gets as long as for a user's first byte.
        """
        try:
            answer, raw = await self._legs.ask(
                engine, "/v1/completions", headers={}, timeout_s=self._first_byte_timeout_s, payload=_ONE_TOKEN
            )
        except LegFailed as failure:
            return f"one token: {failure.why}", False
        if answer.status != 200:
            is_fault = answer.failure is not None and answer.failure not in FULL
            return (f"one token: status {answer.status}" if is_fault else ""), False
        if Route.COMPLETIONS.aborted.search(raw) is not None:
            return "one token: aborted", False
        try:
            is_one = bool(json.loads(raw)["choices"])
        except (ValueError, KeyError, TypeError, RecursionError):
            is_one = False
        return ("" if is_one else "one token: malformed"), is_one

    # ---- which models they have -------------------------------------------------------------

    async def answer(self, headers: Mapping[str, str]) -> web.Response:
        """The model list for a client with these headers. :raises Exhausted: this process cannot open a connection."""
        kept = self._kept_for(headers)
        async with kept.lock:
            if kept.until <= self._health.clock():
                kept.status, kept.body = await self._ask(headers)
                kept.until = self._health.clock() + _GOOD_S
        return web.Response(status=kept.status, body=kept.body, content_type="application/json")

    async def place(self, model: str | None, headers: Mapping[str, str]) -> None:
        """Before a request with these headers is placed, find out which engines have its model.

        If one is known to have it, engines whose list is unknown are asked in the background. Otherwise the model may
        be new: all are asked, and the request waits for their answers.
        """
        engines = self._engines.all()
        if len(engines) < 2:
            return
        if self._is_known(model):
            unknown = [each for each in engines if self._health.of(each.url).models is None]
            for engine in self._due(unknown) if unknown else ():
                self._begin(self._cards_of(engine, headers, float("inf")))
            return
        with suppress(TimeoutError):  # those before it may have waited long
            async with asyncio.timeout(_ALL_S), self._kept_for(headers).lock:
                if not self._is_known(model):
                    asked = (self._cards_of(each, headers, float("inf")) for each in self._due(self._well_first()))
                    await asyncio.gather(*asked)

    def _well_first(self) -> list[Engine]:
        """All engines; those that may hang get the last turns."""
        return sorted(self._engines.all(), key=lambda each: self._health.of(each.url).avoided)

    def _is_known(self, model: str | None) -> bool:
        """Whether an engine is known to have the model, or to have no list."""
        lists = (self._health.of(each.url).models for each in self._engines.all())
        return any(names is not None and (model is None or not names or model in names) for names in lists)

    def _due(self, engines: Sequence[Engine]) -> list[Engine]:
        """The engines that may be asked now; they are then not due for a while."""
        now = self._health.clock()
        found = [engine for engine in engines if self._health.of(engine.url).list_at <= now]
        for engine in found:
            self._health.of(engine.url).list_at = now + _AGAIN_S
        return found

    async def holder(self, name: str, headers: Mapping[str, str]) -> Engine | None:
        """The engine that stores the response of this name, for a client with these headers.

        :raises RequestRefused: too many others are being looked for.
        """

        async def asked(engine: Engine) -> Engine | None:
            with suppress(LegFailed, Exhausted):  # if this process cannot connect, the request's leg will say so
                async with self._search_slots:
                    path = f"/v1/responses/{quote(name, safe='', errors='replace')}"
                    answer, _ = await self._legs.ask(engine, path, headers=headers, timeout_s=_LIST_S)
                    return engine if answer.status == HTTPStatus.OK else None
            return None

        engines = self._well_first()
        if len(engines) < 2:
            return None
        asking = [asyncio.create_task(asked(engine)) for engine in engines]
        try:
            async with asyncio.timeout(_ALL_S):
                for each in asyncio.as_completed(asking):
                    if (found := await each) is not None:
                        return found  # the others may hang
            return None
        except TimeoutError as error:  # engines that were asked have answered or failed by now
            text = "too many requests ask at once which engine stores a response; come back later"
            raise RequestRefused(429, text, retry_after_s=1) from error
        finally:
            for task in asking:
                task.cancel()

    async def learn(self, engine: Engine, headers: Mapping[str, str]) -> tuple[int, bytes, list[dict[str, Any]] | None]:
        """Ask one engine for its models: returns the status, the body and, if that is a list, the models. Records what
        it serves.

        :raises LegFailed: it does not answer. :raises Exhausted: this process cannot open a connection.
        """
        record = self._health.of(engine.url)
        try:
            answer, raw = await self._legs.ask(engine, "/v1/models", headers=headers, timeout_s=_LIST_S)
            if answer.failure is not None:
                raise failed(answer.failure, engine, f"status {answer.status}")
        except LegFailed:
            record.list_at = self._health.clock() + PROBE_S
            raise
        cards = _cards(raw) if answer.status == HTTPStatus.OK else None
        if cards is not None:
            record.models = dict.fromkeys(card["id"] for card in cards)
            record.adapters = frozenset(card["id"] for card in cards if card.get("parent"))
        elif answer.status in _REFUSED:
            record.list_at = float("-inf")  # the next client's key may be accepted
        elif answer.status in _HAS_NONE:
            # An engine's list does not go away: this may be another server, at the address of one that has ended.
            record.models = None if engine.detached and record.models != {} else {}
        return answer.status, raw, cards

    def _kept_for(self, headers: Mapping[str, str]) -> _Kept:
        key = headers.get("Authorization", "")
        return remember(self._kept, key, self._kept.get(key) or _Kept(), _MOST_KEPT)

    async def _ask(self, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """The first engine's answer and, if that was a list, what the other healthy engines add."""
        states = {engine.url: self._health.of(engine.url).state for engine in self._engines.all()}
        left = sorted(self._engines.all(), key=lambda each: (states[each.url] is EngineState.SUSPECT, not each.decodes))
        give_up_at = self._health.clock() + _ALL_S
        while left and self._health.clock() < give_up_at:
            first = left.pop(0)
            try:
                status, raw, found = await self.learn(first, headers)
            except LegFailed:
                continue
            if found is None:
                return status, raw
            well = [each for each in left if states[each.url] is not EngineState.SUSPECT]
            more = await asyncio.gather(*(self._cards_of(each, headers, give_up_at) for each in well))
            by_id = {card["id"]: card for cards in (*reversed(more), found) for card in cards}
            order = dict.fromkeys(card["id"] for cards in (found, *more) for card in cards)
            merged = {"object": "list", "data": [by_id[name] for name in order]}
            return 200, json.dumps(merged, separators=(",", ":")).encode()
        return 503, error_body(503, "no engine is available")

    async def _cards_of(self, engine: Engine, headers: Mapping[str, str], give_up_at: float) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(_LIST_S) as turn, self._list_slots:
                turn.reschedule(None)  # what follows has a limit of its own
                if self._health.clock() >= give_up_at:
                    return []
                _, _, found = await self.learn(engine, headers)
        except (LegFailed, TimeoutError):
            return []
        return found or []


def _cards(raw: bytes) -> list[dict[str, Any]] | None:
    """The models in an engine's list; None: it is not a list."""
    try:
        cards = json.loads(raw)["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_list = isinstance(cards, list) and all(isinstance(card, dict) and "id" in card for card in cards)
    return cards if is_list and all(isinstance(card["id"], str) for card in cards) else None
