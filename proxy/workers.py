"""Serves a proxy: in this process, or in several worker processes that accept connections at one port.

A worker is a complete proxy with its own control socket and admin address (`pdx.security.address`), so nodes report to
each of them. The kernel distributes connections among their sockets (SO_REUSEPORT). Workers share only their load,
health and API key usage. This process starts them, restarts those that die, and ends them; they end if it dies. It has
no threads, so it can fork, and workers need not import anything again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress

import msgspec
from aiohttp import web

from pdx.config import default_proxy
from pdx.errors import ConfigError, PdxError
from pdx.proxy.app import LOOK_S, Proxy
from pdx.proxy.app import log as faults_log
from pdx.proxy.config import ProxyConfig
from pdx.proxy.exchange import Seat
from pdx.proxy.server import SHUTDOWN_S, Server, bound, endpoint, server_tls, when_signalled
from pdx.security import descriptors
from pdx.security.address import worker_address
from pdx.telemetry import logs
from pdx.telemetry.env import Env, WakingClock

log = logging.getLogger(__name__)

AGAIN_S = 1.0  # minimum time between two starts of one worker
FIND_S = 3.0  # a restarted worker listens once it has found a decoder, or after this time
END_S = 2 * SHUTDOWN_S  # after `drain_s`, a worker that has not ended is killed
HUNG_S = 30.0  # so is one whose loop is stuck for this long: the kernel keeps giving it connections
_LOOK_S = 0.05
_STOP = frozenset({signal.SIGINT, signal.SIGTERM})
_SIGNALS = _STOP | {signal.SIGCHLD, signal.SIGALRM}
_SERVES = b"+"  # sent by a worker when it listens; anything it sends before is why it cannot


def run(config: ProxyConfig) -> None:
    """Serve until SIGINT or SIGTERM; then requests in progress have `drain_s`, and a second signal ends them at once.

    :raises ConfigError: an engine's URL is invalid, or an address is unavailable.
    """
    if config.workers == 1:
        asyncio.run(serve(config))
        return
    for name, address in (("--control", config.control), ("--admin", config.admin)):
        if address.endswith(":0"):
            raise ConfigError(f"{name} {address}: with several workers, name a port: each further one has the next")
    if 0 < config.max_concurrent < config.workers:
        raise ConfigError(f"--max-concurrent {config.max_concurrent}: each of {config.workers} workers needs one")
    held = _held(config)
    try:
        port = held[0].getsockname()[1]
        _Workers(msgspec.structs.replace(config, port=port)).run()
    finally:
        for each in held:
            each.close()


async def serve(config: ProxyConfig, place: _Place | None = None) -> None:
    """Serve in this process; `place`: as a worker. See `run`."""
    descriptors.raise_limit()
    env = Env(WakingClock(2 * LOOK_S, time.monotonic), log=faults_log)
    proxy = Proxy(config, env, place.seat if place is not None else None)
    signalled = asyncio.Event()

    def stop() -> None:
        if signalled.is_set():
            proxy.drain.end()
        signalled.set()

    app = proxy.app()
    if place is None:
        when_signalled(stop)
    else:
        place.heed(signalled.set, proxy.drain.end)
        if place.is_again:
            app.cleanup_ctx.append(_finding(proxy))
    tls = server_tls(config.tls_cert, config.tls_key) if config.tls_cert or config.tls_key else None
    server = Server(app, env, engines=proxy.engines, field_bytes=config.max_header_bytes, tls=tls)
    admin = Server(proxy.admin_app(), env)
    try:
        if config.admin:
            await admin.start(config.admin)
            log.info("status page, metrics and timelines at %s, for everybody who reaches it", admin.url)
        await server.start(endpoint(config.host, config.port), is_shared=place is not None)
        log.info("listening on %s; nodes report at %s", server.url, config.control or default_proxy())
        if place is not None:
            os.write(place.says, _SERVES)
        await signalled.wait()
        proxy.drain.begin()
        log.info("stopping: %d requests under way have %g s", len(proxy.drain), config.drain_s)
        await proxy.drain.wait(config.drain_s)
        proxy.drain.end()
    finally:
        await server.close()
        await admin.close()


def _finding(proxy: Proxy) -> Callable[[web.Application], AsyncIterator[None]]:
    """Wait before listening: the other workers are serving, and know the engines."""

    async def find(_app: web.Application) -> AsyncIterator[None]:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIND_S):
                await proxy.found.wait()
        yield

    return find


def _held(config: ProxyConfig) -> list[socket.socket]:
    """Reserve the port: workers of this process share it, and no other process of this user can have it.

    :raises ConfigError: it is unavailable.
    """
    held = asyncio.run(bound(endpoint(config.host, config.port)))
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held


def _pipe(undo: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        undo.callback(os.close, end)
    return ends


class _Place(msgspec.Struct):
    """A worker's channels to the process that started it."""

    seat: Seat
    orders: int  # a pipe: a byte has the meaning of a signal; at its end that process is dead
    says: int  # a pipe: see `_SERVES`
    is_again: bool

    def heed(self, drain: Callable[[], None], end: Callable[[], None]) -> None:
        """Have the running loop call `drain` at the first order, and `end` at the second. SIGTERM drains, but is
        not an order: sent to the whole group, it reaches the parent, too, which then gives one."""
        loop = asyncio.get_running_loop()
        count = 0

        def read() -> None:
            nonlocal count
            told = os.read(self.orders, 16)
            count += len(told)
            drain()
            if count > 1 or not told:  # after a kill, nobody may hold the port, which is about to be served again
                end()
            if not told:
                loop.remove_reader(self.orders)

        loop.add_reader(self.orders, read)
        loop.add_signal_handler(signal.SIGTERM, drain)


