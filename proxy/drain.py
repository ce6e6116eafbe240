"""Requests under way, and how they end when the proxy is to end: no new ones, time for these, then an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Drain:
    """Nothing until `begin`; all calls on one event loop."""

    def __init__(self) -> None:
        self.has_begun = False  # new requests are to be refused
        self.is_over = False  # requests under way are being ended, or have been
        self._scopes: set[asyncio.Timeout] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._scopes)

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[asyncio.Timeout]:
        """A request that is served inside the block.

        :raises TimeoutError: its time is over; the yielded scope has expired.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                if self.is_over:
                    self._expire(scope)
                yield scope
        finally:
            self._scopes.discard(scope)
            self._changed.set()

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.has_begun = True

    def end(self) -> None:
        """End the requests under way."""
        self.has_begun = self.is_over = True
        for scope in self._scopes:
            self._expire(scope)
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Until no request is under way, or they are being ended; at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._scopes and not self.is_over:
                    self._changed.clear()
                    await self._changed.wait()

    @staticmethod
    def _expire(scope: asyncio.Timeout) -> None:
        if not scope.expired():
            scope.reschedule(asyncio.get_running_loop().time())
