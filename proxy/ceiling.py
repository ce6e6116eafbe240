"""How many tokens a model takes, as its engine says; near that limit only the engine itself is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pdx.errors import LegFailed
from pdx.proxy.leg import Legs
from pdx.proxy.roster import Engine

_ANSWER_S = 5.0  # beside prefill; after an answer that was late, decoders sample for _RETRY_S
_GOOD_S = 300.0
_RETRY_S = 2.0  # an engine that would not say is asked again after


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Known(msgspec.Struct):
    until: float
    cards: dict[str, int | None]


class Ceilings:
    """`max_model_len` by engine and model, asked once in a while."""

    def __init__(self, legs: Legs, *, clock: Callable[[], float]) -> None:
        self._legs = legs
        self._clock = clock
        self._known: dict[str, _Known] = {}

    def forget(self, url: str) -> None:
        """The engine may have been replaced by another."""
        self._known.pop(url, None)

    async def of(self, engine: Engine, model: str | None, *, headers: Mapping[str, str]) -> int | None:
        """The most tokens, prompt and answer together; None: the engine does not say."""
        known = self._known.get(engine.url)
        if known is None or known.until <= self._clock():
            known = await self._ask(engine, headers)
            if known.until > self._clock():
                self._known[engine.url] = known
        limits = [limit for limit in known.cards.values() if limit is not None]
        own = known.cards.get(model) if model is not None else None
        return own if own is not None else min(limits, default=None)  # an adapter's card may lack it

    async def _ask(self, engine: Engine, headers: Mapping[str, str]) -> _Known:
        cards = _Cards(data=[])
        good_s = _RETRY_S
        try:
            answer, raw = await self._legs.get(engine, "/v1/models", headers=headers, timeout_s=_ANSWER_S)
            if answer.status in (401, 403):
                good_s = 0.0  # one client's wrong key says nothing to the others
            elif answer.status == 200:
                cards = msgspec.json.decode(raw, type=_Cards)
                good_s = _GOOD_S
        except (LegFailed, msgspec.MsgspecError, UnicodeDecodeError):
            good_s = _RETRY_S
        return _Known(until=self._clock() + good_s, cards={card.id: card.max_model_len for card in cards.data})
