"""The socket that peers dial: bound at one address, this user's alone or behind CURVE keys. It never blocks.

With keys it answers ZMQ's ZAP questions, who may connect. A key that is admitted comes with every message as its
User-Id, so whoever reads a message asks the roster anew whose key that is, and a key that was taken from the roster is
worth nothing from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils import z85

from pdx.config import private_folder, socket_path
from pdx.errors import ConfigError, PdxError, ProtocolError
from pdx.security.accept_queue import AcceptQueue
from pdx.security.address import tcp_endpoint
from pdx.security.curve_keys import KeyPair
from pdx.security.socket_lock import owned, remove_socket
from pdx.security.tcp_filter import TcpFilter
from pdx.wire.messages import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

GONE = "its connection is gone"
HIGH_WATER = 1024  # messages a peer may leave unread
_BACKLOG = 4  # what the filter has passed on and ZMQ not taken yet is not counted among the descriptors in use
_ZAP = "inproc://zeromq.zap.01"  # ZMQ asks there
_DOMAIN = b"pdx"  # of ZAP
_BURST = 64  # questions answered at a time
_MAX_WARNED = 1024  # keys; more are counted only


class Arrival(msgspec.Struct, frozen=True):
    """One frame that came in; `key` is what its sender was let in with, empty without CURVE."""

    route: bytes
    frame: bytes
    key: str


class PeerSocket:
    """A bound ROUTER, with keys one to a context. Open from construction to `close`. All calls on one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listen: str,
        *,
        own: KeyPair | None,
        admits: Callable[[str], bool],
        timeout_s: float,
        taken: Callable[[str], PdxError],
        counters: Counter[str],
    ) -> None:
        """`admits`: whether a public key may come in; asked only if there are keys. Refusals are counted as
        `peers_denied`. `taken`: see `socket_lock.owned`.

        :raises ConfigError: the address cannot be had.
        :raises PdxError: another process owns the path of a Unix socket: what `taken` makes.
        """
        self._admits = admits
        self._counters = counters
        self._warned: set[str] = set()
        with contextlib.ExitStack() as undo:
            if listen.startswith("ipc://"):
                path = socket_path(listen)
                private_folder(path.parent)
                undo.enter_context(owned(path, taken))
                remove_socket(path)
            self._filter = self._new_filter(listen, timeout_s, counters) if listen.startswith("tcp://") else None
            if self._filter is not None:
                undo.callback(self._filter.close)
            self._zap: zmq.Socket[bytes] | None = None
            if own is not None:
                self._zap = undo.enter_context(context.socket(zmq.REP))
                self._zap.setsockopt(zmq.LINGER, 0)
                self._zap.bind(_ZAP)
            self._router = undo.enter_context(context.socket(zmq.ROUTER))
            limit(self._router, timeout_s)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a peer is gone, or does not read
            if own is not None:
                own.show(self._router)
                self._router.setsockopt(zmq.CURVE_SERVER, 1)
                self._router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
                self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._queue: AcceptQueue | None = None
            if listen.startswith("ipc://"):
                for user in (os.getuid(), 0):  # by the kernel's word, whatever the folder's mode has become
                    self._router.setsockopt(zmq.IPC_FILTER_UID, user)
                self._queue = undo.enter_context(
                    contextlib.closing(AcceptQueue(socket_path(listen), self._router, counters))
                )
            else:
                self._bind(listen)
            self.address = self._filter.address if self._filter is not None else listen
            self._undo = undo.pop_all()

    def __repr__(self) -> str:
        return f"<PeerSocket at {self.address}{', behind keys' if self._zap else ''}>"

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those to be polled, while it is open."""
        return [socket for socket in (self._router, self._zap) if socket is not None and not socket.closed]

    @property
    def is_waited_for(self) -> bool:
        """Something came that was not taken yet."""
        return any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in self.sockets)

    @property
    def fd(self) -> int:
        """To be polled, too: who connects waits for `heed`. -1: nobody ever does."""
        return self._queue.fd if self._queue is not None else -1

    def heed(self) -> bool:
        """See `AcceptQueue.heed`."""
        return self._queue is not None and self._queue.heed()

    def answer_zap(self, socket: object) -> bool:
        """Let in, or not, who waits before the keys; False: this is not the socket at which ZMQ asks."""
        if self._zap is None or socket is not self._zap:
            return False
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                question = self._zap.recv_multipart(zmq.NOBLOCK)
                self._zap.send_multipart(self._answer(question), zmq.NOBLOCK)
        return True

    def _answer(self, question: list[bytes]) -> list[bytes]:
        # version, request, domain, address, identity, mechanism, credentials; only ZMQ itself can reach this socket
        version, request, domain, address, _, mechanism, *credentials = question
        who = mechanism.decode("ascii", "replace")
        if domain == _DOMAIN and mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            who = z85.encode(credentials[0]).decode("ascii")
            if self._admits(who):
                return [version, request, b"200", b"OK", who.encode(), b""]
        self._counters["peers_denied"] += 1
        if who not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(who)
            known = self._filter.newcomers()[:4] if self._filter is not None else []
            where = " or ".join(known) or address.decode("ascii", "replace")
            log.warning("%s at %s is not in the roster and was not let in", who, where)
        # 300: for now. After 400 ZMQ would never try again, though tomorrow the roster may have that key.
        return [version, request, b"300", b"not in the roster", b"", b""]

    def receive(self) -> Arrival | None:
        """What came next, None if nothing did.

        :raises ProtocolError: it is not one frame.
        """
        try:
            route, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames instead of one")
        return Arrival(route.bytes, frames[0].bytes, str(frames[0].get("User-Id")) if self._zap is not None else "")

    def post(self, route: bytes, frame: bytes) -> str:
        """Send without waiting; what was wrong, empty if nothing."""
        try:
            self._router.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.Again:
            return "it does not read what it is sent"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return GONE
        return ""

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop listening; what was posted has `linger_ms` to leave, while the context ends. Idempotent."""
        if not self._router.closed:
            self._router.setsockopt(zmq.LINGER, linger_ms)
        self._undo.close()

    def _new_filter(self, listen: str, timeout_s: float, counters: Counter[str]) -> TcpFilter:
        host, port = tcp_endpoint(listen)
        try:
            return TcpFilter(host, port, young_s=timeout_s, counters=counters)
        except OSError as error:
            raise ConfigError(f"cannot listen for peers at {listen!r}: {error}") from error

    def _bind(self, listen: str) -> None:
        assert self._filter is not None
        mask = os.umask(0o177)
        try:
            self._router.setsockopt(zmq.BACKLOG, _BACKLOG)
            self._router.bind(self._filter.inner)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen for peers at {listen!r}: {error}") from error
        finally:
            os.umask(mask)
        self._filter.start()


def limit(socket: zmq.Socket[bytes], timeout_s: float) -> None:
    """Bounds of every socket between nodes: what waits unread, how long a message and a handshake may be."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.HANDSHAKE_IVL, max(1, round(timeout_s * 1000))),
    ):
        socket.setsockopt(option, value)
