"""The legs' answers, and what the client is sent of them: the decode leg's as it is, or behind the first token."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from pdx.errors import ProtocolError, Refusal
from pdx.proxy import sse
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
    system_fingerprint: str | None = None

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


def is_final(answer: PrefillAnswer, limit: int | None) -> bool:
    """The prefill leg's answer is all the client gets: the text ends here, or one token was wanted."""
    return answer.choice.finish_reason == "stop" or (limit == 1 and answer.choice.finish_reason == "length")


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


def final_answer(raw: bytes) -> bytes:
    """The prefill leg's answer as the client's, without what only this proxy had asked for."""
    answer: dict[str, Any] = _parts.decode(raw)  # not read any further: the prompt's ids are in it
    choices: list[dict[str, Any]] = _choices.decode(answer["choices"])
    answer["choices"] = choices
    for part in (answer, *choices):
        for name in ("kv_transfer_params", "token_ids", "prompt_token_ids"):
            if name in part:
                part[name] = None
    return msgspec.json.encode(answer)


def merged_answer(prefill: PrefillAnswer, raw: bytes) -> bytes:
    """The decode leg's answer as the client's, with the prefill leg's text in front.

    :raises ProtocolError: it is not a completion.
    """
    try:
        answer = json.loads(raw)
        answer["choices"][0]["text"] = (prefill.choice.text or "") + answer["choices"][0]["text"]
        _correct_usage(answer["usage"], prefill, details=prefill.usage.prompt_tokens_details)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ProtocolError(f"a decode answer of {len(raw)} bytes is not a completion") from error
    answer["kv_transfer_params"] = None
    if "metrics" in answer:
        answer["metrics"] = None  # of the decode leg alone
    return _encode(answer)


def first_event(prefill: PrefillAnswer, *, finish: bool, options: dict[str, Any]) -> bytes:
    choice = prefill.choice
    chunk = _chunk(prefill)
    chunk["choices"] = [
        {
            "index": 0,
            "text": choice.text or "",
            "logprobs": None,
            "finish_reason": choice.finish_reason if finish else None,
            "stop_reason": choice.stop_reason if finish else None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
    ]
    if finish and prefill.system_fingerprint is not None and not options.get("include_usage"):
        chunk["system_fingerprint"] = prefill.system_fingerprint
    if options.get("include_usage") and options.get("continuous_usage_stats"):
        chunk["usage"] = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0}
        _correct_usage(chunk["usage"], prefill, details=None)
    return sse.event(_encode(chunk))


def final_events(prefill: PrefillAnswer, *, options: dict[str, Any]) -> bytes:
    """The end of a stream that consists of the prefill leg's token."""
    if not options.get("include_usage"):
        return sse.DONE
    chunk = {**_chunk(prefill), "choices": [], "usage": {"completion_tokens": 0}}
    if prefill.system_fingerprint is not None:
        chunk["system_fingerprint"] = prefill.system_fingerprint
    _correct_usage(chunk["usage"], prefill, details=_known(prefill.usage.prompt_tokens_details))
    return sse.event(_encode(chunk)) + sse.DONE


def _chunk(prefill: PrefillAnswer) -> dict[str, Any]:
    return {"id": prefill.id, "object": "text_completion", "created": prefill.created, "model": prefill.model}


def _known(details: dict[str, Any] | None) -> dict[str, Any] | None:
    """In streams, unlike whole answers, vLLM leaves out what is null."""
    return details and {name: value for name, value in details.items() if value is not None}


def _correct_usage(usage: dict[str, Any], prefill: PrefillAnswer, *, details: dict[str, Any] | None) -> None:
    """Count the first token as generated; what was cached is what the prefill engine had cached."""
    usage["prompt_tokens"] = prefill.usage.prompt_tokens
    usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + 1
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
            exchange.first_token(answer.engine, streams=False)
        exchange.reply.pass_on(answer.headers)
        exchange.reply.whole(answer.status, await self.whole(raw), content_type=answer.content_type)

    async def pieces(self, events: list[bytes]) -> AsyncIterator[bytes]:
        """Of the client's stream. An event that waits for the prefill engine keeps none before it waiting."""
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


class Continuation:
    """The engine goes on after the prefill leg's token; to the client the two are one answer: one id throughout, usage
    of both legs.

    Nearly all events of a stream begin with the same bytes, up to their choices. Those are replaced, and the event is
    not read any further.
    """

    def __init__(self, prefill: PrefillAnswer) -> None:
        self._prefill = prefill
        self._head = _encode(_chunk(prefill))[:-1]
        self._their_head = b""  # as far as it is known: "data: ", and JSON without its end

    async def take(self, exchange: Exchange, answer: Answer) -> None:
        """Relay it. :raises LegFailed: the engine refused, or went away before the end."""
        if answer.status >= 400:
            # A refusal may be about what this proxy made of the request: the client is not to be told that.
            raise failed(Reason.STATUS_4XX, answer.engine, str(answer.status))
        if answer.is_stream != exchange.streams:
            raise failed(Reason.MALFORMED, answer.engine, f"unexpected {answer.content_type!r}")
        if answer.is_stream:
            await _relay_stream(exchange, answer, self)
            return
        raw = await answer.read()
        exchange.mark(Event.DECODE_FIRST, answer.engine)
        try:
            merged = merged_answer(self._prefill, raw)
        except ProtocolError as error:
            raise failed(Reason.MALFORMED, answer.engine, str(error)) from error
        exchange.first_token(answer.engine, streams=False)
        exchange.reply.pass_on(answer.headers)
        exchange.reply.whole(200, merged)

    async def pieces(self, events: list[bytes]) -> AsyncIterator[bytes]:
        yield b"".join(map(self.event, events))

    def event(self, event: bytes) -> bytes:
        if self._their_head and event.startswith(self._their_head) and not _SPECIAL.search(event):
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
        prefill = self._prefill
        chunk.update(_chunk(prefill) | {"choices": chunk["choices"]})
        chunk.pop("metrics", None)
        if isinstance(chunk.get("usage"), dict):
            details = None if chunk["choices"] else _known(prefill.usage.prompt_tokens_details)
            _correct_usage(chunk["usage"], prefill, details=details)
        return sse.event(_encode(chunk))

    def _learn(self, event: bytes) -> None:
        head, choices, _ = event.partition(_CHOICES)
        with contextlib.suppress(ValueError):
            if choices and head.startswith(_DATA) and json.loads(head[len(_DATA) :] + b"}").keys() == _HEAD:
                self._their_head = head


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
            if not sse.is_empty(events[-1]):
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
        code = json.loads(found)["error"]["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if isinstance(code, int) and 500 <= code <= 599:
        said = Refusal(code, found, "application/json", answer.headers)
        raise failed(Reason.STATUS_5XX, answer.engine, f"an error {code} in place of a first event", answer=said)


async def _pass_on(exchange: Exchange, events: list[bytes], shape: AsItIs | Continuation) -> None:
    """Those up to the one that ends the stream, behind which nothing matters."""
    is_last = sse.is_done if exchange.route.last_event is None else exchange.route.last_event.match
    end = next((index for index, event in enumerate(events, 1) if is_last(event)), None)
    async for piece in shape.pieces(events[:end]):
        await exchange.reply.write(piece)
    exchange.answered = end is not None
