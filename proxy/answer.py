"""The legs' answers, and what the client is sent of them: the decode leg's as it is, or behind the first token."""

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

from pdx.errors import ProtocolError, Refusal
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
    """What an engine answers to a request for one token; of a response or a message, its usage alone."""

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
_SPECIAL = re.compile(rb'"(?:usage|metrics)"|\r|\n.')  # fields to be changed; an event of several lines

_decoder = msgspec.json.Decoder(PrefillAnswer)
_parts = msgspec.json.Decoder(dict[str, Raw])
_choices = msgspec.json.Decoder(list[dict[str, Raw]])


def decode_prefill(raw: bytes, route: Route = Route.COMPLETIONS, prompts: int = 1) -> PrefillAnswer:
    """:raises ProtocolError: not one choice for each prompt, with its usage."""
    if route in (Route.RESPONSES, Route.MESSAGES):
        return PrefillAnswer(id="", created=0, model="", usage=usage_of(route, raw), choices=[])
    try:
        answer = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a prefill answer of {len(raw)} bytes does not decode: {error}") from error
    if len(answer.choices) != prompts or answer.usage.prompt_tokens < 1:
        raise ProtocolError(
            f"a prefill answer has {len(answer.choices)} choices for {answer.usage.prompt_tokens} prompt tokens"
        )
    return answer


def is_forwardable(answer: PrefillAnswer) -> bool:
    """Whether its token can be shown to the client on its own; else the decode engine must sample it.

    An empty text or one that ends in U+FFFD is the beginning of a character whose other bytes are in the next
    tokens; the decode engine's detokenizer would not join them to a byte it takes for prompt.
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
    """In streams, unlike whole answers, vLLM leaves out what is null."""
    return details and {name: value for name, value in details.items() if value is not None}


def _correct_usage(
    usage: dict[str, Any], prefill: PrefillAnswer, *, added: int, details: dict[str, Any] | None
) -> None:
    """Count so many tokens more as generated; what was cached is what the prefill engine had cached."""
    usage["prompt_tokens"] = prefill.usage.prompt_tokens
    usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + added
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    if details is not None:
        usage["prompt_tokens_details"] = details
    elif usage.get("prompt_tokens_details") is not None:
        usage["prompt_tokens_details"] = None


def _encode(value: dict[str, Any]) -> bytes:
    # As vLLM writes it; lone surrogates, which UTF-8 cannot carry, stay escapes.
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


class AsItIs:
    """The engine's answer is the client's, byte for byte, but for how much of the prompt was cached, and put into the
    cache: to a decode engine all that arrives is cached, and it computes nothing.
    """

    def __init__(
        self,
        route: Route,
        counts: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
    ) -> None:
        """`counts` waits for what the prefill engine says of that."""
        self._route = route
        self._counts = counts

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay it. :raises LegFailed: the engine went away before the end."""
        if answer.is_stream:
            await _relay_stream(exchange, answer, self)
            return
        raw = await answer.read()
        exchange.mark(Event.DECODE_FIRST, answer.engine)
        if answer.status >= 400:
            exchange.outcome = Outcome.CLIENT_ERROR
        elif self._route.member.search(raw) is None:
            raise failed(Reason.MALFORMED, answer.engine, f"{len(raw)} bytes are no answer")
        else:
            exchange.token(answer.engine, streams=False)
        exchange.reply.pass_on(answer.headers)
        exchange.reply.whole(answer.status, await self.whole(raw), content_type=answer.content_type)

    async def first(self, exchange: Exchange, answer: Answer) -> bytes:
        """The first bytes of a stream."""
        return await answer.read_some()

    def at_once(self, events: list[bytes]) -> bytes | None:
        """What the client is sent of them; None: one of them waits for the prefill engine."""
        raw = b"".join(events)
        return raw if self._counts is None or not counts_cached(self._route, raw) else None

    async def pieces(self, events: list[bytes]) -> AsyncIterator[bytes]:
        """Likewise, where one waits: it keeps none before it waiting."""
        first = next((at for at, event in enumerate(events) if counts_cached(self._route, event)), 0)
        for part in (events[:first], events[first:]):
            if part:
                yield b"".join([await self._event(event) for event in part])

    async def _event(self, event: bytes) -> bytes:
        data = sse.data(event) if self._counts is not None and counts_cached(self._route, event) else None
        return event if data is None else sse.with_data(event, await self.whole(data))

    async def whole(self, raw: bytes) -> bytes:
        """The client's answer in one piece."""
        if self._counts is None or not counts_cached(self._route, raw):
            return raw
        return with_cached(self._route, raw, await self._counts())


