"""Builds the client's answer from the legs' answers: the decode leg's unchanged, or the first token followed by the
rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from pdx.errors import LegFailed, ProtocolError, Refusal
from pdx.proxy import sse
from pdx.proxy.engines import Engine
from pdx.proxy.exchange import Exchange
from pdx.proxy.health import Reason
from pdx.proxy.leg import Answer, failed
from pdx.proxy.metrics import Outcome
from pdx.proxy.plan import token_count
from pdx.proxy.routes import Route
from pdx.proxy.usage import Usage, counts_cached, usage_of, with_cached
from pdx.telemetry.timeline import Event


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = Raw(b"null")


class PrefillAnswer(msgspec.Struct, frozen=True):
    """An engine's answer to a request for one token; for a response or a message only its usage."""

    id: str
    created: int
    model: str
    usage: Usage
    choices: list[_Choice]

    @property
    def choice(self) -> _Choice:
        return self.choices[0]


_DATA, _CHOICES = b"data: ", b',"choices":['
_HEAD = frozenset(("id", "object", "created", "model"))
_BEGUN = re.compile(rb'event: message_start\b|data: .*"delta": ?\{"role": ?"assistant"(, ?"content": ?"")?\}')
_SPECIAL = re.compile(rb'"(?:usage|metrics)"|\r|\n.')  # fields to rewrite, and events of several lines

_decoder = msgspec.json.Decoder(PrefillAnswer)
_parts = msgspec.json.Decoder(dict[str, Raw])
_choices = msgspec.json.Decoder(list[dict[str, Raw]])


def decode_prefill(raw: bytes, route: Route = Route.COMPLETIONS, prompts: int = 1) -> PrefillAnswer:
    """:raises ProtocolError: the answer does not have a usage, and one choice and token per prompt."""
    if is_other := route in (Route.RESPONSES, Route.MESSAGES):
        answer = PrefillAnswer(id="", created=0, model="", usage=usage_of(route, raw), choices=[])
    else:
        try:
            answer = _decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a prefill answer of {len(raw)} bytes does not decode: {error}") from error
    usage, choices = answer.usage, prompts if is_other else len(answer.choices)
    if choices != prompts or usage.prompt_tokens < 1 or usage.completion_tokens < prompts:  # no token: aborted
        text = f"{choices} choices with {usage.completion_tokens} tokens for {usage.prompt_tokens} prompt tokens"
        raise ProtocolError(f"a prefill answer has {text}")
    return answer


def is_forwardable(answer: PrefillAnswer) -> bool:
    """Whether this token can be sent to the client on its own; otherwise the decode engine has to sample it.

    If the text is empty or ends in U+FFFD, it is the beginning of a character whose other bytes come with the next
    tokens. The decode engine's detokenizer would not join them to a byte that it takes for part of the prompt.
    """
    choice = answer.choice
    return (
        token_count(choice.prompt_token_ids) == answer.usage.prompt_tokens
        and choice.token_ids is not None
        and len(choice.token_ids) == 1
        and choice.finish_reason == "length"
        and bool(choice.text)
        and not (choice.text or "").endswith("\ufffd")
    )


