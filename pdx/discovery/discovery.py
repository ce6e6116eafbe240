"""Asks the cluster where nodes and proxies are, on a thread of its own, as long as its process runs.

The cluster gives addresses, never identities: the roster has the names and keys, and the process at an address must
prove the key. So a cluster that errs or lies costs connections at most, and one that does not answer changes nothing:
the last addresses stay. Both the size of its answers and the rate at which they are read are bounded, so that no flood
keeps the GIL from the process's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import aiohttp
import msgspec

from pdx.closing import Closing
from pdx.errors import ConfigError, ProtocolError
from pdx.security.roster import Found
from pdx.telemetry.faults import Faults, printable

log = logging.getLogger(__name__)

MAX_FOUND = 8192  # entries; more are an error
ANSWER_S = 20.0  # for a whole answer
WATCH_S = 120.0  # until everything is listed anew in any case, because a connection may be dead unnoticed
FIRST_PAUSE_S = 1.0  # between two rounds, doubled after each that ended early …
MOST_PAUSE_S = 30.0  # … up to this
CLOSE_S = 5.0
_TELL_S = 0.2  # shortest time between two updates of `found`
_MAX_BYTES = 4 << 20  # of an answer
_MAX_LINE_BYTES = 1 << 20
_LINES_BYTES_S = 8 << 20  # of changes, read per second at most
_LINE_S = 0.001  # the least time per line


class Announced(msgspec.Struct, frozen=True):
    """What runs in this process, for a cluster to which processes announce themselves."""

    kind: str  # nodes or proxies
    name: str
    address: str


class Source(Protocol):
    """A kind of cluster."""

    is_assigned: bool  # see `Found`

    async def follow(self, own: Announced | None, changed: Callable[[], None]) -> None:
        """List everything once, then watch for changes, for about WATCH_S or until an error. `changed` is called
        whenever `found` may return something else.

        :raises Exception: the cluster does not answer, or its answer is invalid.
        """

    def found(self) -> Found:
        """The addresses known now."""

    async def leave(self) -> None:
        """Withdraw the announcement. :raises Exception: as above."""


class Discovery(Closing):
    """Keeps `found` up to date. Any thread may read it: it is replaced as a whole."""

    def __init__(self, source: Source, counters: Counter[str], *, pause_s: float = FIRST_PAUSE_S) -> None:
        self.found = Found()
        self._source = source
        self._faults = Faults(counters, log=log)
        self._counters = counters
        self._pause_s = pause_s
        self._thread: threading.Thread | None = None

    def start(self, kind: str = "", name: str = "", address: str = "") -> None:
        """Start the thread. `kind`: nodes or proxies, as which to announce this process; empty: do not."""
        own = Announced(kind, name, address) if kind and address.startswith("tcp://") else None
        if kind and own is None:
            log.warning("%s is at %s, where nobody of another host finds it: name a tcp address", name, address)
        self._loop = asyncio.new_event_loop()
        self._due: asyncio.TimerHandle | None = None
        self._task = self._loop.create_task(self._keep_asking(own))
        self._thread = threading.Thread(target=self._run, name="pdx-discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop within CLOSE_S, whatever the cluster does."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by an error
                self._loop.call_soon_threadsafe(self._task.cancel)
            thread.join(CLOSE_S)

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
            self._loop.run_until_complete(self._loop.shutdown_default_executor())  # which looks up names
        finally:
            self._loop.close()

    async def _keep_asking(self, own: Announced | None) -> None:
        pause_s = self._pause_s
        try:
            while True:
                began = self._loop.time()
                try:
                    await self._source.follow(own, self._changed)
                except Exception as error:  # noqa: BLE001 - whatever it is, the last addresses stay
                    if self._task.cancelling():  # cancelled tasks may still raise errors of their own
                        return
                    self._counters["discovery_failures"] += 1
                    if pause_s > self._pause_s:  # not for the first one, as connections may end
                        self._faults.warn("discovery", f"{self._source} is asked again: {_told(error)}")
                lasted_s = self._loop.time() - began
                pause_s = min(2 * pause_s, MOST_PAUSE_S) if lasted_s < WATCH_S / 2 else self._pause_s
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # so that hosts do not ask all at once
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_S / 2):
                    await self._source.leave()

    def _changed(self) -> None:
        if self._due is None:
            self._due = self._loop.call_later(_TELL_S, self._tell)

    def _tell(self) -> None:
        self._due = None
        self.found = self._source.found()


def _told(error: BaseException) -> str:
    """The text of an error, of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return printable(str(error) or type(error).__name__)


