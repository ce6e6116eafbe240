"""Reads client bodies and builds the bodies of the two legs from them. The client's body is never modified.

Fields that the proxy does not need stay raw bytes (`msgspec.Raw`) and are spliced into the legs' bodies: a prompt of a
million tokens is neither parsed into objects nor serialized again.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from aiohttp import StreamReader, web
from msgspec import Raw

from pdx.errors import RequestRefused
from pdx.proxy.headers import media_type
from pdx.proxy.outline import Steps, outline
from pdx.proxy.plan import LOOKED_AT, SWITCHES, WHOLE, XARGS, Body, Mode
from pdx.proxy.routes import FORMS, Route
from pdx.telemetry.faults import printable

LENIENT_BYTES = 256 << 10  # above this size Python's own parser would block the event loop for 10 ms or more
_WHOLE_TEXT = re.compile(r"\s*[+-]?[0-9]{1,18}(\.0+)?\s*", re.ASCII)
_ON = (True, "1", "on", "t", "true", "y", "yes")  # 1 and 1.0 compare equal to True
_OFF = (False, "0", "off", "f", "false", "n", "no")
_LOOKED_AT_BYTES = 4096  # a longer value cannot be one of those that matter
_XARGS_BYTES = 64 << 10
_MOST_FIELDS = 1024
_MOST_PARTS = 64  # of a multipart form
_FIND_BYTES = 1 << 20
_BOUNDARY = re.compile(r';\s*boundary="?([^";]+)', re.IGNORECASE)
_FORM_NAME = re.compile(rb'\r\ncontent-disposition: *form-data *;(?:[^\r]*;)? *name="([^"]*)"', re.IGNORECASE)
_REST_BYTES = 256 << 10
_NAME_BYTES = 1024
_WHOLE_BYTES = 256 << 10
_SEND_BYTES = 64 << 10
_NO_HALVES = bytes.maketrans(b"\xed", b"\xee")  # makes lone surrogates valid, and changes nothing else's validity

_JSON_NAME = {list: "list", str: "string", int: "number", float: "number", bool: "true or false", type(None): "null"}

_fields = msgspec.json.Decoder(dict[str, Raw])

# Fields that shape only the answer. In chats, `response_format`, `tools` and the like also shape the prompt and stay.
_ANSWER_ONLY = (
    "stream_options",
    "stream_interval",
    "stop",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "return_prompt_text",
    "structured_outputs",
    "bad_words",
    "repetition_detection",
    "thinking_token_budget",
)


class Spliced:
    """A large body in parts, sent piece by piece without copying; other requests get their turn between pieces."""

    def __init__(self, parts: Sequence[bytes | bytearray | Raw]) -> None:
        self._parts = [memoryview(part) for part in parts]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for part in self._parts:
            for at in range(0, len(part), _SEND_BYTES):
                yield part[at : at + _SEND_BYTES]
                await asyncio.sleep(0)


Payload = bytes | Spliced


def parsing(raw: bytes | bytearray) -> Steps[Body]:
    """Parse a client's body: fields the proxy inspects become values, all others stay `Raw`, null becomes None.

    If a name occurs twice the last one wins, as in an engine.

    :raises RequestRefused: the body is not a JSON object, or exceeds a limit.
    """
    try:
        yield from _checking_utf8(raw)
        fields = _split(raw) if len(raw) <= LENIENT_BYTES else (yield from _splitting(raw))
        if len(fields) > _MOST_FIELDS:
            raise RequestRefused(400, f"the request has {len(fields)} fields; it may have {_MOST_FIELDS}")
        return {name: _value(name, value) for name, value in fields.items()}
    except UnicodeDecodeError as error:
        raise RequestRefused(400, "the request is not UTF-8, UTF-16 or UTF-32") from error
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the request is not valid JSON: {str(error)[:200]}") from error


def as_it_is(raw: bytearray) -> Payload:
    """The client's body, unchanged, for an engine."""
    return bytes(raw) if len(raw) <= _WHOLE_BYTES else Spliced([raw])


