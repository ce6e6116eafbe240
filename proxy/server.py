"""An HTTP server at one address: which connections it accepts, which one makes room for another, and how long a
request's head may take.

It accepts connections itself, because asyncio accepts all of them: when no descriptor is left, asyncio logs a traceback
for each connection it cannot accept, and the server's own work lacks descriptors as well.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sized
from functools import partial
from http import HTTPStatus
from pathlib import Path

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from pdx.config import private_folder
from pdx.errors import ConfigError
from pdx.proxy.reply import error_bytes, error_response
from pdx.security import descriptors
from pdx.security.reread import Reread
from pdx.security.secret_file import check_private
from pdx.security.socket_lock import owned, remove_socket
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable

MOST = 16_384  # connections of one listener, however many descriptors there are
HANDSHAKES = 512  # TLS connections during their handshake; each costs 100 KiB
_TLS_READ_BYTES = 64 << 10  # read buffer that asyncio allocates for each TLS connection; its default is 256 KiB
_BACKLOG = 1024
_FILES_PER_ENGINE = 4  # descriptors reserved for connections to each engine; fewer if few files may be open
_BATCH = 4  # connections accepted before existing ones get their turn
_REST_S = 0.25  # pause after the system ran out of descriptors or memory for a connection
_LOOK_S = 0.5  # between two checks for heads that take too long
_CROWD = 0.25  # above this share of connections, those that owe a head or a body are closed first
_UNREAD_MS = 120_000  # a client that reads nothing for this long, though there is data, is gone
FIELD_BYTES = 64 << 10  # of one header: tokens and cookies may be long
_HEAD_BYTES = 1 << 20  # of all headers
KEEPALIVE_S = 75.0  # how long an idle connection is kept
HEAD_S = 10.0  # time limit for a request's head
SHUTDOWN_S = 5.0
_NAME = "pdx"  # does not reveal versions of the software behind it
_REFUSAL = error_bytes(503, "the proxy has no room for another connection", retry_after_s=1)


class HttpConnection(web.RequestHandler):
    """An aiohttp connection that reports when a request begins and when its answer has been written."""

    __slots__ = ("_body", "_head_bytes", "_listener")

    def __init__(self, listener: Server, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=listener.field_bytes,
            max_field_size=listener.field_bytes,
        )
        self._listener = listener
        self._head_bytes = 0
        self._body: StreamReader | None = None  # of the last request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._listener.came(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_body = self._body is not None and not self._body.is_eof()  # the rest of a body that was answered early
        if self._listener.spoke(self) and not is_body:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self._listener.refused_head(self, _HEAD_BYTES)
                return
        super().data_received(data)

    def log_exception(self, *args: object, exc_info: BaseException | None = None, **_: object) -> None:
        """Suppress what aiohttp would log with a traceback each time."""
        self._listener.failed(exc_info if isinstance(exc_info, Exception) else RuntimeError(*args))

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer malformed HTTP in the same format as an invalid request, then close the connection."""
        super().handle_error(request, status, exc, message)
        response = error_response(status, printable(message or HTTPStatus(status).phrase))
        response.headers["Server"] = _NAME
        response.force_close()
        return response

    def begin(self, body: StreamReader) -> None:
        self._head_bytes, self._body = 0, body
        self._listener.begun(self, body)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._listener.ended(self)