class _Worker(msgspec.Struct):
    """A worker process, while it runs and until it is restarted."""

    number: int
    pid: int = 0  # 0: not running
    started_at: float = float("-inf")
    orders: int = -1
    heard: int = -1
    has_served: bool = False  # since the first start
    beat: int = 0
    beat_at: float = 0.0


class _Workers:
    """The process that starts the workers."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._control = config.control or default_proxy()
        self._loads, self._beats, self._uses = (
            memoryview(mmap.mmap(-1, 8 * size)).cast("q") for size in Seat.sizes(config.workers)
        )
        self._clock = WakingClock(2 * AGAIN_S, time.monotonic)
        self._all = [_Worker(number) for number in range(config.workers)]
        self._stopping_at = 0.0
        self._failed = ""  # why it ends

    def run(self) -> None:
        """:raises ConfigError: a worker cannot serve."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the end of a worker would go unnoticed
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one may be pending when signals are unblocked
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        gc.collect()
        gc.freeze()  # keeps the pages of existing objects shared
        try:
            while not self._stopping_at or any(each.pid for each in self._all):
                self._start_due()
                # Not `sigtimedwait`: when a stopped process continues, Python's version returns a signal nobody sent.
                signal.setitimer(signal.ITIMER_REAL, _LOOK_S if self._is_busy else AGAIN_S)
                self._heed(signal.sigwaitinfo(_SIGNALS).si_signo)
                self._end_hung()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for each in self._all:
                if each.pid:
                    os.kill(each.pid, signal.SIGKILL)
                    os.waitpid(each.pid, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if self._failed:
            raise ConfigError(self._failed)

    @property
    def _is_busy(self) -> bool:
        return bool(self._stopping_at) or not all(each.pid for each in self._all)

    def _heed(self, signo: int) -> None:
        if signo in _STOP:
            self._stop()
        while (ended := self._ended()) is not None:
            self._over(*ended)
        if self._stopping_at and time.monotonic() > self._stopping_at + self._config.drain_s + END_S:
            for each in self._all:
                if each.pid:
                    log.warning("worker %d does not end: it is killed", each.number)
                    os.kill(each.pid, signal.SIGKILL)

    def _end_hung(self) -> None:
        now = self._clock()
        for each in self._all:
            beat = self._beats[each.number]
            if beat != each.beat:
                each.beat, each.beat_at = beat, now
            elif each.pid and now - each.beat_at > HUNG_S:
                log.warning("worker %d (process %d) hangs: it is killed", each.number, each.pid)
                os.kill(each.pid, signal.SIGKILL)
                each.beat_at = now

    def _stop(self) -> None:
        self._stopping_at = self._stopping_at or time.monotonic()
        for each in self._all:
            if each.pid:
                with suppress(BrokenPipeError):
                    os.write(each.orders, b"x")

    @staticmethod
    def _ended() -> tuple[int, int] | None:
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                return pid, os.waitstatus_to_exitcode(status)
        return None

    def _over(self, pid: int, status: int) -> None:
        worker = next((each for each in self._all if each.pid == pid), None)
        if worker is None:
            return
        said = os.read(worker.heard, 1 << 12)
        os.close(worker.heard)
        os.close(worker.orders)
        worker.pid = 0
        worker.has_served = worker.has_served or said.startswith(_SERVES)
        self._loads[worker.number] = self._beats[worker.number] = worker.beat = 0
        for used in range(2 + worker.number, len(self._uses), 2 + len(self._all)):
            self._uses[used] = 0
        if self._stopping_at:
            return
        why = said.removeprefix(_SERVES).decode(errors="replace") or f"it ended with status {status}"
        if worker.has_served:
            log.warning("worker %d (process %d) is started again: %s", worker.number, pid, why)
        else:
            self._failed = self._failed or why
            self._stop()

    def _start_due(self) -> None:
        now = time.monotonic()
        for each in self._all:
            if not each.pid and not self._stopping_at and now >= each.started_at + AGAIN_S:
                self._start(each)

    def _start(self, worker: _Worker) -> None:
        worker.started_at, worker.beat_at = time.monotonic(), self._clock()
        sys.stdout.flush()
        sys.stderr.flush()
        with ExitStack() as undo:
            try:
                (orders, worker.orders), (worker.heard, says) = [_pipe(undo) for _ in range(2)]
                os.set_blocking(worker.heard, False)
                worker.pid = os.fork()
            except OSError as error:
                log.warning("worker %d cannot be started now: %s", worker.number, error)
                return
            undo.pop_all()
        if worker.pid:
            os.close(orders)
            os.close(says)
            return
        status = 1
        try:
            for each in self._all:  # otherwise this process's death would go unnoticed
                if each is worker or each.pid:
                    os.close(each.orders)
                    os.close(each.heard)
            status = self._serve(worker, orders, says)
        finally:
            os._exit(status)

    def _serve(self, worker: _Worker, orders: int, says: int) -> int:
        """Runs in the worker."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, and the parent passes it on
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        number = worker.number
        logs.name_worker(number)
        if number:  # only the first worker logs who came and went
            logging.getLogger("pdx.proxy.engines").setLevel(logging.WARNING)
        config = msgspec.structs.replace(
            self._config,
            control=worker_address(self._control, number),
            admin=worker_address(self._config.admin, number),
        )
        try:
            seat = Seat(number, self._loads, self._beats, self._uses)
            asyncio.run(serve(config, _Place(seat, orders, says, worker.has_served)))
        except (PdxError, OSError) as error:
            os.write(says, str(error).encode()[:4000])
            return 1
        except BaseException:  # noqa: BLE001 - the root of the process
            traceback.print_exc()
            return 1
        return 0
