"""The socket that peers dial: bound at one address, this user's alone or behind CURVE keys. It never blocks.

With keys it answers ZMQ's ZAP questions. Every message has its sender's admitted key as its User-Id, so that the reader
looks up the owner in the roster each time, and a key that is removed from the roster is void from then on.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Container

import msgspec
import zmq

from pdx.config import private_folder, socket_path
from pdx.errors import ConfigError, PdxError, ProtocolError
from pdx.security import descriptors
from pdx.security.accept_queue import AcceptQueue
from pdx.security.address import needs_ipv6, tcp_endpoint
from pdx.security.curve_keys import KeyPair, secure_client
from pdx.security.gate import Gate
from pdx.security.socket_lock import owned, remove_socket
from pdx.security.tcp_filter import TcpFilter
from pdx.wire.messages import MAX_FRAME_BYTES
from pdx.wire.proxy import PeerEntry

GONE = "its connection is gone"
_RECONNECT_MS = 1000  # at most, between ZMQ's attempts to reach a dialled peer
HIGH_WATER = 1024  # messages a peer may leave unread


class Arrival(msgspec.Struct, frozen=True):
    """One incoming frame; `key`: with which its sender was admitted, empty without CURVE."""

    route: bytes
    frame: bytes
    key: str


class PeerSocket:
    """A bound ROUTER, with keys only one per context. Open from construction to `close`. Not thread-safe."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listen: str,
        *,
        own: KeyPair | None,
        admits: Container[str],
        timeout_s: float,
        taken: PdxError,
        counters: Counter[str],
    ) -> None:
        """`admits`: public keys to admit, if there are keys. Refusals are counted as `peers_denied`. `taken`: raised if
        another process owns the path of a Unix socket.

        :raises ConfigError: the address cannot be bound.
        """
        self._counters = counters
        with contextlib.ExitStack() as undo:
            if listen.startswith("ipc://"):
                path = socket_path(listen)
                private_folder(path.parent)
                undo.enter_context(owned(path, lambda _: taken))
                remove_socket(path)
            self._filter: TcpFilter | None = None
            if listen.startswith("tcp://"):
                try:
                    self._filter = TcpFilter(*tcp_endpoint(listen), young_s=timeout_s, counters=counters)
                except OSError as error:
                    raise ConfigError(f"cannot listen for peers at {listen!r}: {error}") from error
                undo.callback(self._filter.close)
            self._gate: Gate | None = None
            if own is not None:
                filters = [self._filter] if self._filter is not None else []
                self._gate = Gate(context, own, admits=admits, counters=counters, filters=filters)
                undo.callback(self._gate.close)
            self.router = undo.enter_context(context.socket(zmq.ROUTER))
            limit(self.router, timeout_s)
            self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that `send` fails if a peer is gone or does not read
            if self._gate is not None:
                self._gate.guard(self.router)
            self._queue: AcceptQueue | None = None
            if listen.startswith("ipc://"):
                for user in (os.getuid(), 0):  # checked by the kernel, whatever the folder's mode has become
                    self.router.setsockopt(zmq.IPC_FILTER_UID, user)
                self._queue = undo.enter_context(self._queue_at(listen))
            elif self._filter is not None:
                try:
                    self._filter.bind(self.router)
                except zmq.ZMQError as error:
                    raise ConfigError(f"cannot listen for peers at {listen!r}: {error}") from error
            self.address = self._filter.address if self._filter is not None else listen
            self._undo = undo.pop_all()

    def prove(self, own: KeyPair, poller: zmq.Poller) -> None:
        """Prove another key to new connections from now on. `poller` has `sources`.

        :raises ConfigError: the address cannot be bound anew, e.g. for lack of a descriptor; call it again.
        """
        assert self._gate is not None, "there are no keys"
        if descriptors.left() < descriptors.reserve() // 4:  # else each try would use up some, or end the process
            raise ConfigError("too few file descriptors are left (ulimit -n)")
        self._gate.prove(own)
        self._gate.guard(self.router)
        try:
            if self._filter is not None:
                self._filter.bind(self.router)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"cannot listen for peers at {self.address!r} any more: {error}") from error
        if self._filter is None:
            if self._queue is not None:
                poller.unregister(self.fd)
                self._queue.close()
                self._queue = None
            self._queue = self._undo.enter_context(self._queue_at(self.address))
            poller.register(self.fd, zmq.POLLIN)

    def _queue_at(self, address: str) -> contextlib.closing[AcceptQueue]:
        return contextlib.closing(AcceptQueue(socket_path(address), self.router, self._counters))

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll, while it is open."""
        both = (self.router, self._gate.socket if self._gate is not None else None)
        return [socket for socket in both if socket is not None and not socket.closed]

    @property
    def sources(self) -> list[zmq.Socket[bytes] | int]:
        """`sockets`, and `fd`."""
        return [*self.sockets, self.fd] if self.sockets and self.fd >= 0 else [*self.sockets]

    @property
    def is_waited_for(self) -> bool:
        """Whether a message has come that was not received yet."""
        return any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in self.sockets)

    @property
    def fd(self) -> int:
        """The descriptor to poll, too: connections wait there for `admit_waiting`. -1: there is none."""
        return self._queue.fd if self._queue is not None else -1

    def admit_waiting(self) -> bool:
        return self._queue is not None and self._queue.admit_waiting()

    def answer_zap(self, socket: object) -> bool:
        """Answer ZMQ's waiting ZAP questions; False: `socket` is not the one at which ZMQ asks."""
        if self._gate is None or socket is not self._gate.socket:
            return False
        self._gate.answer()
        return True

    def receive(self) -> Arrival | None:
        """The next message; None: there is none. :raises ProtocolError: it is not one frame."""
        return receive(self.router, routed=True, keyed=self._gate is not None)

    def post(self, route: bytes, frame: bytes) -> str:
        """Send without waiting; return why that failed, empty if it did not."""
        return post(self.router, route, frame)

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop listening; posted messages have `linger_ms` to leave while the context ends. Idempotent."""
        if not self.router.closed:
            self.router.setsockopt(zmq.LINGER, linger_ms)
        self._undo.close()


def dialled(
    context: zmq.Context[zmq.Socket[bytes]], peer: PeerEntry, own: KeyPair | None, timeout_s: float
) -> zmq.Socket[bytes]:
    """A socket that connects to this peer.

    :raises ConfigError: the peer has a key and this node has none, or the other way round, or its address is invalid.
    """
    try:
        with contextlib.ExitStack() as undo:
            socket = undo.enter_context(context.socket(zmq.DEALER))
            limit(socket, timeout_s)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            socket.setsockopt(zmq.IPV6, int(needs_ipv6(peer.address)))
            secure_client(socket, own=own, server_key=peer.public_key)
            socket.connect(peer.address)
            undo.pop_all()
            return socket
    except (ConfigError, zmq.ZMQError) as error:
        raise ConfigError(f"peer {peer.name!r} at {peer.address!r}: {error}") from error


def post(socket: zmq.Socket[bytes], route: bytes, frame: bytes) -> str:
    """Send without waiting, with a route by a ROUTER; return why that failed, empty if it did not."""
    try:
        socket.send_multipart([route, frame] if route else [frame], zmq.NOBLOCK)
    except zmq.Again:
        return "it does not read what it is sent"
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return GONE
    return ""


def receive(socket: zmq.Socket[bytes], *, routed: bool = False, keyed: bool = False) -> Arrival | None:
    """The next message; None: there is none. `routed`: at a ROUTER; `keyed`: behind a `Gate`.

    :raises ProtocolError: it is not one frame.
    """
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    route = frames.pop(0).bytes if routed else b""
    if len(frames) != 1:
        raise ProtocolError(f"{len(frames)} frames instead of one")
    return Arrival(route, frames[0].bytes, str(frames[0].get("User-Id")) if keyed else "")


def limit(socket: zmq.Socket[bytes], timeout_s: float) -> None:
    """Set the limits of every socket between nodes: unread messages, size of a message, duration of a handshake."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.HANDSHAKE_IVL, max(1, round(timeout_s * 1000))),
    ):
        socket.setsockopt(option, value)
