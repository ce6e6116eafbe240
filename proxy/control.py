"""The ZMQ socket nodes report to. It takes `NodeReport`s in and sends `Cancel`s out to every node heard of.

The socket is plain, not asyncio's: a `Cancel` must go out from a request that is itself being cancelled, where
nothing can be awaited. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable

import zmq

from pdx import messages
from pdx.config import private_folder, socket_path
from pdx.errors import ConfigError, ProtocolError
from pdx.messages import Cancel, NodeReport

log = logging.getLogger(__name__)

MAX_PEERS = 1024
_BATCH = 256  # messages taken in before other work gets its turn


class Control:
    """A bound ROUTER socket; `start` acquires, `close` (idempotent) releases."""

    def __init__(
        self,
        address: str,
        *,
        on_report: Callable[[NodeReport], None],
        on_drop: Callable[[str], None],
    ) -> None:
        self.address = address
        self._path = socket_path(address)
        self._on_report = on_report
        self._on_drop = on_drop
        self._peers: dict[bytes, None] = {}  # in the order last heard of
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._lock_fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"Control({self.address!r}, {len(self._peers)} peers, {'open' if self._socket else 'closed'})"

    def start(self) -> None:
        """Bind, and listen on the running loop.

        :raises ConfigError: the folder is not private, or another proxy owns the address.
        """
        private_folder(self._path.parent)
        self._lock_fd = _own(f"{self._path}.lock", self.address)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a peer is gone, to forget it
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {self.address!r}: {error}") from error
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
            self._socket = None
            self._path.unlink(missing_ok=True)
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def cancel(self, transfer: str) -> None:
        """Tell all nodes, without waiting; a node that cannot take the message gives up by its own deadline."""
        if self._socket is None:
            return
        frame = messages.encode(Cancel(transfer=transfer))
        for peer in list(self._peers):
            try:
                self._socket.send_multipart([peer, frame], flags=zmq.NOBLOCK)
            except zmq.Again:
                self._on_drop("peer_full")
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                del self._peers[peer]
        # Sending can use up the edge on which the loop would have been told of incoming messages.
        if self._loop is not None:
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        for _ in range(_BATCH):
            if self._socket is None:
                return
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        if self._loop is not None:
            self._loop.call_soon(self._drain)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self._on_drop("malformed")
            return
        peer, frame = frames
        try:
            report = messages.decode_to_proxy(frame)
        except ProtocolError as error:
            log.debug("a control message was dropped: %s", error)
            self._on_drop("malformed")
            return
        if report.version != messages.VERSION:
            self._on_drop("version")
            return
        self._peers.pop(peer, None)
        self._peers[peer] = None
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        self._on_report(report)


def _own(path: str, address: str) -> int:
    """A lock held while this process lives: a second bind would silently take the socket's place."""
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise ConfigError(f"another proxy listens on {address!r}; name another control address") from None
    return lock_fd
