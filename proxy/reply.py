"""The client's side: one answer for each request, errors as an OpenAI client expects them; which pages read them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from pdx.errors import ClientGone
from pdx.proxy import sse
from pdx.proxy.headers import REQUEST_ID, of_body, request_id, to_client
from pdx.proxy.routes import Route


def request_key(name: str) -> Any:
    """A key for what a request has beside it; before aiohttp 3.14, which has a class for that, its name."""
    return web.RequestKey(name, object) if hasattr(web, "RequestKey") else name


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    """The error as JSON, in the shape vLLM uses. `param`: what of the request is wrong."""
    kind = "BadRequestError" if param else HTTPStatus(status).phrase if status < 500 else "InternalServerError"
    fault = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return json.dumps(fault, separators=(",", ":")).encode()


def json_response(told: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(told), content_type="application/json", headers=headers)


def error_response(
    status: int, message: str, *, retry_after_s: int | None = None, param: str | None = None
) -> web.Response:
    """The error as an HTTP response. `retry_after_s`: when to ask again."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    content = error_body(status, message, param=param)
    return web.Response(status=status, body=content, content_type="application/json", headers=headers)


def http_error(error: web.HTTPException) -> web.StreamResponse:
    """What the web framework raises, as HTTP wants it told: where to go instead, or which methods there are."""
    response = web.Response(status=error.status) if error.status < 400 else error_response(error.status, error.reason)
    response.headers.update({name: error.headers[name] for name in ("Allow", "Location") if name in error.headers})
    return response


def error_bytes(status: int, message: str, *, retry_after_s: int) -> bytes:
    """The error as the bytes of an HTTP response, after which the connection is closed."""
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
    """Keeps the headers until the first byte goes out."""

    def __init__(self, request: web.Request, *, debug_headers: bool = False) -> None:
        """`debug_headers`: tell the client what `describe` says."""
        self._request = request
        self._stream: web.StreamResponse | None = None
        self._whole: web.Response | None = None
        self._has_ended = False
        self._is_bytes = False
        self.writes = 0  # pieces of an engine's stream that the client was sent: no other engine goes on with it
        self._debug_headers = debug_headers
        self._described: dict[str, str] = {}
        self._passed: dict[str, str] = {}

    def describe(self, transfer: str, mode: str) -> None:
        """By which transfer and in which mode the answer comes about."""
        if self._debug_headers:
            self._described = {TRANSFER_HEADER: transfer, "x-pdx-mode": mode}

    def pass_on(self, headers: Mapping[str, str]) -> None:
        """These came with the engine's answer; a client gets those that are meant for it."""
        self._passed = to_client(headers)

    @property
    def started(self) -> bool:
        """The client has been sent a status, which cannot be taken back."""
        return self._stream is not None

    @property
    def is_whole(self) -> bool:
        """The answer is there to its end, an error perhaps."""
        return self._whole is not None or self._has_ended

    @property
    def response(self) -> web.StreamResponse:
        response = self._stream or self._whole
        assert response is not None
        return response

    def whole(self, status: int, body: bytes, *, content_type: str = "application/json") -> None:
        """Answer in one piece."""
        assert not self.started
        # An engine's error may have come without a type.
        self._whole = web.Response(
            status=status,
            body=body,
            content_type=content_type or "application/json",
            headers={**self._described, **self._passed},
        )

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """What follows is of this kind, and no events. :raises ClientGone: nobody is there."""
        self._is_bytes = True
        await self._prepare(status, of_body(headers))

    async def _prepare(self, status: int, headers: Mapping[str, str]) -> None:
        self._stream = web.StreamResponse(status=status, headers={**self._described, **self._passed, **headers})
        try:
            await self._stream.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone("the client closed its connection") from error

    async def write(self, events: bytes, *, is_ahead: bool = False) -> None:
        """Stream whole events, or what was begun; the first call sends the headers. `is_ahead`: each engine can go on
        behind it. :raises ClientGone: nobody is there."""
        if self._stream is None:
            await self._prepare(200, _STREAM_HEADERS)
        assert self._stream is not None
        try:
            self.writes += not is_ahead
            await self._stream.write(events)
        except ConnectionError as error:
            raise ClientGone("the client closed its connection") from error

    async def end(self) -> None:
        """No more events. :raises ClientGone: nobody is there."""
        assert self._stream is not None
        self._has_ended = True
        try:
            await self._stream.write_eof()
        except ConnectionError as error:
            raise ClientGone("the client closed its connection") from error

    async def fail(self, status: int, message: str, *, retry_after_s: int = 0) -> None:
        """Report a failure, in the way that is still possible. :raises ClientGone: nobody is there."""
        if self._is_bytes:
            self.abort()  # what was begun cannot be ended otherwise
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
    """The client's id of its request, also where no engine was asked."""
    if own := request_id(request.headers):
        response.headers.setdefault(REQUEST_ID, own)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def redirect_slashes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A path that is one without the slash at its end leads there, as vLLM's server does it."""
    bare = request.rel_url.raw_path.rstrip("/")
    if request.match_info.http_exception is not None and bare != request.rel_url.raw_path:
        shorter = request.clone(rel_url=request.rel_url.with_path(bare or "/", encoded=True, keep_query=True))
        found = await request.app.router.resolve(shorter)
        if not isinstance(found.http_exception, web.HTTPNotFound):
            raise web.HTTPTemporaryRedirect(str(shorter.rel_url))
    return await handler(request)


async def tell_alive(_request: web.Request) -> web.Response:
    """For whoever starts proxies anew."""
    return web.Response(text="ok\n")


_METHODS = "GET, POST, OPTIONS"
_KEPT_S = "600"  # a browser asks again after this time


def allow_origins(app: web.Application, origins: Collection[str]) -> None:
    """Let in scripts of pages of these origins; `*` means every page. Without any, nothing changes."""
    every = "*" in origins

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
