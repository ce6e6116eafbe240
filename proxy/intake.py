"""Clients' bodies, as they come in: each bounded in size and in time, all of them together in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import StreamReader, web

from pdx.errors import RequestRefused

PIECE = 64 << 10  # this much, or the rest, has to come within the time that is given
LARGE_BYTES = 256 << 10
_RETRY_AFTER_S = 1


class Intake:
    """Reads bodies. What it holds counts from its arrival to the end of the request.

    One of up to PIECE bytes is always taken: else a few clients with large bodies could keep everybody out. How many of
    these there are is bounded by the number of connections.
    """

    def __init__(self, *, each_bytes: int, all_bytes: int, progress_s: float) -> None:
        self._each_bytes = each_bytes
        self._all_bytes = all_bytes
        self._progress_s = progress_s
        self.held_bytes = 0

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """A request's body, which is held as long as this context lasts.

        :raises RequestRefused: it is too large, too slow or not whole, or there is no room for it.
        """
        if (request.content_length or 0) > self._each_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            while not size % PIECE:
                part = await self._piece(request.content)
                if not part:
                    break
                size += len(part)
                self.held_bytes += len(part)
                if size > self._each_bytes:
                    raise self._too_large()
                if size > PIECE and self.held_bytes > self._all_bytes:
                    text = f"there is no room for its body now: requests under way have {self._all_bytes} bytes"
                    raise RequestRefused(503, text, retry_after_s=_RETRY_AFTER_S)
                parts.append(part)
            whole = b"".join(parts)
            parts.clear()
            if size > LARGE_BYTES:
                await asyncio.sleep(0)
            yield whole
        finally:
            self.held_bytes -= size

    async def _piece(self, content: StreamReader) -> bytes:
        """PIECE bytes, fewer at the end."""
        try:
            async with asyncio.timeout(self._progress_s):
                return await content.readexactly(PIECE)
        except asyncio.IncompleteReadError as error:
            return error.partial
        except TimeoutError as error:
            text = f"the request's body did not go on: {PIECE} bytes, or its rest, must come in {self._progress_s:g} s"
            raise RequestRefused(408, text) from error
        except (web.RequestPayloadError, ConnectionError, RuntimeError) as error:  # the last: it was closed before
            raise RequestRefused(400, "the request did not arrive whole") from error

    def _too_large(self) -> RequestRefused:
        return RequestRefused(413, f"the request is larger than {self._each_bytes} bytes")
