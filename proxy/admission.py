"""Admission control: checks API keys, if any are configured, and limits concurrent requests.

The key file has one key per line, with the client's name and limits (`pdx.proxy.config`):

    alice   Zm9vYmFyYmF6…   max-concurrent=8  per-minute=600

Several lines with the same name belong to one client, so that it can switch from an old key to a new one.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from aiohttp import web

from pdx.errors import ConfigError, RequestRefused
from pdx.proxy.config import ProxyConfig
from pdx.proxy.exchange import KEY_ROWS, TRACE, Seat
from pdx.proxy.reply import Handler, error_response, request_key
from pdx.security.reread import Reread
from pdx.security.secret_file import check_private, read
from pdx.telemetry.env import Env

OPEN = frozenset({"/health", "/healthz", "/readyz", "/ping", "/load"})  # for balancers; any other path needs a key
_MAX_FILE_BYTES = 1 << 20
_ENTRY = re.compile(
    r"([\w.-]{1,64})\s+([\w.~+/=-]{32,1024})((?:\s+(?:max-concurrent|per-minute)=[1-9]\d{0,5})*)", re.ASCII
)
_FORM = "NAME KEY [max-concurrent=N] [per-minute=N], where KEY has 32 letters, digits and ._~+/=- or more"
_MINUTE_NS = 60 * 10**9
MAX_NAMES = KEY_ROWS // 4
_PROBES = 64
_OWN = os.urandom(32)
_KEY = request_key("key")


class Key(msgspec.Struct, frozen=True):
    """A client's name and limits; 0: unlimited."""

    name: str
    max_concurrent: int = 0
    per_minute: int = 0


