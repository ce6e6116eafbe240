"""The client's side: one answer per request, errors in OpenAI's format, and CORS."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from pdx.errors import ClientGone, ConfigError
from pdx.proxy import sse
from pdx.proxy.headers import REQUEST_ID, of_body, request_id, to_client
from pdx.proxy.routes import Route


def request_key(name: str) -> Any:
    """A key for per-request state."""
    return web.RequestKey(name, object)


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    """The error as JSON, in vLLM's format. `param`: the offending field."""
    kind = "BadRequestError" if param else HTTPStatus(status).phrase if status < 500 else "InternalServerError"
    fault = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return json.dumps(fault, separators=(",", ":")).encode()


def json_response(told: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(told), content_type="application/json", headers=headers)


def error_response(
    status: int, message: str, *, retry_after_s: int | None = None, param: str | None = None
) -> web.Response:
    """The error as an HTTP response. `retry_after_s`: when to retry."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    content = error_body(status, message, param=param)
    return web.Response(status=status, body=content, content_type="application/json", headers=headers)


def http_error(error: web.HTTPException) -> web.StreamResponse:
    """Convert the web framework's exception: a redirect, or the allowed methods."""
    response = web.Response(status=error.status) if error.status < 400 else error_response(error.status, error.reason)
    response.headers.update({name: error.headers[name] for name in ("Allow", "Location") if name in error.headers})
    return response


def error_bytes(status: int, message: str, *, retry_after_s: int) -> bytes:
    """The error as the bytes of an HTTP response after which the connection is closed."""
    content = error_body(status, message)
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        f"Retry-After: {retry_after_s}",
        "Connection: close",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + content


TRANSFER_HEADER = "x-pdx-transfer-id"


class Reply:
    """The client's response; holds back the headers until the first byte is sent."""

    def __init__(self, request: web.Request, *, debug_headers: bool = False) -> None:
        """`debug_headers`: send what `describe` is given to the client."""
        self._request = request
        self._stream: web.StreamResponse | None = None
        self._whole: web.Response | None = None
        self._has_ended = False
        self._is_bytes = False
        self.writes = 0  # pieces of an engine's stream sent to the client: no other engine can continue it
        self._debug_headers = debug_headers
        self._described: dict[str, str] = {}
        self._passed: dict[str, str] = {}

    def describe(self, transfer: str, mode: str) -> None:
        """The transfer and the mode that produce this answer."""
        if self._debug_headers:
            self._described = {TRANSFER_HEADER: transfer, "x-pdx-mode": mode}

    def pass_on(self, headers: Mapping[str, str]) -> None:
        """Take over an engine's headers; the client gets those meant for it."""
        self._passed = to_client(headers)

    @property
    def started(self) -> bool:
        """Whether a status was sent, which cannot be taken back."""
        return self._stream is not None

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete, possibly as an error."""
        return self._whole is not None or self._has_ended

    @property
    def response(self) -> web.StreamResponse:
        response = self._stream or self._whole
        assert response is not None
        return response

    def whole(self, status: int, body: bytes, *, content_type: str = "application/json") -> None:
        """Send the answer as a single body."""
        assert not self.started
        # an engine's error may lack a content type
        headers = {**self._described, **self._passed, "Content-Type": content_type or "application/json"}
        self._whole = web.Response(status=status, body=body, headers=headers)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Start a body that is not an event stream. :raises ClientGone: the client disconnected."""
        self._is_bytes = True
        await self._prepare(status, of_body(headers))

    async def _prepare(self, status: int, headers: Mapping[str, str]) -> None:
        self._stream = web.StreamResponse(status=status, headers={**self._described, **self._passed, **headers})
        if self._request.version < HttpVersion11:
            self._stream.force_close()  # what has no length ends with its connection
        try:
            await self._stream.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone("the client closed its connection") from error

    async def write(self, events: bytes, *, is_ahead: bool = False) -> None:
        """Send whole events, or a piece of the body that was begun; the first call sends the headers. `is_ahead`: any
        engine can continue after it. :raises ClientGone: the client disconnected."""
        if self._stream is None:
            await self._prepare(200, _STREAM_HEADERS)
        assert self._stream is not None
        try:
            self.writes += not is_ahead
            await self._stream.write(events)
        except ConnectionError as error:
            raise ClientGone("the client closed its connection") from error

    async def end(self) -> None:
        """End the stream. :raises ClientGone: the client disconnected."""
        assert self._stream is not None
        self._has_ended = True
        try:
            await self._stream.write_eof()
        except ConnectionError as error:
            raise ClientGone("the client closed its connection") from error

    async def fail(self, status: int, message: str, *, retry_after_s: int = 0) -> None:
        """Report a failure in whatever way is still possible. :raises ClientGone: the client disconnected."""
        if self._is_bytes:
            self.abort()  # there is no other way to end a body that was begun
            return
        path, content = self._request.path, error_body(status, message)
        if path == Route.MESSAGES:
            content = b'{"type":"error",' + content[1:]
        if self.started:
            name = b"event: error\n" if path in (Route.RESPONSES, Route.MESSAGES) else b""
            await self.write(name + sse.event(content))
            await self.end()
        else:
            self._passed = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
            self.whole(status, content)

    def abort(self) -> None:
        """Close the connection at once: the client is gone, or does not read."""
        if self._request.transport is not None:
            self._request.transport.abort()


_STREAM_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Return the client's request id, also if no engine was asked."""
    if own := request_id(request.headers):
        response.headers.setdefault(REQUEST_ID, own)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def redirect_slashes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Redirect a path with a trailing slash to the one without, as vLLM's server does."""
    bare = request.rel_url.raw_path.rstrip("/")
    if request.match_info.http_exception is not None and bare != request.rel_url.raw_path:
        shorter = request.clone(rel_url=request.rel_url.with_path(bare or "/", encoded=True, keep_query=True))
        found = await request.app.router.resolve(shorter)
        if not isinstance(found.http_exception, web.HTTPNotFound):
            raise web.HTTPTemporaryRedirect(str(shorter.rel_url))
    return await handler(request)


async def tell_alive(_request: web.Request) -> web.Response:
    """Liveness, for whatever restarts proxies."""
    return web.Response(text="ok\n")


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+")
_METHODS = "GET, POST, OPTIONS"
_KEPT_S = "600"  # seconds for which a browser caches it


def allow_origins(app: web.Application, origins: Collection[str]) -> None:
    """CORS: allow scripts on pages of these origins; `*` means every page. No effect without origins.

    :raises ConfigError: a browser would send no such origin.
    """
    every = "*" in origins
    if wrong := [each for each in origins if each not in ("*", "null") and not _ORIGIN.fullmatch(each)]:
        raise ConfigError(f"--allowed-origins {wrong[0]!r}: write what browsers send, as https://example.org, or *")

    def allows(request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and (every or origin in origins)

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return await handler(request)
        if not allows(request):
            return error_response(403, "pages of this origin are not let in")
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _KEPT_S}
        asked = request.headers.get("Access-Control-Request-Headers")
        if asked:
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    async def permit(request: web.Request, response: web.StreamResponse) -> None:
        if not every:
            response.headers.add("Vary", "Origin")
        if allows(request):
            response.headers["Access-Control-Allow-Origin"] = "*" if every else request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"

    if origins:
        app.middlewares.append(preflight)
        app.on_response_prepare.append(permit)