def discovery(where: str, counters: Counter[str], *, has_keys: bool) -> Discovery:
    """The discovery that `--discover` names. :raises ConfigError: it names no kind of cluster, or there are no keys."""
    from pdx.discovery import etcd, kubernetes

    kind, _, rest = where.partition(":")
    kinds: dict[str, Callable[[str], Source]] = {"etcd": etcd.Etcd.named, "kubernetes": kubernetes.Kubernetes.named}
    if kind not in kinds:
        raise ConfigError(f"--discover {where!r:.100}: write kubernetes:SERVICE[.NAMESPACE] or etcd:URL/PREFIX")
    if not has_keys:
        raise ConfigError("--discover needs --keys and --roster: the cluster says where somebody is, and not who")
    return Discovery(kinds[kind](rest), counters)


# ---- for sources ----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def session(tls: ssl.SSLContext | bool = True, **more: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP session for one round, so that the next one reads files with certificates and tokens anew. It ignores
    proxies in the environment and decompresses nothing. At the end all its connections are shut down, because aiohttp
    would wait for the goodbye of TLS."""
    opened: list[socket.socket] = []

    def opening(info: Any) -> socket.socket:
        opened.append(socket.socket(*info[:3]))
        return opened[-1]

    limits = aiohttp.ClientTimeout(total=None, connect=ANSWER_S / 4)
    connector, jar = aiohttp.TCPConnector(ssl=tls, socket_factory=opening), aiohttp.DummyCookieJar()
    try:
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=jar, timeout=limits, auto_decompress=False, **more
        ) as http:
            yield http
    finally:
        for each in opened:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for _ in range(1000):  # usually a few turns are enough
            if all(each.fileno() < 0 for each in opened):
                break
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def asked(
    http: aiohttp.ClientSession, method: str, url: str, limit_s: float, **more: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response to one request, within this time; redirects are not followed. After an exception the session is
    closed.

    :raises TimeoutError: the time is over.
    """
    async with asyncio.timeout(limit_s), http.request(method, url, allow_redirects=False, **more) as response:
        try:
            yield response
        except BaseException:
            await http.close()  # do not wait for the rest of the answer
            raise


async def answer(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. :raises ProtocolError: the status is not 200, or the body is too long."""
    told = bytearray()
    async for piece in response.content.iter_any():
        told += piece
        if len(told) > _MAX_BYTES:
            raise ProtocolError(f"an answer of more than {_MAX_BYTES} bytes")
    if response.status != 200:
        raise ProtocolError(f"status {response.status}: {told[:200].decode(errors='replace')}")
    return bytes(told)


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of a streaming response, at a bounded rate.

    :raises ProtocolError: the status is not 200, or a line is too long.
    """
    if response.status != 200:
        await answer(response)
    begun = bytearray()
    async for piece in response.content.iter_any():
        *whole, rest = piece.split(b"\n")
        for each in whole:
            line = bytes(begun + each)
            begun.clear()
            yield line
            await asyncio.sleep(_LINE_S)
        begun += rest
        if len(begun) > _MAX_LINE_BYTES:
            raise ProtocolError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        await asyncio.sleep(max(_LINE_S, len(piece) / _LINES_BYTES_S))
