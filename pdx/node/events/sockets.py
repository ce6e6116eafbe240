"""The sockets at which a node publishes events, and who may read there.

A Unix socket is this user's alone, and a port of the loopback is open to every user of this host. Beyond this host
readers need a key that the roster lets in; or nobody needs one, where that was said.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq

from pdx.config import private_folder, socket_path
from pdx.errors import ConfigError
from pdx.security.address import address_host, check_address, is_loopback, tcp_endpoint
from pdx.security.curve_keys import KeyPair
from pdx.security.gate import Gate
from pdx.security.socket_lock import owned, remove_socket
from pdx.security.tcp_filter import TcpFilter

HIGH_WATER = 1000  # messages that a subscriber may leave unread: of a minute …
REPLAY_HIGH_WATER = 16  # … and of a replay; of large ones one, see `Publisher`
_MAX_BYTES = 1024  # of what comes in: topics and numbers …
# … and of all that one connection sends: ZMQ keeps each topic, in thirty times its bytes and without any bound.
_MOST_BYTES, _REPLAY_MOST_BYTES = 8 << 10, 64 << 10


class Readers(msgspec.Struct, frozen=True):
    """Who may read beyond this host: who has a public key that is one of `listeners`, asked on the publisher's thread,
    while the node proves its `own`; or, where it `is_open`, whoever gets there. A connection has `handshake_s`."""

    own: KeyPair | None = None
    listeners: Callable[[], frozenset[str]] = frozenset
    is_open: bool = False
    handshake_s: float = 5.0

    def __contains__(self, key: object) -> bool:
        return key in self.listeners()


class EventSockets:
    """Open from construction to `close`. Made on one thread, used on another one."""

    def __init__(self, address: str, replay: str, readers: Readers, counters: Counter[str]) -> None:
        """`replay`: see `Publisher`; empty: there is no such socket.

        :raises ConfigError: an address is none, or cannot be had, or is beyond this host, where there are no keys.
        """
        self._readers = readers
        self._counters = counters
        self._let_in = readers.listeners()
        self._filters: list[TcpFilter] = []  # of sockets behind keys
        with contextlib.ExitStack() as undo:
            context: zmq.Context[zmq.Socket[bytes]] = undo.enter_context(zmq.Context())
            self._gate: Gate | None = None
            if readers.own is not None and not readers.is_open:
                self._gate = Gate(context, readers.own, admits=readers, counters=counters, filters=self._filters)
                undo.callback(self._gate.close)
            self.pub = undo.enter_context(context.socket(zmq.XPUB))
            self.pub.setsockopt(zmq.SNDHWM, HIGH_WATER)
            self.address = self._bind(self.pub, address, "--events", _MOST_BYTES, undo)
            self.router: zmq.Socket[bytes] | None = None
            self.replay = ""
            if replay:
                self.router = undo.enter_context(context.socket(zmq.ROUTER))
                self.router.setsockopt(zmq.SNDHWM, REPLAY_HIGH_WATER)
                self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay = self._bind(self.router, replay, "--events-replay", _REPLAY_MOST_BYTES, undo)
            self._undo = undo.pop_all()

    @property
    def all(self) -> list[zmq.Socket[bytes]]:
        """Those to be polled."""
        both = (self.router, self._gate.socket if self._gate is not None else None)
        return [self.pub, *(each for each in both if each is not None)]

    def heed(self) -> None:
        """Let in who may, and end the connections where somebody may not any more: who still may dials again, and asks
        for what it has missed."""
        if self._gate is None:
            return
        self._gate.answer()
        listeners = self._readers.listeners()
        if listeners is not self._let_in:
            if self._let_in - listeners:
                for each in self._filters:
                    each.drop()
            self._let_in = listeners

    def close(self) -> None:
        """Idempotent."""
        self._undo.close()

    def _bind(
        self, socket: zmq.Socket[bytes], address: str, option: str, most_bytes: int, undo: contextlib.ExitStack
    ) -> str:
        """Where it listens then. `most_bytes`: what a connection to a port may send in all."""
        for number, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, _MAX_BYTES),
            (zmq.HANDSHAKE_IVL, max(1, round(self._readers.handshake_s * 1000))),
        ):
            socket.setsockopt(number, value)
        try:
            check_address(address, has_keys=True, listens=True)
        except ConfigError as error:
            raise ConfigError(f"{option} {error}") from error
        is_beyond = not is_loopback(address_host(address))
        if is_beyond and self._gate is None and not self._readers.is_open:
            raise ConfigError(
                f"{option} {address!r} is beyond this host, where readers need keys: give the node --keys and --roster "
                "(see `pdx keygen`), or let whoever gets there read (--events-open)"
            )
        try:
            if address.startswith("ipc://"):
                return self._bind_path(socket, address, option, undo)
            return self._bind_port(socket, address, most_bytes, undo, is_beyond=is_beyond)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"{option} {address}: {error}") from error

    def _bind_path(self, socket: zmq.Socket[bytes], address: str, option: str, undo: contextlib.ExitStack) -> str:
        path = socket_path(address)
        private_folder(path.parent)
        undo.enter_context(owned(path, lambda owner: ConfigError(f"{option} {address}: process {owner} listens there")))
        remove_socket(path)
        undo.callback(path.unlink, missing_ok=True)
        mask = os.umask(0o177)
        try:
            socket.bind(address)
        finally:
            os.umask(mask)
        return address

    def _bind_port(
        self, socket: zmq.Socket[bytes], address: str, most_bytes: int, undo: contextlib.ExitStack, *, is_beyond: bool
    ) -> str:
        in_front = TcpFilter(
            *tcp_endpoint(address),
            young_s=self._readers.handshake_s,
            counters=self._counters,
            most_bytes=most_bytes,
        )
        undo.callback(in_front.close)
        if self._gate is not None and is_beyond:
            self._gate.guard(socket)
            self._filters.append(in_front)
        in_front.bind(socket)
        return in_front.address
