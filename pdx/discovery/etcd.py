"""etcd 3.4 and later, by its JSON gateway: PREFIX/nodes/NAME and PREFIX/proxies/NAME are addresses.

Each process writes its own address with a lease, so that it goes when the process does. The environment variables of
`etcdctl` name certificates and the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pdx.discovery.discovery import ANSWER_S, MAX_FOUND, WATCH_S, Announced, answer, asked, lines, session
from pdx.errors import ConfigError, ProtocolError
from pdx.security.roster import Found

LEASE_S = 15  # how long, at most, a process that is gone is still found
_PARTS = ("nodes", "proxies")
_MAX_CHARS = 256  # of a name, and of an address

_T = TypeVar("_T")


class _Kv(msgspec.Struct):
    key: bytes
    value: bytes = b""


class _Header(msgspec.Struct):
    revision: str = "0"


class _Range(msgspec.Struct):
    header: _Header
    kvs: list[_Kv] = []
    more: bool = False


class _Event(msgspec.Struct):
    kv: _Kv
    type: str = "PUT"


class _Changes(msgspec.Struct):
    events: list[_Event] = []
    canceled: bool = False


class _Watched(msgspec.Struct):
    result: _Changes | None = None


class _Lease(msgspec.Struct):
    number: str = msgspec.field(name="ID", default="")
    left_s: str = msgspec.field(name="TTL", default="0")  # 0: it has expired


class _Kept(msgspec.Struct):
    result: _Lease


class _Token(msgspec.Struct):
    token: str


_watched = msgspec.json.Decoder(_Watched)


class Etcd:
    """An etcd cluster as a source. All but the constructor belongs to one event loop."""

    is_assigned = False

    def __init__(self, urls: list[str], prefix: str) -> None:
        """`urls`: of the members; the next is asked if one does not answer. `prefix`: begins with /."""
        self._urls = urls
        self._prefix = prefix
        self._entries: dict[tuple[str, str], str] = {}  # addresses by part and name
        self._own: Announced | None = None  # as written to etcd
        self._lease = ""

    @classmethod
    def named(cls, name: str) -> Etcd:
        """`name`: http(s)://HOST:PORT[,HOST:PORT…]/PREFIX. :raises ConfigError: it has another form."""
        try:
            parts = urlsplit(name)
            hosts = [urlsplit(f"{parts.scheme}://{each}") for each in parts.netloc.split(",")]
            is_url = parts.scheme in ("http", "https") and all(each.hostname and each.port for each in hosts)
        except ValueError:
            is_url = False
        prefix = parts.path.rstrip("/") if is_url else ""
        if not prefix or "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"--discover etcd:{name:.100}: write etcd:http(s)://HOST:PORT[,HOST:PORT…]/PREFIX")
        return cls([each.geturl() for each in hosts], prefix)

    def __str__(self) -> str:
        return f"etcd at {self._urls[0]}"

    # ---- reading ----------------------------------------------------------------------------

    async def follow(self, own: Announced | None, changed: Callable[[], None]) -> None:
        """See `Source`."""
        try:
            async with self._session() as http, asyncio.TaskGroup() as tasks:
                staying = tasks.create_task(self._stay(http, own)) if own is not None else None
                await self._watch(http, changed)
                if staying is not None:
                    staying.cancel()
        except Exception:
            self._urls.append(self._urls.pop(0))
            raise

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        ca, cert, key, user = (os.environ.get(f"ETCDCTL_{each}") for each in ("CACERT", "CERT", "KEY", "USER"))
        tls: ssl.SSLContext | bool = True
        if self._urls[0].startswith("https:"):
            tls = ssl.create_default_context(cafile=ca)
            if cert:
                tls.load_cert_chain(cert, key)
        async with session(tls, base_url=self._urls[0]) as http:
            if user:
                name, _, password = user.partition(":")
                said = await _call(http, "auth/authenticate", {"name": name, "password": password}, _Token)
                http.headers["Authorization"] = said.token
            yield http

    async def _watch(self, http: aiohttp.ClientSession, changed: Callable[[], None]) -> None:
        among = {"key": _coded(f"{self._prefix}/"), "range_end": _coded(f"{self._prefix}0")}  # 0 comes after /
        listed = await _call(http, "kv/range", {**among, "limit": MAX_FOUND}, _Range)
        if listed.more:
            raise ProtocolError(f"more than {MAX_FOUND} entries")
        self._entries = {}
        for each in listed.kvs:
            self._put(each)
        changed()
        ask = {"create_request": {**among, "start_revision": int(listed.header.revision) + 1}}
        watch_s = random.uniform(WATCH_S, 1.5 * WATCH_S)
        with contextlib.suppress(TimeoutError):
            async with asked(http, "POST", "/v3/watch", watch_s, json=ask) as told:
                async for line in lines(told):
                    said = _watched.decode(line).result
                    if said is None or said.canceled:  # mostly because etcd has compacted the changes since then
                        raise ProtocolError(line[:200].decode(errors="replace"))
                    for event in said.events:
                        if event.type == "DELETE":
                            self._entries.pop(self._named(event.kv), None)
                        else:
                            self._put(event.kv)
                    changed()
                raise ProtocolError("it ended the watch")

    def _put(self, said: _Kv) -> None:
        part, name = self._named(said)
        address = said.value[: _MAX_CHARS + 1].decode(errors="replace").strip()
        if part in _PARTS and 0 < len(name) <= _MAX_CHARS and len(address) <= _MAX_CHARS:
            self._entries[part, name] = address
        if len(self._entries) > MAX_FOUND:
            raise ProtocolError(f"more than {MAX_FOUND} entries")

    def _named(self, said: _Kv) -> tuple[str, str]:
        part, _, name = said.key.decode(errors="replace").removeprefix(f"{self._prefix}/").partition("/")
        return part, name

    def found(self) -> Found:
        """See `Source`."""
        nodes, proxies = ({n: at for (p, n), at in self._entries.items() if p == part} for part in _PARTS)
        return Found(nodes, proxies, self.is_assigned)

    # ---- writing ----------------------------------------------------------------------------

    async def _stay(self, http: aiohttp.ClientSession, own: Announced) -> None:
        """Write this process's entry and keep it alive until cancelled."""
        while True:
            kept = await _call(http, "lease/keepalive", {"ID": self._lease}, _Kept) if self._lease else None
            if kept is None or kept.result.left_s == "0":
                lease = (await _call(http, "lease/grant", {"TTL": LEASE_S}, _Lease)).number
                await self._write(http, own, lease)
                self._lease = lease  # only now: else an older entry of this name would be taken for this one
            elif (own.kind, own.name) not in self._entries:  # it was removed, or another process of this name ended
                await self._write(http, own, self._lease)
            await asyncio.sleep(LEASE_S / 3)

    async def _write(self, http: aiohttp.ClientSession, own: Announced, lease: str) -> None:
        key = f"{self._prefix}/{own.kind}/{own.name}"
        await _call(http, "kv/put", {"key": _coded(key), "value": _coded(own.address), "lease": lease}, _Header)

    async def leave(self) -> None:
        """See `Source`."""
        if self._lease:
            async with self._session() as http:
                await _call(http, "lease/revoke", {"ID": self._lease}, _Header)


async def _call(http: aiohttp.ClientSession, method: str, ask: dict[str, Any], kind: type[_T]) -> _T:
    async with asked(http, "POST", f"/v3/{method}", ANSWER_S, json=ask) as told:
        return msgspec.json.decode(await answer(told), type=kind)


def _coded(text: str) -> str:
    return b64encode(text.encode()).decode()
