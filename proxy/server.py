"""An HTTP server: an application, and the connections that come to one address of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from aiohttp import web

from pdx.config import private_folder
from pdx.errors import ConfigError
from pdx.proxy.listener import Connection, Listener
from pdx.security.socket_lock import owned, remove_socket

KEEPALIVE_S = 75.0  # a connection without a request is kept for so long
HEAD_S = 10.0  # a request's head arrives within this time
SHUTDOWN_S = 5.0


class Server:
    """Serves `app` from `start` to `close` (idempotent). A client that goes away cancels its request's task."""

    def __init__(
        self,
        app: web.Application,
        *,
        head_s: float = HEAD_S,
        shutdown_s: float = SHUTDOWN_S,
        spared: Callable[[], int] = lambda: 0,
        counters: Counter[str],
    ) -> None:
        """`spared`, `head_s`: see `Listener`. At `close`, answers under way have `shutdown_s`."""
        app.middlewares.insert(0, _begin)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)
        self._head_s = head_s
        self._spared = spared
        self._counters = counters
        self._undo = contextlib.AsyncExitStack()
        self.url = ""  # where it is reached, once it is started; of a Unix socket, its path

    async def start(self, address: str) -> None:
        """Listen at `HOST:PORT` (port 0: any free one), or at the path of a Unix socket, which is this user's alone.

        :raises ConfigError: the address is not one, or cannot be had.
        """
        try:
            await self._start(address)
        except (socket.gaierror, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{address!r} names no host: {why}; name an IP address of this one") from error
        except OSError as error:
            raise ConfigError(f"{address!r} cannot be had: {error.strerror or error}") from error

    async def _start(self, address: str) -> None:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._runner.cleanup)
            await self._runner.setup()
            if address.startswith("/"):
                sockets = [undo.enter_context(_unix_socket(Path(address)))]
                self.url = address
            else:
                host, port = host_and_port(address)
                sockets = await _tcp_sockets(host, port)
                shown = [f"[{at[0]}]" if ":" in at[0] else at[0] for at in (each.getsockname() for each in sockets)]
                self.url = f"http://{shown[0]}:{sockets[0].getsockname()[1]}"
            server = self._runner.server
            assert server is not None
            listener = Listener(
                server,
                keepalive_s=KEEPALIVE_S,
                head_s=self._head_s,
                spared=self._spared,
                counters=self._counters,
            )
            undo.callback(listener.close)
            listener.start(sockets)
            self._undo = undo.pop_all()

    async def close(self) -> None:
        """Take no more connections, and end those that are here once their answers are written."""
        await self._undo.aclose()


@web.middleware
async def _begin(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if isinstance(request.protocol, Connection):
        request.protocol.begin(request.content)
    return await handler(request)


async def serve_until_stopped(app: web.Application, host: str, port: int, *, shutdown_s: float) -> None:
    """Until SIGINT or SIGTERM; then requests under way have `shutdown_s`.

    :raises ConfigError: the address cannot be had.
    """
    server = Server(app, shutdown_s=shutdown_s, counters=Counter())
    stop = asyncio.Event()
    when_signalled(stop.set)
    try:
        await server.start(endpoint(host, port))
        await stop.wait()
    finally:
        await server.close()


def when_signalled(call: Callable[[], None]) -> None:
    """Have the running loop call this at each SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, call)


def endpoint(host: str, port: int) -> str:
    """`HOST:PORT`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of `HOST:PORT`, where an IPv6 address is in brackets.

    :raises ConfigError: it is not that.
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not bare or not port.isascii() or not port.isdigit() or int(port) > 65_535 or (":" in host and bare == host):
        raise ConfigError(f"{address!r} is not an address; write HOST:PORT, [IPV6]:PORT or /path/of/a/socket")
    return bare, int(port)


async def _tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Bound to every address that the host has, as asyncio binds them."""
    bound = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    try:
        return [each.dup() for each in bound.sockets]
    finally:
        bound.close()


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """Bound to a path that this process owns inside the block."""
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