def _digest(key: str) -> bytes:
    """The digest under which a key is stored and looked up. A guess cannot share a prefix with another key's digest on
    purpose, so lookup time reveals nothing."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=_OWN, digest_size=32).digest()


def load_keys(path: str) -> Mapping[bytes, Key]:
    """The keys in a file, by digest. No error message quotes a key.

    :raises ConfigError: the file is unreadable, readable by others, without keys, or has an invalid line.
    """
    where = f"API keys {path}"
    make = f'(umask 077; echo "NAME $(openssl rand -hex 32)" >> {path})'
    text, info = read(path, "API keys", make, _MAX_FILE_BYTES + 1)
    check_private(info, "file of API keys", path)
    if info.st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{where}: more than {_MAX_FILE_BYTES} bytes")
    keys: dict[bytes, Key] = {}
    names: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        entry = _ENTRY.fullmatch(said)
        if entry is None:
            raise ConfigError(f"{where}, line {number} is not {_FORM}")
        limits = (each.split("=") for each in entry[3].replace("-", "_").split())
        found = Key(entry[1], **{name: int(most) for name, most in limits})
        if names.setdefault(found.name, found) != found:
            raise ConfigError(f"{where}, line {number}: {found.name} has other limits in a line before")
        if keys.setdefault(_digest(entry[2]), found) != found:
            raise ConfigError(f"{where}, line {number}: this key is another one's, too")
    if not keys:
        raise ConfigError(f"{where}: there is none in it; {make} makes one")
    if len(names) > MAX_NAMES:
        raise ConfigError(f"{where}: {len(names)} names; at most {MAX_NAMES} are possible")
    return keys


class _Uses:
    """Per-client usage across all workers: rows of numbers in shared memory, where each worker writes only its own
    cells. A row is found by a mark derived from the client's name. It holds the time until which the client's rate
    limit is used up, and how many requests each worker is serving."""

    def __init__(self, seat: Seat) -> None:
        self._cells, self._width, self._own = seat.uses, 2 + len(seat.loads), 2 + seat.number

    def begin(self, key: Key) -> int:
        """Count a request and return what `end` needs. :raises RequestRefused: the client is over a limit."""
        row = self._row(key.name)
        own = row + self._own
        self._cells[own] += 1  # before reading the others': two at once may refuse too many, not admit too many
        try:
            self._check(key, row)
        except RequestRefused:
            self.end(own)
            raise
        return own

    def end(self, own: int) -> None:
        self._cells[own] -= 1

    def _check(self, key: Key, row: int) -> None:
        busy = sum(self._cells[row + 2 : row + self._width])
        if key.max_concurrent and busy > key.max_concurrent:
            raise _too_many(f"{key.name} has {key.max_concurrent} requests under way, as many as it may", 1)
        if key.per_minute:
            now = time.monotonic_ns()  # the same clock for all processes of a host
            paid = max(self._cells[row + 1], now) + _MINUTE_NS // key.per_minute
            if (early := paid - now - _MINUTE_NS) > 0:
                text = f"{key.name} has asked {key.per_minute} requests within a minute, as many as it may"
                raise _too_many(text, math.ceil(early / 1e9))
            self._cells[row + 1] = paid

    def _row(self, name: str) -> int:
        mark = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1 | 1
        rows = len(self._cells) // self._width
        for probe in range(_PROBES):
            row = ((mark >> 1) + probe) % rows * self._width
            if self._cells[row] in (0, mark):
                self._cells[row] = mark
                return row
        # Names removed from the file keep their rows: there is room for all names of a proxy's lifetime.
        raise _too_many("more names had API keys since the proxy began than it can count; it has to be restarted", 60)


class Admission:
    """Admission control of one worker; runs on its event loop."""

    def __init__(self, config: ProxyConfig, env: Env, seat: Seat) -> None:
        """:raises ConfigError: see `load_keys`."""
        self._counters = env.counters
        self.keys: Reread[Mapping[bytes, Key]] | None = None
        if file := config.api_keys:
            self.keys = Reread(partial(load_keys, file), file, what="the file of API keys")
        self._uses = _Uses(seat)
        self._most, self._queue = (
            all_of_them // config.workers + (seat.number < all_of_them % config.workers)
            for all_of_them in (config.max_concurrent, config.max_queue)
        )
        self._room = asyncio.Semaphore(self._most)
        self._wait_s = config.first_byte_timeout_s
        self.waiting = 0

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Parse the header as vLLM does: `Bearer` in any case, one space, the key. vLLM leaves more routes open than
        this."""
        if self.keys is None or request.path in OPEN:
            return await handler(request)
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        found = self.keys.value.get(_digest(key)) if scheme.lower() == "bearer" else None
        if found is None:
            self._counters["unauthorized"] += 1
            text = "the API key is wrong" if key else "an API key is needed: Authorization: Bearer KEY"
            response = error_response(401, text)
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        request[_KEY] = found
        return await handler(request)

    @asynccontextmanager
    async def counted(self, request: web.Request) -> AsyncIterator[None]:
        """Count the request as one of its client's while this context is open. :raises RequestRefused: the client has
        too many."""
        key: Key | None = request.get(_KEY)
        if key is None:
            yield
            return
        used = self._uses.begin(key)
        try:
            yield
        finally:
            self._uses.end(used)

    @asynccontextmanager
    async def turn(self, request: web.Request) -> AsyncIterator[None]:
        """Wait for a free place, then hold it while this context is open. The body must have arrived before: a client
        that sends its body slowly must not hold up others.

        :raises RequestRefused: the proxy has too many requests.
        """
        if not self._most:
            yield
            return
        since_ns, trace = time.monotonic_ns(), request.get(TRACE)
        try:
            await self._wait()
        finally:
            if trace is not None:
                trace.queued = since_ns, time.monotonic_ns()
        try:
            yield
        finally:
            self._room.release()

    async def _wait(self) -> None:
        if self._room.locked() and self.waiting >= self._queue:
            raise _too_many(f"the proxy serves as many requests as it may, and {self.waiting} wait", 1)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._room.acquire()
        except TimeoutError as error:
            raise _too_many(f"the request has waited {self._wait_s:g} s for its turn", 1) from error
        finally:
            self.waiting -= 1


def _too_many(text: str, retry_after_s: int) -> RequestRefused:
    return RequestRefused(429, text, retry_after_s=retry_after_s)
