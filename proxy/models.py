"""GET /v1/models: what all engines serve, as one list."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from pdx.errors import LegFailed
from pdx.proxy import fault
from pdx.proxy.health import Health, State
from pdx.proxy.leg import Legs
from pdx.proxy.roster import Engine

_GOOD_S = 3.0
_ANSWER_S = 2.0
_ALL_S = 4.0  # no further engine is asked later than that
_MOST_KEPT = 64  # answers, one for each Authorization: engines may show different clients different models
_AT_ONCE = 16


class _Kept:
    """One client's answer, and the lock of who asks for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.until = float("-inf")
        self.status = 0
        self.body = b""


class Models:
    """Asks the engines, and keeps the answer for a few seconds."""

    def __init__(
        self,
        health: Health,
        legs: Legs,
        *,
        engines: Callable[[], list[Engine]],
    ) -> None:
        self._health = health
        self._legs = legs
        self._engines = engines
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._slots = asyncio.Semaphore(_AT_ONCE)  # of all clients together, beside one engine for each of them

    async def answer(self, headers: Mapping[str, str]) -> web.Response:
        """For a client that sent these headers.

        :raises Exhausted: this process lacks what a connection needs.
        """
        kept = self._kept.setdefault(headers.get("Authorization", ""), _Kept())
        self._kept.move_to_end(headers.get("Authorization", ""))
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        async with kept.lock:
            if kept.until <= self._health.clock():
                kept.status, kept.body = await self._ask(headers)
                kept.until = self._health.clock() + _GOOD_S
        return web.Response(status=kept.status, body=kept.body, content_type="application/json")

    async def _ask(self, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """The first engine's answer, and what the other well ones add if that was a list."""
        states = {engine.url: self._health.of(engine.url).state for engine in self._engines()}
        left = sorted(self._engines(), key=lambda each: (states[each.url] is State.SUSPECT, not each.decodes))
        give_up_at = self._health.clock() + _ALL_S
        while left and self._health.clock() < give_up_at:
            first = left.pop(0)
            try:
                answer, raw = await self._legs.ask(first, "/v1/models", headers=headers, timeout_s=_ANSWER_S)
            except LegFailed:
                continue
            if answer.failure is not None:
                continue
            found = _cards(raw) if answer.status == 200 else None
            if found is None:
                return answer.status, raw
            well = [each for each in left if states[each.url] is not State.SUSPECT]
            more = await asyncio.gather(*(self._cards_of(each, headers, give_up_at) for each in well))
            by_id = {card["id"]: card for cards in (*reversed(more), found) for card in cards}
            order = dict.fromkeys(card["id"] for cards in (found, *more) for card in cards)
            merged = {"object": "list", "data": [by_id[name] for name in order]}
            return 200, json.dumps(merged, separators=(",", ":")).encode()
        return 503, fault.body(503, "no engine is available")

    async def _cards_of(self, engine: Engine, headers: Mapping[str, str], give_up_at: float) -> list[dict[str, Any]]:
        try:
            async with self._slots:
                if self._health.clock() >= give_up_at:
                    return []
                answer, raw = await self._legs.ask(engine, "/v1/models", headers=headers, timeout_s=_ANSWER_S)
        except LegFailed:
            return []
        return (_cards(raw) or []) if answer.status == 200 else []


def _cards(raw: bytes) -> list[dict[str, Any]] | None:
    """The models of an engine's list; None: it is not one."""
    try:
        cards = json.loads(raw)["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_list = isinstance(cards, list) and all(isinstance(card, dict) and "id" in card for card in cards)
    return cards if is_list and all(isinstance(card["id"], str) for card in cards) else None
