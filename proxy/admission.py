"""Which requests are let in: those with an API key, where there are keys, and so many at a time.

Keys are in a file, one in a line, with the name of whoever has it and what that one may ask (`pdx.proxy.config`):

    alice   Zm9vYmFyYmF6…   max-concurrent=8  per-minute=600

Several lines with one name are one client's: the old key and the new one, while it goes over to that.
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

OPEN = frozenset({"/health", "/healthz", "/readyz", "/ping", "/load"})  # what balancers ask; all else needs a key
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
    """Whose it is, and what that one may ask; 0: any number."""

    name: str
    max_concurrent: int = 0
    per_minute: int = 0


def _digest(key: str) -> bytes:
    """By which a key is kept and found. Nobody outside can make a guess that shares a part of another's digest, so how
    long it takes to find one says nothing."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=_OWN, digest_size=32).digest()


def load_keys(path: str) -> Mapping[bytes, Key]:
    """The keys in a file, by their digests. No error quotes one.

    :raises ConfigError: it cannot be read, others may read it, it has no key, or a line is wrong.
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
    """What is asked with each key, of all workers: rows of numbers in memory that they share, and in which each writes
    its own. A row is found by its mark, which comes of a name; it has until when the name's requests are paid for, and
    how many each worker is serving."""

    def __init__(self, seat: Seat) -> None:
        self._cells, self._width, self._own = seat.uses, 2 + len(seat.loads), 2 + seat.number

    def begin(self, key: Key) -> int:
        """Count a request; what `end` needs. :raises RequestRefused: it is one too many."""
        row = self._row(key.name)
        own = row + self._own
        self._cells[own] += 1  # before it looks at the others: together they never let in one too many
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
            now = time.monotonic_ns()  # all processes of a host have the same
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
        # Names that the file has no more keep their rows: a proxy's life has room for many, and ends before this.
        raise _too_many("more names had API keys since the proxy began than it can count; it has to be restarted", 60)


class Admission:
    """Of one worker; on its event loop."""

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
        """As vLLM reads the header: `Bearer` in any case, one blank, the key. It leaves more routes open."""
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
        """Inside, a request counts as one of its client's. :raises RequestRefused: that one has too many."""
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
        """Inside, a request is one of those that are served; before, it may wait for that. Its body is there by then:
        who is slow to send one keeps nobody waiting.

        :raises RequestRefused: all together have too many.
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
