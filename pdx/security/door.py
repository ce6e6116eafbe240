"""The socket that peers dial: bound at one address, this user's alone or behind CURVE keys. It never blocks."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq

from pdx.config import private_folder, socket_path
from pdx.errors import ConfigError, PdxError, ProtocolError
from pdx.security.address import tcp_endpoint
from pdx.security.authenticator import Gate, user_of
from pdx.security.curve_keys import KeyPair, secure_server
from pdx.security.entry import Entry
from pdx.security.front import Front
from pdx.security.socket_lock import owned, remove_socket
from pdx.wire.messages import MAX_FRAME_BYTES

GONE = "its connection is gone"
HIGH_WATER = 1024  # messages a peer may leave unread
_BACKLOG = 4  # what the front has passed on and ZMQ not taken yet is not counted among the descriptors in use


class Arrival(msgspec.Struct, frozen=True):
    """One frame that came in; `key` is what its sender was let in with, empty without CURVE."""

    route: bytes
    frame: bytes
    key: str


class Door:
    """A bound ROUTER and, with keys, the gate before it: one to a context. Open from construction to `close`."""

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
        """`admits`: whether a public key may come in; asked only if there are keys. `taken`: see `socket_lock.owned`.

        :raises ConfigError: the address cannot be had.
        :raises PdxError: another process owns the path of a Unix socket: what `taken` makes.
        """
        self._has_keys = own is not None
        with contextlib.ExitStack() as undo:
            if listen.startswith("ipc://"):
                path = socket_path(listen)
                private_folder(path.parent)
                undo.enter_context(owned(path, taken))
                remove_socket(path)
            self._front = self._new_front(listen, timeout_s, counters) if listen.startswith("tcp://") else None
            if self._front is not None:
                undo.callback(self._front.close)
            whence = self._front.newcomers if self._front is not None else list
            self._gate = Gate(context, admits=admits, whence=whence, counters=counters) if own is not None else None
            if self._gate is not None:
                undo.callback(self._gate.close)
            self._router = undo.enter_context(context.socket(zmq.ROUTER))
            limit(self._router, timeout_s)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a peer is gone, or does not read
            if own is not None:
                secure_server(self._router, own)
            self._entry: Entry | None = None
            if listen.startswith("ipc://"):
                for user in (os.getuid(), 0):  # by the kernel's word, whatever the folder's mode has become
                    self._router.setsockopt(zmq.IPC_FILTER_UID, user)
                self._entry = undo.enter_context(contextlib.closing(Entry(socket_path(listen), self._router, counters)))
            else:
                self._bind(listen)
            self.address = self._front.address if self._front is not None else listen
            self._undo = undo.pop_all()

    def __repr__(self) -> str:
        return f"<Door at {self.address}{', behind keys' if self._has_keys else ''}>"

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those to be polled, while it is open."""
        gate = [self._gate.socket] if self._gate is not None else []
        return [socket for socket in (self._router, *gate) if not socket.closed]

    @property
    def is_waited_for(self) -> bool:
        """Something came that was not taken yet."""
        return any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in self.sockets)

    @property
    def fd(self) -> int:
        """To be polled, too: who connects waits for `heed`. -1: nobody ever does."""
        return self._entry.fd if self._entry is not None else -1

    def heed(self) -> bool:
        """See `Entry.heed`."""
        return self._entry is not None and self._entry.heed()

    def answer_gate(self, socket: object) -> bool:
        """Let in, or not, who waits at the gate; False: this is not the gate's socket."""
        if self._gate is None or socket is not self._gate.socket:
            return False
        self._gate.serve()
        return True

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
        return Arrival(route.bytes, frames[0].bytes, user_of(frames[0]) if self._has_keys else "")

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

    def _new_front(self, listen: str, timeout_s: float, counters: Counter[str]) -> Front:
        host, port = tcp_endpoint(listen)
        try:
            return Front(host, port, young_s=timeout_s, counters=counters)
        except OSError as error:
            raise ConfigError(f"cannot listen for peers at {listen!r}: {error}") from error

    def _bind(self, listen: str) -> None:
        assert self._front is not None
        mask = os.umask(0o177)
        try:
            self._router.setsockopt(zmq.BACKLOG, _BACKLOG)
            self._router.bind(self._front.inner)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen for peers at {listen!r}: {error}") from error
        finally:
            os.umask(mask)
        self._front.start()


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