class Server:
    """Serves `app` from `start` to `close` (idempotent). A client that disconnects cancels its request's task.

    Connections without a request are closed after KEEPALIVE_S.
    """

    def __init__(
        self,
        app: web.Application,
        env: Env,
        *,
        head_s: float = HEAD_S,
        shutdown_s: float = SHUTDOWN_S,
        engines: Sized = (),
        field_bytes: int = FIELD_BYTES,
        tls: Reread[ssl.SSLContext] | None = None,
    ) -> None:
        """A connection that does not complete a due or started head within `head_s` is closed. At `close`, answers in
        flight have `shutdown_s`. `engines`: descriptors are kept free for connections to these, besides those that
        every process keeps in reserve. `field_bytes`: the largest header. `tls`: see `server_tls`; a new connection
        uses its current value."""
        app.middlewares.insert(0, _begin)
        app.on_response_prepare.append(_name)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)
        self._env = env
        self._head_s = head_s
        self._engines = engines
        self.field_bytes = field_bytes
        self._tls = tls
        self._sockets: list[socket.socket] = []
        self._taking: dict[asyncio.Task[object], None] = {}  # until the TLS handshake is over; oldest first
        self._all: set[HttpConnection] = set()
        self._idle: dict[HttpConnection, None] = {}  # without a request; longest idle first
        self._heads: dict[HttpConnection, float] = {}  # since when a head is due or incomplete, in this order
        self._bodies: dict[HttpConnection, None] = {}  # a request's body is due; oldest first
        self._timers: list[asyncio.TimerHandle] = []
        self._undo = contextlib.AsyncExitStack()
        self.url = ""  # its URL once started; for a Unix socket, the path

    async def start(self, address: str, *, is_shared: bool = False) -> None:
        """Listen at `HOST:PORT` (port 0: any free port), or at the path of a Unix socket, which only this user can
        access. `is_shared`: other processes of this user listen there, too.

        :raises ConfigError: the address is invalid or unavailable.
        """
        with _explained(address):
            await self._start(address, is_shared=is_shared)

    async def _start(self, address: str, *, is_shared: bool) -> None:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._runner.cleanup)
            await self._runner.setup()
            if address.startswith("/"):
                self._sockets = [undo.enter_context(_unix_socket(Path(address)))]
                self.url = address
            else:
                self._sockets = await _tcp_sockets(address, is_shared=is_shared)
                shown = self._sockets[0].getsockname()
                self.url = f"http{'s' if self._tls else ''}://{endpoint(shown[0], shown[1])}"
            undo.callback(self._take_no_more)
            for each in self._sockets:
                each.setblocking(False)
                each.listen(_BACKLOG)
            self._listen()
            self._look()
            self._undo = undo.pop_all()

    async def close(self) -> None:
        """Accept no more connections, and close existing ones once their answers are written."""
        await self._undo.aclose()

    def _take_no_more(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)
            each.close()
        self._timers, self._sockets = [], []

    # ---- what connections say ---------------------------------------------------------------

    def came(self, connection: HttpConnection) -> None:
        self._all.add(connection)
        self._idle[connection] = None
        self._heads[connection] = self._env.clock()

    def spoke(self, connection: HttpConnection) -> bool:
        """Bytes arrived; returns whether they may belong to a request's head."""
        is_idle = connection in self._idle
        if is_idle:
            self._heads.setdefault(connection, self._env.clock())
        return is_idle

    def refused_head(self, connection: HttpConnection, most: int) -> None:
        self._drop(connection, "heads_too_large", f"a request's head has more than {most} bytes")

    def begun(self, connection: HttpConnection, body: StreamReader) -> None:
        self._idle.pop(connection, None)
        self._heads.pop(connection, None)
        self._bodies[connection] = None
        body.on_eof(lambda: self._bodies.pop(connection, None))

    def ended(self, connection: HttpConnection) -> None:
        self._heads.pop(connection, None)
        self._bodies.pop(connection, None)
        if connection in self._all:
            self._idle[connection] = None

    def left(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)
        self._heads.pop(connection, None)
        self._bodies.pop(connection, None)

    def failed(self, error: Exception) -> None:
        """An error occurred. What follows may be neither HTTP nor a body; anyone can send any number of these."""
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            self._note("requests_malformed", f"a request was not understood: {printable(str(error))}")
        else:
            self._env.faults.unexpected("a connection", error)

    # ---- the loop ---------------------------------------------------------------------------

    def _listen(self) -> None:
        for each in self._sockets:
            asyncio.get_running_loop().add_reader(each, self._accept, each)

    def _accept(self, listening: socket.socket) -> None:
        with self._env.faults.contain("taking connections") as failures:
            self._take_waiting(listening)
        if failures:
            self._rest("an internal error")

    def _take_waiting(self, listening: socket.socket) -> None:
        room = self._room()
        for _ in range(_BATCH):
            try:
                stream, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(str(error))
                return
            if (room <= 0 or len(self._taking) >= HANDSHAKES) and not self._make_room():
                self._refuse(stream)
                continue
            room -= 1
            self._take(stream)

    def _room(self) -> int:
        """How many more connections the remaining descriptors allow."""
        reserve = descriptors.reserve()
        spared = min(_FILES_PER_ENGINE * len(self._engines), descriptors.limit() // 4)
        kept = reserve + reserve // 2 + spared  # below `reserve`, nodes of this host are refused as well
        return min(MOST - len(self._all) - len(self._taking), descriptors.left() - kept)

    def _make_room(self) -> bool:
        """Close a connection that is of no use to anyone; False if there is none.

        A client that was served may well ask again, so if many connections owe a head or a body, the one that owes it
        for longest is closed. If few do, the longest idle one is closed: otherwise new connections would displace each
        other.
        """
        many = _CROWD * (len(self._all) + len(self._taking))
        if len(self._taking) >= max(2, min(many, HANDSHAKES)):
            self._note("connections_displaced", "connections without a TLS handshake are closed for new ones")
            taking = next(iter(self._taking))
            del self._taking[taking]
            return taking.cancel()
        crowd = next((due for due in (self._heads, self._bodies) if len(due) >= many), self._idle) or self._bodies
        oldest = next(iter(crowd), None)
        if oldest is None:
            return False
        what = "connections on which a body is due are" if crowd is self._bodies else "idle connections are"
        self._drop(oldest, "connections_displaced", f"{what} closed for new ones")
        return True

    def _take(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None
        tls, limit_s = (self._tls.value, self._head_s) if self._tls is not None else (None, None)
        taking: asyncio.Task[object] = loop.create_task(
            loop.connect_accepted_socket(
                lambda: HttpConnection(self, server), stream, ssl=tls, ssl_handshake_timeout=limit_s
            )
        )
        self._taking[taking] = None
        taking.add_done_callback(self._taken)

    def _taken(self, taking: asyncio.Task[object]) -> None:
        self._taking.pop(taking, None)
        if not taking.cancelled() and (error := taking.exception()) is not None:
            self._note("connections_refused", f"a connection was lost while it was taken: {printable(str(error))}")

    def _refuse(self, stream: socket.socket) -> None:
        self._note("connections_refused", "new connections are refused, because a request is under way on every other")
        with stream:
            try:
                stream.setblocking(False)
                if self._tls is None:
                    stream.send(_REFUSAL)
                stream.shutdown(socket.SHUT_WR)
            except OSError:
                return

    def _rest(self, why: str) -> None:
        self._note("accepts_failed", f"no connection can be taken now: {why}")
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.remove_reader(each)
        self._later(_REST_S, self._listen)

    def _look(self) -> None:
        """Close connections whose request head takes too long; load a new certificate."""
        self._later(_LOOK_S, self._look)
        if self._tls is not None:
            with self._env.faults.contain("the look at the certificate"):
                self._tls.refresh()
        now = self._env.clock()
        for connection, since in list(self._heads.items()):
            if now - since <= self._head_s:
                break
            with self._env.faults.contain("ending a connection"):
                self._drop(connection, "heads_overdue", f"a request's head did not arrive within {self._head_s:g} s")

    def _drop(self, connection: HttpConnection, event: str, text: str) -> None:
        self._note(event, text)
        self.left(connection)
        if self._tls is not None and connection.transport is not None:
            connection.transport.abort()  # `close` would wait for the client's goodbye
        connection.force_close()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._timers = [timer for timer in self._timers if timer.when() > loop.time() and not timer.cancelled()]
        self._timers.append(loop.call_later(seconds, call))

    def _note(self, event: str, text: str) -> None:
        self._env.counters[event] += 1
        self._env.faults.warn(event, f"{text} (counted as {event}; {self._env.counters[event]} so far)")


@web.middleware
async def _begin(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if isinstance(request.protocol, HttpConnection):
        request.protocol.begin(request.content)
    return await handler(request)


async def _name(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = _NAME


def server_tls(cert: str, key: str) -> Reread[ssl.SSLContext]:
    """The server's TLS context, from a certificate chain and a private key, which may be in the same file.

    :raises ConfigError: a file is invalid, they do not match, or others can read the key.
    """
    return Reread(partial(_tls, cert, key), cert, key, what="the certificate")


def _tls(cert: str, key: str) -> ssl.SSLContext:
    option, secret = ("--tls-key", key) if key else ("--tls-cert", cert)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    asyncio.sslproto.SSLProtocol.max_size = _TLS_READ_BYTES
    try:
        with open(secret, "rb") as file:
            check_private(os.fstat(file.fileno()), option, secret)
        context.load_cert_chain(cert, secret, password="")  # without a password, OpenSSL would prompt at the terminal
    except (OSError, ssl.SSLError) as error:
        files, why = f"--tls-cert {cert or '(not given)'}, --tls-key {secret}", error.strerror or error
        text = "these must be a certificate and its private key without a password, in PEM"
        raise ConfigError(f"{files}: {text}: {why}") from error
    return context


def when_signalled(call: Callable[[], None]) -> None:
    """Have the running loop call this on each SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, call)


def endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Split `HOST:PORT`; an IPv6 address is in brackets. :raises ConfigError: the address is invalid."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not bare or not port.isascii() or not port.isdigit() or int(port) > 65_535 or (":" in host and bare == host):
        raise ConfigError(f"{address!r} is not an address; write HOST:PORT, [IPV6]:PORT or /path/of/a/socket")
    return bare, int(port)


async def bound(address: str) -> list[socket.socket]:
    """The bound sockets of a `Server` at `HOST:PORT`, not yet listening.

    :raises ConfigError: the address is invalid or unavailable.
    """
    with _explained(address):
        return await _tcp_sockets(address)


async def _tcp_sockets(address: str, *, is_shared: bool = False) -> list[socket.socket]:
    """Sockets bound to every address of the host, as asyncio binds them."""
    host, port = host_and_port(address)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False, reuse_port=is_shared or None)
    try:
        return [each.dup() for each in server.sockets]
    finally:
        server.close()


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    try:
        yield
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{address!r} names no host: {why}; name an IP address of this one") from error
    except OSError as error:
        raise ConfigError(f"{address!r} cannot be had: {error.strerror or error}") from error


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """A socket bound to a path that this process owns inside the block."""
    private_folder(path.parent)
    taken = ConfigError(f"another process listens at {path}; name another path")
    with contextlib.ExitStack() as undo:
        undo.enter_context(owned(path, lambda _: taken))
        remove_socket(path)
        undo.callback(path.unlink, missing_ok=True)
        bound = undo.enter_context(socket.socket(socket.AF_UNIX))
        mask = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(mask)
        yield bound
