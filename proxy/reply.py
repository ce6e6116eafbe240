"""The client's side of one request: one answer, whole or streamed, and never both."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from pdx.errors import ClientGone
from pdx.proxy import fault, sse

# What an engine may tell a client in headers.
_PASSED = ("Retry-After", "Retry-After-Ms", "X-Should-Retry", "WWW-Authenticate", "X-Request-Id")


class Reply:
    """Keeps the headers until the first byte goes out."""

    def __init__(self, request: web.Request, *, debug_headers: bool = False) -> None:
        """`debug_headers`: tell the client what `describe` says."""
        self._request = request
        self._stream: web.StreamResponse | None = None
        self._whole: web.Response | None = None
        self._has_ended = False
        self.writes = 0  # pieces of a stream that the client was sent
        self._debug_headers = debug_headers
        self._described: dict[str, str] = {}
        self._passed: dict[str, str] = {}

    def describe(self, transfer: str, mode: str) -> None:
        """By which transfer and in which mode the answer comes about."""
        if self._debug_headers:
            self._described = {"x-pdx-transfer-id": transfer, "x-pdx-mode": mode}

    def pass_on(self, headers: Mapping[str, str]) -> None:
        """These came with the engine's answer; a client gets those that are meant for it."""
        self._passed = {name: headers[name] for name in _PASSED if name in headers}

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
        """What the web framework is to be handed."""
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

    async def write(self, events: bytes) -> None:
        """Stream whole events; the first call sends the headers. :raises ClientGone: nobody is there."""
        try:
            if self._stream is None:
                self._stream = web.StreamResponse(headers={**self._described, **self._passed, **_STREAM_HEADERS})
                await self._stream.prepare(self._request)
            self.writes += 1
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
        if self.started:
            await self.write(sse.event(fault.body(status, message)))
            await self.end()
        else:
            self._passed = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
            self.whole(status, fault.body(status, message))

    def abort(self) -> None:
        """Close the connection at once: the client is gone, or does not read."""
        if self._request.transport is not None:
            self._request.transport.abort()


_STREAM_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
