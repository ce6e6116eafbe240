"""One HTTP request to one engine; every way in which it can fail becomes `LegFailed`."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
import msgspec

from pdx.errors import ClientGone, ConfigError, Exhausted, LegFailed, ProtocolError, Refusal
from pdx.proxy import sse
from pdx.proxy.body import Payload
from pdx.proxy.config import ProxyConfig
from pdx.proxy.engines import Engine
from pdx.proxy.headers import media_type
from pdx.proxy.health import NO_WORK, UNSENT, Health, Reason, Use, Work
from pdx.security.reread import Reread
from pdx.security.secret_file import load_token

# Resources that this process or host lacks; the engine was not asked.
OWN_LACK = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL})
CONNECT_S = 2.0  # time limit for connecting to an engine
_DRAIN_S = 1.0
_SMALL_BYTES = 4 << 20  # limit for answers that are not a user's: health, model lists, refusals
_WHOLE_BYTES = 256 << 20  # limit for an answer that is not streamed, far above any real one
_KEEPALIVE_S = 2.0  # below 5 s, after which vLLM's server closes an idle connection under a request
_FIELD_BYTES = 1 << 20  # of one header of an engine's answer: it describes vectors sent as bytes
# TCP keepalive: the host of a silent engine is probed after 30 s, and lost after 30 s more without a reply.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


def _engine_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket to an engine, with keepalive: a host that vanished would otherwise be waited for to the limit."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def engine_tls(ca: str) -> ssl.SSLContext | bool:
    """TLS settings for engines at https://: trusts the certificates in a file, or those the system trusts (OpenSSL's
    SSL_CERT_FILE and SSL_CERT_DIR can name others).

    :raises ConfigError: the file has no certificates.
    """
    if not ca:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--engine-ca {ca}: {error.strerror or error}; it must hold certificates in PEM") from error


def failed(reason: Reason, engine: Engine, text: str = "", *, answer: Refusal | None = None) -> LegFailed:
    return LegFailed(reason, engine.name, engine.url, text, unsent=reason in UNSENT, answer=answer)


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Asked(NamedTuple):
    """A request to an engine."""

    path: str
    payload: Payload | None  # None: no body
    content_type: str = "application/json"
    method: str = "POST"


class Answer:
    """A leg in flight and, once its headers have arrived, the engine's answer; valid inside `Legs.post`.

    The engine may be silent for `limit_s`, and for `idle_s` once it has begun to answer.
    """

    status: int
    content_type: str
    headers: Mapping[str, str]

    def __init__(self, engine: Engine, health: Health, use: Use | None, limit_s: float, idle_s: float) -> None:
        self.engine = engine
        self.use = use  # None: not counted as load, and `limit_s` covers the whole leg
        self.limit_s = limit_s
        self.since = self.began_at = health.clock()
        self.doubt_s = float("inf")  # silence after which a probe checks whether the engine generates
        self.waits_for_engine = True
        self.after: asyncio.Future[Any] | None = None  # until this is done, silence is not the engine's fault
        self.scope = asyncio.timeout(None)
        self._idle_s = idle_s
        self._health = health
        self._silent_s = 0.0  # for how long its model has said nothing, while it was waited for
        self._content: aiohttp.StreamReader | None = None

    def arrived(self, response: aiohttp.ClientResponse) -> None:
        """The answer's head has arrived; its body has not been read."""
        self.status = response.status
        self.content_type = media_type(response.headers)
        self.headers = response.headers
        self._content = response.content

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.content_type == "text/event-stream"

    @property
    def failure(self) -> Reason | None:
        """Why this is not a usable answer; None if it is, even if it only says that the request is wrong."""
        if self.status == 429:
            return Reason.STATUS_429
        if self.status == HTTPStatus.NOT_IMPLEMENTED:  # its model does not support the request
            return None
        if 500 <= self.status <= 599:
            return Reason.STATUS_503 if self.status == HTTPStatus.SERVICE_UNAVAILABLE else Reason.STATUS_5XX
        return None if 200 <= self.status <= 299 or 400 <= self.status <= 499 else Reason.REDIRECT

    async def read(self, most: int = _WHOLE_BYTES) -> bytes:
        """The whole body. :raises LegFailed: it was truncated, does not end, or exceeds `most` bytes."""
        parts: list[bytes] = []
        size = 0
        while part := await self.read_some():
            parts.append(part)
            size += len(part)
            if size > most:
                raise failed(Reason.MALFORMED, self.engine, f"status {self.status} with more than {most} bytes")
        return b"".join(parts)

    async def read_some(self) -> bytes:
        """The next bytes, b"" at the end. :raises LegFailed: the engine disconnected."""
        assert self._content is not None
        use = self.use
        if use is not None:
            self.since = self._health.clock() - self._silent_s
        self.waits_for_engine = True
        try:
            found = await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise failed(Reason.RESET, self.engine, type(error).__name__) from error
        if use is None:
            return found
        now = self._health.clock()
        is_silence = self.is_stream and sse.is_empty(found)
        self._silent_s = now - self.since if is_silence else 0.0
        self.since, self.waits_for_engine = now, False
        if is_silence:
            return found
        self.limit_s = self._idle_s
        if found:
            if is_served := self.status == HTTPStatus.OK:
                use.record.heard_at = self.since
            if use.work is not NO_WORK:
                use.answered(self.began_at, self.since, is_served=is_served)
            if use.is_trial and self.is_stream:
                self._health.proved(use)
        return found

    async def drain(self) -> None:
        """Read and discard the rest so that the connection can be reused; close it if that takes long."""
        assert self._content is not None
        with suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(_DRAIN_S):
                while await self._content.readany():
                    pass