class Bytes:
    """The engine's answer is the client's, of whatever kind it is, as it comes."""

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay it. :raises LegFailed: the engine went away before the end."""
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
    """What the client has of the prefill engine."""

    answer: PrefillAnswer
    before: Engine  # which had begun to answer, and not sampled a token yet

    @property
    def ids(self) -> tuple[Raw, int]:
        """Of the prompt, and of the token."""
        choice = self.answer.choice
        assert choice.token_ids is not None
        return choice.prompt_token_ids, choice.token_ids[0]

    @property
    def text(self) -> str:
        return self.answer.choice.text or ""


class FirstTokenDiffers(Exception):
    """The decode engine's answer begins with another token than the one that the client has."""

    def __init__(self, sent: Sent) -> None:
        super().__init__(sent)
        self.sent = sent


class Forwarded(AsItIs):
    """The prefill engine's token, if it comes first, and behind it the decode engine's answer, which begins with the
    same token: there it is left out. To the client the two are one stream, of one id.

    Texts are compared: then the client has the decode engine's answer, by whichever tokens it comes about.

    Nearly all events of a stream begin with the same bytes, up to their choices. Those are replaced, and the event is
    not read any further.
    """

    def __init__(
        self,
        route: Route,
        counts: Callable[[], Awaitable[Mapping[str, int]]],
        prefill: asyncio.Future[Any],
        early: Callable[[Engine], PrefillAnswer | None],
    ) -> None:
        """`early`: what `prefill` has brought, if its token may be sent before one of this decode engine."""
        super().__init__(route, counts)
        self.sent: Sent | None = None
        self.continues = False  # to the decode engine, that token is a part of its prompt
        self._prefill = prefill
        self._early = early
        self._owed = ""  # of that token's text, what the decode engine has yet to say
        self._head = b""
        self._their_head = b""  # as far as it is known: "data: ", and JSON without its end

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay it. :raises LegFailed: the engine refused, or went away before the end.
        :raises FirstTokenDiffers: nothing of it was sent.
        """
        if self.sent is not None and not answer.is_stream:
            # A refusal may be about what this proxy made of the request: the client is not to be told that.
            refused = Reason.STATUS_4XX if answer.status >= 400 else Reason.MALFORMED
            raise failed(refused, answer.engine, f"{answer.status}, {answer.content_type!r}")
        self._owed = self.sent.text if self.sent is not None and not self.continues else ""
        await super().take(exchange, answer)

    async def first(self, exchange: Exchange, answer: Answer) -> bytes:
        if self.sent is not None:
            return await answer.read_some()
        reading = asyncio.ensure_future(answer.read_some())
        reading.add_done_callback(lambda each: each.cancelled() or each.exception())  # if nobody waits for it any more
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
        """As the client is sent it; b"": it has it already. :raises FirstTokenDiffers: see there."""
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
            return event  # an error, in its own shape
        self._learn(event)
        assert self.sent is not None
        prefill, choices = self.sent.answer, chunk["choices"]
        if self._owed and choices and not self._tells_more(choices[0], self.sent):
            return b""
        chunk.update(_chunk(prefill) | {"choices": choices})
        if self.continues:
            chunk.pop("metrics", None)  # of the decode leg alone
        if isinstance(chunk.get("usage"), dict):
            details = None if choices else _known(prefill.usage.prompt_tokens_details)
            _correct_usage(chunk["usage"], prefill, added=self.continues, details=details)
        return sse.event(_encode(chunk))

    def _tells_more(self, choice: dict[str, Any], sent: Sent) -> bool:
        """Take what the client has out of a choice; whether that leaves something."""
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
    is_first = True
    chunk = await shape.first(exchange, answer)
    itl, token_at = exchange.metrics.itl[exchange.mode], 0.0
    if chunk:
        exchange.mark(Event.DECODE_FIRST, answer.engine)
    while chunk:
        try:
            events = splitter.feed(chunk)
        except ProtocolError as error:
            raise failed(Reason.MALFORMED, answer.engine, str(error)) from error
        if events:
            if is_first:
                _check_first(answer, events[0])
            is_first = False
            if token_at and events[0] != sse.DONE:
                now = time.monotonic()
                itl.observe(now - token_at)
                token_at = now
            elif not (token_at or sse.is_empty(events[-1])):
                exchange.token(answer.engine, streams=True)
                token_at = time.monotonic()
            await _pass_on(exchange, events, shape)
        chunk = b"" if exchange.answered else await answer.read_some()
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
        code = json.loads(found)["error"]["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if isinstance(code, int) and 500 <= code <= 599:
        said = Refusal(code, found, "application/json", answer.headers)
        raise failed(Reason.STATUS_5XX, answer.engine, f"an error {code} in place of a first event", answer=said)


async def _pass_on(exchange: Exchange, events: list[bytes], shape: AsItIs) -> None:
    """Those up to the one that ends the stream, behind which nothing matters."""
    is_last = sse.is_done if exchange.route.last_event is None else exchange.route.last_event.match
    ends = False
    for count, event in enumerate(events, 1):
        if is_last(event):
            events, ends = events[:count], True
            break
    found = shape.at_once(events)
    if found:
        await exchange.reply.write(found)
    elif found is None:
        async for piece in shape.pieces(events):
            await exchange.reply.write(piece)
    exchange.answered = ends