def first_event(prefill: PrefillAnswer, options: dict[str, Any]) -> bytes:
    chunk = _chunk(prefill)
    choice = {"index": 0, "text": prefill.choice.text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    chunk["choices"] = [{**choice, "prompt_token_ids": None, "token_ids": None}]
    if options.get("include_usage") and options.get("continuous_usage_stats"):
        chunk["usage"] = {}
        _correct_usage(chunk["usage"], prefill, added=1, details=None)
    return sse.event(_encode(chunk))


def _chunk(prefill: PrefillAnswer) -> dict[str, Any]:
    return {"id": prefill.id, "object": "text_completion", "created": prefill.created, "model": prefill.model}


def _known(details: dict[str, Any] | None) -> dict[str, Any] | None:
    """In streams, unlike in whole answers, vLLM omits null fields."""
    return details and {name: value for name, value in details.items() if value is not None}


def _correct_usage(
    usage: dict[str, Any], prefill: PrefillAnswer, *, added: int, details: dict[str, Any] | None
) -> None:
    """Add `added` generated tokens to the usage, and replace the cached tokens by the prefill engine's count."""
    usage["prompt_tokens"] = prefill.usage.prompt_tokens
    usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + added
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    if details is not None:
        usage["prompt_tokens_details"] = details
    elif usage.get("prompt_tokens_details") is not None:
        usage["prompt_tokens_details"] = None


def _encode(value: dict[str, Any]) -> bytes:
    # Formatted as vLLM does; lone surrogates, which UTF-8 cannot encode, stay escaped.
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


class AsItIs:
    """Passes the engine's answer on byte for byte, except for the counts of cached tokens: a decode engine regards all
    that arrives as cached and computes nothing."""

    def __init__(
        self,
        route: Route,
        counts: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
    ) -> None:
        """`counts` awaits the prefill engine's counts."""
        self._route = route
        self._counts = counts

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay the answer. :raises LegFailed: it is not whole; if it ends in an error, the client has that."""
        if answer.is_stream:
            await _relay_stream(exchange, answer, self)
            return
        if exchange.reply.started:
            # The refusal may be about the proxy's rewritten request, which the client must not be told.
            refused = Reason.STATUS_4XX if answer.status >= 400 else Reason.MALFORMED
            raise failed(refused, answer.engine, f"{answer.status}, {answer.content_type!r}")
        raw = await answer.read()
        if answer.status >= 400:
            exchange.outcome = Outcome.CLIENT_ERROR
        elif self._route.member.search(raw) is None:
            raise failed(Reason.MALFORMED, answer.engine, f"{len(raw)} bytes are no answer")
        elif self._route.aborted.search(raw) is not None:
            raise failed(Reason.TRUNCATED, answer.engine, "it has aborted the request")
        else:
            exchange.mark(Event.DECODE_FIRST, answer.engine)
            exchange.token(answer.engine, streams=False)
        exchange.reply.pass_on(answer.headers)
        exchange.reply.whole(answer.status, await self.whole(raw), content_type=answer.content_type)

    async def first(self, exchange: Exchange, answer: Answer) -> bytes:
        """The next bytes to send of a stream of which no token has come yet."""
        return await answer.read_some()

    def at_once(self, events: list[bytes]) -> bytes | None:
        """What the client gets for these events; None if one of them has to wait for the prefill engine's counts."""
        raw = b"".join(events)
        return raw if self._counts is None or not counts_cached(self._route, raw) else None

    async def pieces(self, events: list[bytes]) -> AsyncIterator[bytes]:
        """Same as `at_once`, when an event has to wait: the events before it are sent without delay."""
        first = next((at for at, event in enumerate(events) if counts_cached(self._route, event)), 0)
        for part in (events[:first], events[first:]):
            if part:
                yield b"".join([await self._event(event) for event in part])

    async def _event(self, event: bytes) -> bytes:
        data = sse.data(event) if self._counts is not None and counts_cached(self._route, event) else None
        return event if data is None else sse.with_data(event, await self.whole(data))

    async def whole(self, raw: bytes) -> bytes:
        """The client's answer as a single body."""
        if self._counts is None or not counts_cached(self._route, raw):
            return raw
        return with_cached(self._route, raw, await self._counts())


class Bytes:
    """Passes on the engine's answer, of any content type, as it arrives."""

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay the answer. :raises LegFailed: the engine disconnected before the end."""
        piece = await answer.read_some()
        if answer.status >= 400:
            exchange.outcome = Outcome.CLIENT_ERROR
        exchange.reply.pass_on(answer.headers)
        await exchange.reply.begin(answer.status, answer.headers)
        while piece:
            await exchange.reply.write(piece)
            piece = await answer.read_some()
        exchange.answered = True
        await exchange.reply.end()


class Sent(NamedTuple):
    """What the client has already been sent of the prefill engine's answer."""

    answer: PrefillAnswer
    before: Engine  # an engine whose answer had begun, but that had sampled no token yet

    @property
    def ids(self) -> tuple[Raw, int]:
        """Ids of the prompt and of the token."""
        choice = self.answer.choice
        assert choice.token_ids is not None
        return choice.prompt_token_ids, choice.token_ids[0]

    @property
    def text(self) -> str:
        return self.answer.choice.text or ""


class FirstTokenDiffers(Exception):
    """The decode engine's answer begins with another token than the client was sent."""

    def __init__(self, sent: Sent) -> None:
        super().__init__(sent)
        self.sent = sent


class Forwarded(AsItIs):
    """Sends the prefill engine's token if it arrives first, then the decode engine's answer without that token, with
    which it begins. The client sees one stream with one id.

    Texts are compared, not token ids: equal text is the same answer to the client, whichever tokens produce it.

    Nearly all events of a stream begin with the same bytes, up to their choices. Those bytes are replaced without
    parsing the rest of the event.
    """

    def __init__(
        self,
        route: Route,
        counts: Callable[[], Awaitable[Mapping[str, int]]],
        prefill: asyncio.Future[Any],
        early: Callable[[Engine], PrefillAnswer | None],
    ) -> None:
        """`early`: the answer of `prefill`, if its token may be sent before this decode engine samples one."""
        super().__init__(route, counts)
        self.sent: Sent | None = None
        self.continues = False  # whether that token is part of the decode engine's prompt
        self._prefill = prefill
        self._early = early
        self._owed = ""  # the part of that token's text that the decode engine has yet to repeat
        self._head = b""
        self._their_head = b""  # the prefix seen so far: "data: " and JSON without its end

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay the answer.

        :raises LegFailed: the engine refused, or disconnected before the end.
        :raises FirstTokenDiffers: nothing of the answer was sent.
        """
        self._owed = self.sent.text if self.sent is not None and not self.continues else ""
        await super().take(exchange, answer)

    async def first(self, exchange: Exchange, answer: Answer) -> bytes:
        if self.sent is not None:
            return await answer.read_some()
        reading = asyncio.ensure_future(answer.read_some())
        reading.add_done_callback(lambda each: each.cancelled() or each.exception())  # if nobody awaits it any more
        try:
            await asyncio.wait([reading, self._prefill], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and (found := self._early(answer.engine)) is not None:
                self.sent = Sent(found, answer.engine)
                self._owed, self._head = self.sent.text, _encode(_chunk(found))[:-1]
                await exchange.reply.write(first_event(found, exchange.stream_options), is_ahead=True)
            return await reading
        finally:
            reading.cancel()

    def at_once(self, events: list[bytes]) -> bytes | None:
        return super().at_once(events) if self.sent is None else b"".join(map(self.event, events))

    def event(self, event: bytes) -> bytes:
        """The event as the client gets it; b"" if the client has it already. :raises FirstTokenDiffers: see there."""
        is_known = self._their_head and event.startswith(self._their_head)
        if is_known and not self._owed and not _SPECIAL.search(event):
            return b"data: " + self._head + event[len(self._their_head) :]
        data = sse.data(event)
        if data is None or sse.is_done(event):
            return event
        try:
            chunk = json.loads(data)
        except ValueError:
            return event
        if not isinstance(chunk, dict) or "choices" not in chunk:
            return event  # an error, in its own format
        self._learn(event)
        assert self.sent is not None
        prefill, choices = self.sent.answer, chunk["choices"]
        if self._owed and choices and not self._tells_more(choices[0], self.sent):
            return b""
        chunk.update(_chunk(prefill) | {"choices": choices})
        if self.continues:
            chunk.pop("metrics", None)  # describes the decode leg alone
        if isinstance(chunk.get("usage"), dict):
            details = None if choices else _known(prefill.usage.prompt_tokens_details)
            _correct_usage(chunk["usage"], prefill, added=self.continues, details=details)
        return sse.event(_encode(chunk))

    def _tells_more(self, choice: dict[str, Any], sent: Sent) -> bool:
        """Remove from a choice what the client already has; returns whether anything is left."""
        text, owed, ends = choice.get("text") or "", self._owed, choice.get("finish_reason") is not None
        if text.startswith(owed):
            choice["text"], self._owed = text[len(owed) :], ""
        elif owed.startswith(text) and not ends:
            choice["text"], self._owed = "", owed[len(text) :]
        else:
            raise FirstTokenDiffers(sent)
        return bool(choice["text"]) or ends

    def _learn(self, event: bytes) -> None:
        head, choices, _ = event.partition(_CHOICES)
        with contextlib.suppress(ValueError):
            if choices and head.startswith(_DATA) and json.loads(head[len(_DATA) :] + b"}").keys() == _HEAD:
                self._their_head = head


async def _relay_stream(exchange: Exchange, answer: Answer, shape: AsItIs) -> None:
    exchange.reply.pass_on(answer.headers)
    splitter = sse.EventSplitter()
    is_last = sse.is_done if exchange.route.last_event is None else exchange.route.last_event.match
    is_aborted, ends, fault = exchange.route.aborted.search, False, None
    writes, held = exchange.reply.writes, list[bytes]()
    chunk, token_at = await shape.first(exchange, answer), 0.0
    while chunk:
        try:
            events = held + splitter.feed(chunk)
        except ProtocolError as error:
            raise failed(Reason.MALFORMED, answer.engine, str(error)) from error
        for count, event in enumerate(map(sse.bare, events), 1):
            if sse.is_error(event) or is_aborted(event):
                fault, outcome = _fault(answer, event)
                if fault.reason != Reason.STATUS_4XX and exchange.reply.writes == writes:
                    raise fault  # another engine may serve
                exchange.outcome = outcome
            if is_last(event):
                events, ends = events[:count], True  # what comes after that is ignored
                break
        if not (token_at or ends or held) and events and _BEGUN.match(sse.bare(events[-1])):
            held = events  # sent with the first token, which follows at once: until then, another engine may serve
        elif events:
            held = []
            is_word = not all(map(sse.is_empty, events))
            if is_word and not token_at:
                exchange.mark(Event.DECODE_FIRST, answer.engine)
                exchange.token(answer.engine, streams=True)
                token_at = time.monotonic()
            elif is_word and events[0] != sse.DONE:
                now = time.monotonic()
                exchange.metrics.itl[exchange.mode].observe(now - token_at)
                token_at = now
            await _pass_on(exchange, events, shape)
        exchange.answered = ends
        chunk = b"" if ends else await (answer.read_some() if token_at else shape.first(exchange, answer))
    if not ends:
        if not sse.is_done(splitter.rest):
            raise failed(Reason.TRUNCATED, answer.engine)
        await _pass_on(exchange, [*held, sse.DONE], shape)
        exchange.answered = True
    await exchange.reply.end()
    await answer.drain()
    if fault is not None:
        raise fault


def _fault(answer: Answer, event: bytes) -> tuple[LegFailed, Outcome]:
    """What an event reports, an error or that the engine has aborted the request, and what becomes of the request."""
    if not sse.is_error(event):
        return failed(Reason.TRUNCATED, answer.engine, "it has aborted the request"), Outcome.BROKEN
    found, code = sse.data(event) or b"", 0
    with contextlib.suppress(ValueError, OverflowError, KeyError, TypeError, RecursionError):
        code = int(json.loads(found)["error"]["code"])
    if 500 <= code <= 599:
        said = Refusal(code, found, "application/json", answer.headers)
        reason = Reason.STATUS_503 if code == 503 else Reason.STATUS_5XX
        return failed(reason, answer.engine, f"an error {code} in its stream", answer=said), Outcome.BROKEN
    # Without a code, the request itself may be the cause.
    outcome = Outcome.CLIENT_ERROR if 400 <= code <= 499 else Outcome.BROKEN
    return failed(Reason.STATUS_4XX, answer.engine, f"an error {code or 'without a code'} in its stream"), outcome


async def _pass_on(exchange: Exchange, events: list[bytes], shape: AsItIs) -> None:
    found = shape.at_once(events)
    if found:
        await exchange.reply.write(found, is_ahead=all(map(sse.is_comment, events)))
    elif found is None:
        async for piece in shape.pieces(events):
            await exchange.reply.write(piece)