class Legs:
    """All legs in flight, from `open` on. `end_silent` must be called regularly."""

    session: aiohttp.ClientSession

    def __init__(self, health: Health, config: ProxyConfig) -> None:
        """The clock of `health` counts only seconds in which this process ran; all limits use it.

        :raises ConfigError: see `load_token`.
        """
        self._health = health
        self._clock = health.clock
        self._config = config
        self.key: Reread[str] | None = None  # the key shown to engines
        if file := config.engine_key:
            self.key = Reread(partial(load_token, file), file, what="the engines' key")
        self._timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_connect=CONNECT_S)
        self._under_way: set[Answer] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """While this context is open, engines can be asked. :raises ConfigError: there are no trusted certificates."""
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_KEEPALIVE_S,
            socket_factory=_engine_socket,
            ssl=engine_tls(self._config.engine_ca),
        )
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "User-Agent": "pdx-proxy"},
            max_field_size=_FIELD_BYTES,
        ) as self.session:
            yield

    def end_silent(self) -> None:
        now = self._clock()
        for leg in self._under_way:
            if leg.after is not None and not leg.after.done():
                leg.since = now
            if leg.use is not None and leg.waits_for_engine and now - leg.since >= leg.doubt_s:
                leg.doubt_s = float("inf")
                self._health.doubt(leg.use)
            if now - leg.since >= leg.limit_s and not leg.scope.expired():
                leg.scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def post(
        self,
        engine: Engine,
        asked: Asked,
        *,
        headers: Mapping[str, str],
        is_whole: bool = False,
        after: asyncio.Future[Any] | None = None,
        work: Work = NO_WORK,
    ) -> AsyncIterator[Answer]:
        """Send a request and hold its answer. Leaving the context early closes the connection, which makes vLLM abort.

        `is_whole`: the answer is a single body, so its first byte comes with its last token. `after`: what the engine
        waits for; its time to answer starts when that is done. `Health` is told how the leg ends, unless the client or
        this proxy ends it.

        :raises LegFailed: also from within, when time is up.
        :raises ClientGone: from within, when the client stops reading.
        :raises Exhausted: this proxy is out of descriptors or ports.
        """
        config = self._config
        with self._health.begin(engine.url, work) as use:
            limit_s = config.answer_timeout_s if is_whole else config.first_byte_timeout_s
            leg = Answer(engine, self._health, use, limit_s, config.idle_timeout_s)
            leg.doubt_s = config.first_byte_timeout_s if is_whole else leg.doubt_s
            leg.after = after
            sent = dict(headers)
            if asked.payload is not None:
                sent |= {"Content-Type": asked.content_type, "Content-Length": str(len(asked.payload))}
            try:
                async with self._sent(leg, asked.method, asked.path, payload=asked.payload, headers=sent):
                    await self._check(leg)
                    yield leg
            except LegFailed as failure:
                self._health.failed(use, Reason(failure.reason))
                raise
            if leg.status == 200:
                self._health.succeeded(use)

    async def ask(
        self, engine: Engine, path: str, *, headers: Mapping[str, str], timeout_s: float, payload: bytes | None = None
    ) -> tuple[Answer, bytes]:
        """A small answer, read completely within `timeout_s`: GET, or POST if there is a payload. It does not count as
        load, and `Health` is not told about it.

        :raises LegFailed: also if it did not arrive in time. :raises Exhausted: as `post`.
        """
        method = "GET" if payload is None else "POST"
        sent = headers if payload is None else {**headers, "Content-Type": "application/json"}
        leg = Answer(engine, self._health, None, timeout_s, timeout_s)
        async with self._sent(leg, method, path, payload=payload, headers=sent):
            return leg, await leg.read(_SMALL_BYTES)

    async def tokens(
        self, engine: Engine, payload: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> list[int]:
        """The tokens that an engine makes of a text or a conversation.

        :raises LegFailed, Exhausted: as `ask`. :raises ProtocolError: the answer has no tokens.
        """
        answer, raw = await self.ask(engine, "/tokenize", headers=headers, timeout_s=timeout_s, payload=payload)
        if answer.status != HTTPStatus.OK:
            raise ProtocolError(f"status {answer.status}")
        try:
            return msgspec.json.decode(raw, type=_Tokens).tokens
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(str(error)) from error

    async def _check(self, answer: Answer) -> None:
        """:raises LegFailed: it is no answer, or another engine may give a better one."""
        is_locked = answer.status == HTTPStatus.UNAUTHORIZED and self._config.is_keyed
        if (reason := Reason.UNAUTHORIZED if is_locked else answer.failure) is not None:
            refusal = Refusal(answer.status, await answer.read(_SMALL_BYTES), answer.content_type, answer.headers)
            raise failed(reason, answer.engine, f"status {answer.status}", answer=refusal)

    @asynccontextmanager
    async def _sent(
        self, leg: Answer, method: str, path: str, *, payload: Payload | None, headers: Mapping[str, str]
    ) -> AsyncIterator[None]:
        """Send the request; inside the block its answer has arrived, within its time limit."""
        try:
            async with leg.scope:
                self._under_way.add(leg)
                try:
                    response = await self._request(leg.engine, method, path, payload=payload, headers=headers)
                    try:
                        leg.arrived(response)
                        yield
                    finally:
                        response.close()  # a no-op if the body was read to its end: the connection is back in its pool
                finally:
                    self._under_way.discard(leg)
        except TimeoutError as error:
            if not leg.scope.expired():
                raise
            if not leg.waits_for_engine:
                raise ClientGone(f"the client has taken nothing for {leg.limit_s:g} s") from error
            raise failed(Reason.TIMEOUT, leg.engine, f"nothing for {leg.limit_s:g} s") from error

    async def _request(
        self, engine: Engine, method: str, path: str, *, payload: Payload | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        began_at = self._clock()
        if self.key is not None:
            headers = {**headers, "Authorization": f"Bearer {self.key.value}"}
        while True:
            try:
                return await self.session.request(
                    method,
                    engine.url + path,
                    data=payload,
                    headers=headers,
                    timeout=self._timeout,
                    allow_redirects=False,
                )
            except aiohttp.ConnectionTimeoutError as error:
                # While this process was suspended, the engine may have answered without anyone reading it.
                if self._clock() - began_at >= CONNECT_S:
                    raise failed(Reason.CONNECT_TIMEOUT, engine) from error
            except (aiohttp.ClientError, OSError) as error:
                raise _translated(error, engine) from error


def _translated(error: aiohttp.ClientError | OSError, engine: Engine) -> LegFailed | Exhausted:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return failed(Reason.TLS, engine, f"{error.certificate_error}; pdx proxy --engine-ca names what to trust")
    if isinstance(error, aiohttp.ClientSSLError):
        return failed(Reason.TLS, engine, str(error.os_error))
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno in OWN_LACK:
        return Exhausted(errno.errorcode[cause.errno], f"no connection to engine {engine.name}: {cause.strerror}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return failed(Reason.REFUSED, engine, error.strerror or "")
    return failed(Reason.RESET, engine, type(error).__name__)
