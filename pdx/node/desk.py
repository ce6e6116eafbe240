"""The socket that processes of this host attach to: this user's alone, and safe from running out of descriptors.

ZMQ ends the whole process where it has no descriptor left for a connection to a Unix socket. So the socket's listening
half belongs to the node, which takes it away from ZMQ while descriptors are short: the kernel lets processes wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter
from pathlib import Path

import msgspec
import zmq

from pdx import descriptors
from pdx.errors import ConfigError
from pdx.messages import MAX_FRAME_BYTES

log = logging.getLogger("pdx.node")

_BACKLOG = 128


class Delivery(msgspec.Struct, frozen=True):
    """What one process sent."""

    route: bytes
    frames: list[zmq.Frame]

    @property
    def pid(self) -> int:
        """The process that connected, by the kernel's word when it did; 0: it is not seen from here."""
        try:  # ZMQ says host:user:group:process
            return int(str(self.frames[0].get("Peer-Address")).rpartition(":")[2])
        except (IndexError, ValueError, zmq.ZMQError):
            return 0


class Desk:
    """A bound ROUTER. Open from construction to `close`, which removes the path. Never blocks. One thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, counters: Counter[str]) -> None:
        """`path` must be free, and this process its owner (`pdx.ownership`).

        :raises ConfigError: it cannot be listened at.
        """
        self._address = f"ipc://{path}"
        self._counters = counters
        self._pids: dict[bytes, int] = {}
        self._is_open = False
        with contextlib.ExitStack() as undo:
            self._listening = undo.enter_context(socket.socket(socket.AF_UNIX))
            mask = os.umask(0o177)
            try:
                self._listening.bind(str(path))
            except OSError as error:
                raise ConfigError(f"cannot listen at {path}: {error}") from error
            finally:
                os.umask(mask)
            undo.callback(path.unlink, missing_ok=True)
            self._listening.listen(_BACKLOG)
            self.socket = undo.enter_context(context.socket(zmq.ROUTER))
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self.comings = self._watch_comings(context, undo)
            self._open()
            self._undo = undo.pop_all()

    def _watch_comings(self, context: zmq.Context[zmq.Socket[bytes]], undo: contextlib.ExitStack) -> zmq.Socket[bytes]:
        """A socket that can be read whenever a process has connected."""
        name = f"inproc://comings-{id(self)}"
        self.socket.monitor(name, zmq.EVENT_ACCEPTED)
        undo.callback(self.socket.disable_monitor)
        comings = undo.enter_context(context.socket(zmq.PAIR))
        comings.setsockopt(zmq.LINGER, 0)
        comings.setsockopt(zmq.RCVHWM, 0)  # else ZMQ's thread would wait for this one
        comings.connect(name)
        return comings

    def receive(self) -> Delivery | None:
        """What came next, None if nothing did. Who has connected meanwhile is not kept waiting by who sends much."""
        # Asking for events makes ZMQ look for new senders; `recv` alone does so at each hundredth message.
        if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        try:
            route, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return Delivery(route.bytes, frames)

    def send(self, route: bytes, frame: bytes) -> None:
        """Send without waiting; dropped if that process does not read, or is gone."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([route, frame], zmq.NOBLOCK)

    def heed_descriptors(self) -> None:
        """Stop taking connections while descriptors are short; call it whenever something happened."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.comings.recv_multipart(zmq.NOBLOCK)
        left, reserve = descriptors.left(), descriptors.reserve()
        if self._is_open and left < reserve:
            self._is_open = False
            self.socket.unbind(self._address)
            self._counters["descriptors_short"] += 1
            log.warning(
                "%d of %d file descriptors are left: no process is let in until there are more (ulimit -n)",
                left,
                descriptors.limit(),
            )
        elif not self._is_open and left > reserve + reserve // 4:
            self._open()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        self._undo.close()

    def _open(self) -> None:
        self.socket.setsockopt(zmq.USE_FD, os.dup(self._listening.fileno()))
        self.socket.bind(self._address)
        self._is_open = True
