"""What is done with the decode leg's answer: pass it on as it is, or put it behind the first token."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError, Refusal
from pdx.proxy import sse
from pdx.proxy.answer import Continued, FirstToken, PrefillAnswer, merged_answer, with_cached
from pdx.proxy.exchange import Exchange, Outcome
from pdx.proxy.health import Reason
from pdx.proxy.leg import Answer, failed
from pdx.telemetry.timeline import Event

_CACHED = b'"cached_tokens"'
_CHOICES = re.compile(rb'"choices"\s*:')


class _Error(msgspec.Struct):
    code: Annotated[int, Meta(ge=100, le=599)]


class _Failure(msgspec.Struct):
    error: _Error


class AsItIs:
    """The engine's answer is the client's, byte for byte, but for how much of the prompt was cached: to a decode engine
    that was sent its leg together with the prefill leg, all that arrives is.
    """

    def __init__(self, cached_tokens: Callable[[], Awaitable[int | None]] | None = None) -> None:
        """`cached_tokens` waits for what the prefill engine had of the prompt; None: it does not say."""
        self._cached_tokens = cached_tokens

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay it. :raises LegFailed: the engine went away before the end."""
        if answer.is_stream:
            await _relay_stream(exchange, answer, self)
        else:
            await _relay_whole(exchange, answer, self)

    async def pieces(self, events: list[bytes]) -> AsyncIterator[bytes]:
        """Of the client's stream. An event that waits for the prefill engine keeps none before it waiting."""
        first = next((at for at, event in enumerate(events) if _CACHED in event), 0)
        for part in (events[:first], events[first:]):
            if part:
                yield b"".join([await self._event(event) for event in part])

    async def _event(self, event: bytes) -> bytes:
        data = sse.data(event) if self._cached_tokens is not None and _CACHED in event else None
        return event if data is None else sse.event(await self.whole(data))

    async def whole(self, raw: bytes) -> bytes:
        """The client's answer in one piece."""
        cached = await self._cached_tokens() if self._cached_tokens is not None and _CACHED in raw else None
        return raw if cached is None else with_cached(raw, cached)


class Continuation:
    """The engine goes on after the prefill leg's token; to the client the two are one answer."""

    def __init__(self, prefill: PrefillAnswer, first: FirstToken) -> None:
        self._prefill = prefill
        self._first = first
        self._continued = Continued(prefill)

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay it. :raises LegFailed: the engine refused, or went away before the end."""
        if answer.status >= 400:
            # A refusal may be about what this proxy made of the request: the client is not to be told that.
            raise failed(Reason.STATUS_4XX, answer.engine, str(answer.status))
        if answer.is_stream != exchange.streams:
            raise failed(Reason.MALFORMED, answer.engine, f"unexpected {answer.content_type!r}")
        if answer.is_stream:
            await _relay_stream(exchange, answer, self)
        else:
            raw = await answer.read()
            exchange.mark(Event.DECODE_FIRST, answer.engine)
            try:
                merged = merged_answer(self._prefill, self._first.text, raw)
            except ProtocolError as error:
                raise failed(Reason.MALFORMED, answer.engine, str(error)) from error
            exchange.first_token(answer.engine, streams=False)
            exchange.reply.pass_on(answer.headers)
            exchange.reply.whole(200, merged)

    async def pieces(self, events: list[bytes]) -> AsyncIterator[bytes]:
        """Of the client's stream."""
        yield b"".join(map(self._continued.event, events))


async def _relay_whole(exchange: Exchange, answer: Answer, shape: AsItIs) -> None:
    raw = await answer.read()
    exchange.mark(Event.DECODE_FIRST, answer.engine)
    if answer.status >= 400:
        exchange.outcome = Outcome.CLIENT_ERROR
    elif _CHOICES.search(raw) is None:
        raise failed(Reason.MALFORMED, answer.engine, f"{len(raw)} bytes are no answer")
    else:
        exchange.first_token(answer.engine, streams=False)
    exchange.reply.pass_on(answer.headers)
    exchange.reply.whole(answer.status, await shape.whole(raw), content_type=answer.content_type)


async def _relay_stream(exchange: Exchange, answer: Answer, shape: AsItIs | Continuation) -> None:
    exchange.reply.pass_on(answer.headers)
    splitter = sse.EventSplitter()
    is_first = True
    while not exchange.answered and (chunk := await answer.read_some()):
        exchange.mark(Event.DECODE_FIRST, answer.engine)
        try:
            events = splitter.feed(chunk)
        except ProtocolError as error:
            raise failed(Reason.MALFORMED, answer.engine, str(error)) from error
        if events:
            if is_first:
                _check_first(answer, events[0])
            is_first = False
            exchange.first_token(answer.engine, streams=True)
            await _pass_on(exchange, events, shape)
    if not exchange.answered:
        if not sse.is_done(splitter.rest):
            raise failed(Reason.TRUNCATED, answer.engine)
        await _pass_on(exchange, [sse.DONE], shape)
    await exchange.reply.end()
    await answer.drain()


def _check_first(answer: Answer, event: bytes) -> None:
    """:raises LegFailed: it says that the engine failed; nothing was sent, and another one may serve."""
    found = sse.data(event)
    if found is None or not found.startswith(b'{"error"'):
        return
    try:
        code = msgspec.json.decode(found, type=_Failure).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    if code >= 500:
        said = Refusal(code, found, "application/json", answer.headers)
        raise failed(Reason.STATUS_5XX, answer.engine, f"an error {code} in place of a first event", answer=said)


async def _pass_on(exchange: Exchange, events: list[bytes], shape: AsItIs | Continuation) -> None:
    """Those up to the one that ends the stream, behind which nothing matters."""
    end = next((index for index, event in enumerate(events, 1) if sse.is_done(event)), None)
    async for piece in shape.pieces(events[:end]):
        await exchange.reply.write(piece)
    exchange.answered = end is not None
