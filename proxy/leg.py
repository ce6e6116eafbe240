"""One HTTP request to one engine, with everything that can go wrong with it turned into `LegFailed`."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum

import aiohttp

from pdx.errors import LegFailed
from pdx.proxy.body import Payload
from pdx.proxy.roster import Engine


class Reason(StrEnum):
    """Why a leg failed."""

    REFUSED = "refused"
    CONNECT_TIMEOUT = "connect_timeout"
    RESET = "reset"
    TIMEOUT = "timeout"
    LOST = "lost"  # its node says the engine is gone, or has itself gone silent
    TRUNCATED = "truncated"  # a stream that ended without saying so
    MALFORMED = "malformed"
    STATUS_4XX = "status_4xx"
    STATUS_5XX = "status_5xx"


def failed(reason: Reason, engine: Engine, text: str = "") -> LegFailed:
    """The error that says so. Where the engine was not even reached, another one may be asked instead."""
    unsent = reason in (Reason.REFUSED, Reason.CONNECT_TIMEOUT)
    return LegFailed(reason, engine.name, engine.url, text, unsent=unsent)


class Answer:
    """An engine's answer of which the headers have arrived; valid inside `Legs.post`."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse) -> None:
        self.engine = engine
        self.status = response.status
        self.content_type = response.content_type
        self._response = response

    @property
    def is_stream(self) -> bool:
        """Server-sent events."""
        return self.status == 200 and self.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """The whole body. :raises LegFailed: it did not arrive whole."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._reset(error) from error

    async def read_some(self) -> bytes:
        """The next bytes, b"" at the end. :raises LegFailed: the engine went away."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise self._reset(error) from error

    def _reset(self, error: Exception) -> LegFailed:
        return failed(Reason.RESET, self.engine, type(error).__name__)


class _Leg:
    def __init__(self, scope: asyncio.Timeout) -> None:
        self.scope = scope
        self.lost = False


class Booking:
    """A leg that is planned: it counts as load until it starts or is known not to. Ends with its context."""

    def __init__(self, booked: Counter[str], url: str) -> None:
        self._booked = booked
        self._url = url
        booked[url] += 1

    def end(self) -> None:
        """The leg starts now, or never will. Idempotent."""
        if self._url:
            self._booked[self._url] -= 1
            if not self._booked[self._url]:
                del self._booked[self._url]
            self._url = ""

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class Legs:
    """All legs under way, by engine, and those that are planned."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        connect_timeout_s: float,
        read_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`clock` tells the seconds in which this process ran: of those a connection may take `connect_timeout_s`."""
        self._session = session
        self._read_timeout_s = read_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s, sock_connect=connect_timeout_s)
        self._open: dict[str, set[_Leg]] = {}
        self._booked: Counter[str] = Counter()
        self._last_used: dict[str, int] = {}
        self._turns = itertools.count(1)

    def in_flight(self, url: str) -> int:
        """How many legs the engine has now."""
        return len(self._open.get(url, ()))

    def load(self, url: str) -> int:
        """How many it has, and how many more are planned for it."""
        return self.in_flight(url) + self._booked[url]

    def book(self, engine: Engine) -> Booking:
        """Count a leg that will start later."""
        self._last_used[engine.url] = next(self._turns)
        return Booking(self._booked, engine.url)

    def last_used(self, url: str) -> int:
        """Grows with every leg and every booking."""
        return self._last_used.get(url, 0)

    def fail(self, urls: Iterable[str]) -> None:
        """The engines are gone: give up their legs at once, whatever they wait for."""
        for url in urls:
            self._last_used.pop(url, None)
            for leg in self._open.get(url, ()):
                if not leg.scope.expired():
                    leg.lost = True
                    leg.scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def post(
        self, engine: Engine, path: str, *, payload: Payload, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        """Send a request and hold its answer; leaving early closes the connection, which makes vLLM abort.

        :raises LegFailed: also from within, when the engine is lost or the time is up.
        """
        self._last_used[engine.url] = next(self._turns)
        sent = {**headers, "Content-Type": "application/json", "Content-Length": str(len(payload))}
        async with (
            self._leg(engine, self._read_timeout_s),
            self._answer(engine, "POST", path, payload=payload, headers=sent) as answer,
        ):
            yield answer

    async def get(
        self, engine: Engine, path: str, *, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[Answer, bytes]:
        """A small answer, whole. :raises LegFailed: it did not come in time."""
        async with (
            self._leg(engine, timeout_s),
            self._answer(engine, "GET", path, payload=None, headers=headers) as answer,
        ):
            return answer, await answer.read()

    @asynccontextmanager
    async def _leg(self, engine: Engine, timeout_s: float) -> AsyncIterator[None]:
        leg = _Leg(asyncio.timeout(timeout_s))
        legs = self._open.setdefault(engine.url, set())
        legs.add(leg)
        try:
            async with leg.scope:
                yield
        except TimeoutError as error:
            if not leg.scope.expired():
                raise
            raise failed(Reason.LOST if leg.lost else Reason.TIMEOUT, engine) from error
        finally:
            legs.discard(leg)
            if not legs:
                del self._open[engine.url]

    @asynccontextmanager
    async def _answer(
        self, engine: Engine, method: str, path: str, *, payload: Payload | None, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        began_at = self._clock()
        response = None
        while response is None:
            try:
                response = await self._session.request(
                    method,
                    engine.url + path,
                    data=payload,
                    headers=headers,
                    timeout=self._timeout,
                    allow_redirects=False,
                )
            except aiohttp.ConnectionTimeoutError as error:
                # Where this process stood still, the engine may have answered meanwhile, and nobody looked.
                if self._clock() - began_at >= self._connect_timeout_s:
                    raise failed(Reason.CONNECT_TIMEOUT, engine) from error
            except aiohttp.ClientConnectorError as error:
                raise failed(Reason.REFUSED, engine, error.strerror or "") from error
            except (aiohttp.ClientError, OSError) as error:
                raise failed(Reason.RESET, engine, type(error).__name__) from error
        try:
            yield Answer(engine, response)
        finally:
            response.close()  # nothing, if the body was read to its end: the connection is back in its pool