def encode(body: Body) -> Payload:
    """Serialize to JSON. Values are written in ASCII, so whatever the lenient parser accepted survives unchanged."""
    values = {name: value for name, value in body.items() if not isinstance(value, Raw)}
    parts: list[bytes | Raw] = [json.dumps(values, separators=(",", ":")).encode("ascii")[:-1]]
    for name, value in body.items():
        if isinstance(value, Raw):
            comma = b"," if len(parts) > 1 or values else b""
            parts += [comma + json.dumps(name).encode("ascii") + b":", value]
    parts.append(b"}")
    size = sum(len(memoryview(part)) for part in parts)
    return b"".join(parts) if size <= _WHOLE_BYTES else Spliced(parts)


def form_text(raw: bytes | bytearray, content_type: str, name: str) -> Steps[str | None]:
    """The text of a form field. None if the form lacks the field, or the body is not a form. Uploaded files are
    skipped."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        return None
    mark = b"--" + boundary[1].strip().encode("latin-1", "replace")
    at = raw.find(mark, 0, _LOOKED_AT_BYTES)
    for _ in range(_MOST_PARTS):
        begin = raw.find(b"\r\n\r\n", at, at + _LOOKED_AT_BYTES)
        end = yield from _finding(raw, b"\r\n" + mark, begin + 2)
        if at < 0 or begin < 0 or end < 0:
            break
        found = _FORM_NAME.search(raw, at, begin)
        if found is not None and found[1] == name.encode() and end - begin <= _LOOKED_AT_BYTES:
            return raw[begin + 4 : end].decode("utf-8", "replace")
        at = end + 2
    return None


def _finding(raw: bytes | bytearray, text: bytes, at: int) -> Steps[int]:
    """Same as `raw.find(text, at)`, in steps."""
    while at < len(raw):
        if (found := raw.find(text, at, at + _FIND_BYTES + len(text))) >= 0:
            return found
        at += _FIND_BYTES
        yield
    return -1


def _split(raw: bytes | bytearray) -> dict[str, Raw]:
    """Split a JSON object into its fields, each as raw bytes.

    Engines use Python's JSON parser, which accepts more than the standard (NaN, lone surrogates, UTF-16, a byte order
    mark). The proxy parses such a request the same way.
    """
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _fields.decode(raw)
    body = json.loads(raw)
    if not isinstance(body, dict):
        raise RequestRefused(400, f"the request is a JSON {_JSON_NAME[type(body)]}, and must be an object")
    return {name: Raw(json.dumps(value).encode("ascii")) for name, value in body.items()}


def _splitting(raw: bytes | bytearray) -> Steps[dict[str, Raw]]:
    """Same as `_split`, for a body so large that parsing it at once would block the event loop.

    Long strings, lists and objects are replaced by placeholder numbers before the rest is parsed. Their contents are
    not validated; the engine will do that.
    """
    view = memoryview(raw)
    spans = yield from outline(raw, 2 * _MOST_FIELDS)
    spans = [(begin, end) for begin, end in spans if end - begin > _NAME_BYTES or view[begin] != ord('"')]
    between = zip([0, *(end for _, end in spans)], [*(begin for begin, _ in spans), len(raw)], strict=True)
    parts = [view[begin:end] for begin, end in between]
    size = sum(map(len, parts))
    if size > _REST_BYTES:
        text = f"the request has {size} bytes beside its lists, objects and strings of more than {_NAME_BYTES} bytes"
        raise RequestRefused(400, f"{text}; it may have {_REST_BYTES}")
    numbered = b"".join(b"%b[%d]" % (bytes(part), number) for number, part in enumerate(parts))
    try:
        fields = _fields.decode(numbered.removesuffix(b"[%d]" % len(spans)))
    except msgspec.MsgspecError as error:
        text = f"of more than {LENIENT_BYTES} bytes, it may also have no NaN and no half of a surrogate pair"
        raise RequestRefused(400, f"the request is not valid JSON, or not an object; {text}") from error
    return {name: _nth(view, spans, value) for name, value in fields.items()}


def _nth(view: memoryview, spans: list[tuple[int, int]], value: Raw) -> Raw:
    number = bytes(value)
    if not number.startswith(b"["):
        return value
    begin, end = spans[int(number[1:-1])]
    return Raw(view[begin:end])


def _checking_utf8(raw: bytes | bytearray) -> Steps[None]:
    """Validate the UTF-8 of strings that are not decoded elsewhere. Works in pieces, because decoding a large string
    takes much memory."""
    if len(raw) <= _SEND_BYTES and raw.isascii():  # the common case
        return
    if raw[:2] in (b"\xfe\xff", b"\xff\xfe") or b"\x00" in raw[:4]:
        return  # UTF-16 or UTF-32
    decoder = codecs.getincrementaldecoder("utf-8")()  # "surrogatepass" would be called once per surrogate
    for at in range(0, len(raw), _SEND_BYTES):
        if at:
            yield
        decoder.decode(raw[at : at + _SEND_BYTES].translate(_NO_HALVES))
    decoder.decode(b"", final=True)


def _value(name: str, value: Raw) -> Any:
    size = len(memoryview(value))
    if name == XARGS and size > _XARGS_BYTES:
        raise RequestRefused(400, f"{XARGS} has {size} bytes; it may have {_XARGS_BYTES}")
    if name == XARGS or (name in LOOKED_AT and size <= _LOOKED_AT_BYTES):
        return as_engines_read(name, json.loads(bytes(value).decode("utf-8", "surrogatepass")))
    return None if size == len(b"null") and bytes(value) == b"null" else value


def as_engines_read(name: str, value: Any) -> Any:
    """Interpret a field's value as engines do: 5, "5", 5.0 and true count as integers, 1 and "yes" as true. Anything
    else is returned unchanged, for an engine to reject."""
    if name in WHOLE:
        if isinstance(value, str) and _WHOLE_TEXT.fullmatch(value):
            return int(value.partition(".")[0])
        is_number = isinstance(value, bool) or (
            isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53
        )
        return int(value) if is_number else value
    if name in SWITCHES:
        word = value.lower() if isinstance(value, str) else value
        return True if word in _ON else False if word in _OFF else value
    return value


def prefill_body(route: Route, body: Body, *, mode: Mode, transfer: str, decode_node: str = "") -> Body:
    """The prefill leg's body: the client's prompt, one token, and the node to push its KV to (empty: it stays on its
    node)."""
    leg = dict(body)
    leg["stream"] = False
    for name in route.limits:
        if name in leg or name == route.limits[-1]:
            leg[name] = 1
    if route is Route.RESPONSES:
        leg["store"] = False  # nobody will retrieve this response
    if leg.get("n"):
        leg["n"] = 1
    if leg.get("min_tokens"):
        leg["min_tokens"] = 1  # the first token must not end the text
    if mode is Mode.FORWARD:
        leg.pop("stream_options", None)
        leg["return_token_ids"] = True
    else:
        for name in (*_ANSWER_ONLY, *route.answer_only):
            leg.pop(name, None)
    leg["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": transfer}
    if decode_node:
        leg["kv_transfer_params"]["decode_node"] = decode_node
    return leg


def continuation_body(body: Body, prompt: Raw, first: int, *, limit: int) -> Body:
    """Continue after the ids of `prompt` and `first`, up to `limit` tokens including `first`."""
    leg = dict(body)
    leg["prompt"] = Raw(bytes(prompt)[:-1] + b",%d]" % first)
    leg["max_tokens"] = limit - 1
    if leg.get("min_tokens"):
        leg["min_tokens"] -= 1
    return leg


def arriving(
    body: Body,
    *,
    transfer: str,
    is_early: bool = False,
    prompt_tokens: int | None = None,
    cached_tokens: int | None = None,
) -> Body:
    """The decode leg's body: the client's own request, plus the transfer that brings the KV of its prompts.

    `is_early`: both legs are sent at the same time. The token counts come from the prefill engine, None if it gave
    none. The decode engine regards everything that arrives as cached, so it is given the prefill engine's count to
    report instead.
    """
    params: Body = {"do_remote_prefill": True, "transfer_id": transfer}
    if is_early:
        params["is_early"] = True
    if prompt_tokens is not None:
        params["prefill_tokens"] = prompt_tokens
    if cached_tokens is not None:
        params["remote_prefill_cached_tokens"] = cached_tokens
    return {**body, "kv_transfer_params": params}


def told(leg: Body, params: Body) -> Body:
    """The body with these transfer parameters merged into those it has."""
    return {**leg, "kv_transfer_params": {**(leg.get("kv_transfer_params") or {}), **params}} if params else leg


def check_kind(request: web.Request) -> None:
    """:raises RequestRefused: the route does not accept this content type."""
    form = request.path in FORMS
    is_right = media_type(request.headers) == ("multipart/form-data" if form else "application/json")
    if not is_right and request.method != "GET" and not (request.match_info and not request.can_read_body):
        said = printable(request.headers.get("Content-Type", "none"))
        wanted = "a form, as multipart/form-data" if form else "JSON, as application/json"
        raise RequestRefused(400, f"the request's Content-Type is {said}; send {wanted}")
    packed = request.headers.get("Content-Encoding", "identity")
    if packed != "identity":
        raise RequestRefused(415, f"the request has Content-Encoding: {packed}; send it unpacked, as engines want it")


PIECE = 64 << 10  # each piece received extends the body's deadline by a second
_RETRY_AFTER_S = 1


class Intake:
    """Reads request bodies within a memory budget. A body counts from its arrival until its request ends.

    Bodies of up to PIECE bytes are always accepted; otherwise a few clients with large bodies could lock out everyone
    else. The number of connections bounds how many of those there are.
    """

    def __init__(self, *, each_bytes: int, all_bytes: int, timeout_s: float) -> None:
        """A body has `timeout_s` to arrive, plus one second for each PIECE received."""
        self._each_bytes = each_bytes
        self._all_bytes = all_bytes
        self._timeout_s = timeout_s
        self.held_bytes = 0

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytearray]:
        """The request's body, held while this context is open.

        :raises RequestRefused: the body is too large, too slow or incomplete, or there is no room for it.
        """
        if (request.content_length or 0) > self._each_bytes:
            raise self._too_large()
        whole = bytearray()  # grown in place: joining parts would briefly need twice the memory
        size = 0
        since = asyncio.get_running_loop().time()
        try:
            while not size % PIECE:
                part = await self._piece(request.content, since + self._timeout_s + size // PIECE)
                if not part:
                    break
                size += len(part)
                self.held_bytes += len(part)
                if size > self._each_bytes:
                    raise self._too_large()
                if size > PIECE and self.held_bytes > self._all_bytes:
                    text = f"there is no room for its body now: requests under way have {self._all_bytes} bytes"
                    raise RequestRefused(503, text, retry_after_s=_RETRY_AFTER_S)
                whole += part
            yield whole
        finally:
            self.held_bytes -= size

    async def _piece(self, content: StreamReader, until: float) -> bytes:
        """The next PIECE bytes; fewer at the end."""
        try:
            async with asyncio.timeout_at(until):
                return await content.readexactly(PIECE)
        except asyncio.IncompleteReadError as error:
            return error.partial
        except TimeoutError as error:
            text = f"{self._timeout_s:g} s, and a second more for each {PIECE} bytes that have come"
            raise RequestRefused(408, f"the request's body comes too slowly: it may take {text}") from error
        except (web.RequestPayloadError, ConnectionError, RuntimeError) as error:  # RuntimeError: closed before
            raise RequestRefused(400, "the request did not arrive whole") from error

    def _too_large(self) -> RequestRefused:
        size = f"{self._each_bytes} bytes ({self._each_bytes >> 20} MiB)"
        return RequestRefused(413, f"the request's body is larger than {size}; pdx proxy --max-body raises this limit")
