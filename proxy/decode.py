"""What is done with the decode leg's answer: pass it on as it is, or put it behind the first token."""

from __future__ import annotations

import re
from collections.abc import Callable
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

_CHOICES = re.compile(rb'"choices"\s*:')


class _Error(msgspec.Struct):
    code: Annotated[int, Meta(ge=100, le=599)]


class _Failure(msgspec.Struct):
    error: _Error


class AsItIs:
    """The engine's answer is the client's, byte for byte, but for how much of the prompt was cached: to the decode
    engine all that arrives is, and the prefill leg may know better by then.
    """

    def __init__(self, cached_tokens: Callable[[], int | None] = lambda: None) -> None:
        """`cached_tokens`: what the prefill engine had of the prompt, as far as it has said so."""
        self._cached_tokens = cached_tokens

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay it. :raises LegFailed: the engine went away before the end."""
        if answer.is_stream:
            await _relay_stream(exchange, answer, self)
        else:
            await _relay_whole(exchange, answer, self)

    def event(self, event: bytes) -> bytes:
        """An event of the client's stream."""
        data = sse.data(event) if b'"cached_tokens"' in event else None
        return event if data is None else sse.event(self.whole(data))

    def whole(self, raw: bytes) -> bytes:
        """The client's answer in one piece."""
        cached = self._cached_tokens()
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

    def event(self, event: bytes) -> bytes:
        """An event of the client's stream."""
        return self._continued.event(event)


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
    exchange.reply.whole(answer.status, shape.whole(raw), content_type=answer.content_type)


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
    await exchange.reply.write(b"".join(map(shape.event, events[:end])))
    exchange.answered = end is not None
