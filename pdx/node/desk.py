"""The socket that processes of this host attach to: this user's alone, and safe from running out of descriptors.

ZMQ ends the whole process where it has no descriptor left for a connection to a Unix socket. So the socket's listening
half belongs to the node, which takes it away from ZMQ while descriptors are short.
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
        self._counters = counters
        self._is_open = True
        with contextlib.ExitStack() as undo:
            self._nobody = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._listening = undo.enter_context(socket.socket(socket.AF_UNIX))
            mask = os.umask(0o177)
            try:
                nobody = path.with_name(f"{path.name}.nobody")
                nobody.unlink(missing_ok=True)
                self._listen(self._nobody, nobody)
                nobody.unlink()  # without a name nobody ever connects to it
                self._listen(self._listening, path)
            except OSError as error:
                raise ConfigError(f"cannot listen at {path}: {error}") from error
            finally:
                os.umask(mask)
            undo.callback(path.unlink, missing_ok=True)
            self.fd = self._listening.fileno()
            self.socket = undo.enter_context(context.socket(zmq.ROUTER))
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self._handed = os.dup(self.fd)
            self.socket.setsockopt(zmq.USE_FD, self._handed)
            self.socket.bind(f"ipc://{path}")
            undo.callback(self._open)  # ZMQ gives back what it was handed, or ends the process
            self._undo = undo.pop_all()

    @staticmethod
    def _listen(made: socket.socket, path: Path) -> None:
        made.setblocking(False)
        made.bind(str(path))
        made.listen(_BACKLOG)

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
        """Take no connections while descriptors are short; call it whenever something happened, above all when `fd`
        can be read: then somebody connects."""
        left, reserve = descriptors.left(), descriptors.reserve()
        if self._is_open and left < reserve:
            self._shut()
            self._counters["descriptors_short"] += 1
            log.warning(
                "%d of %d file descriptors are left: no process is let in until there are more (ulimit -n)",
                left,
                descriptors.limit(),
            )
        elif not self._is_open and left > reserve + reserve // 4:
            self._open()
        if not self._is_open:
            self._turn_away()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        self._undo.close()

    # `unbind` would end the connections that there are. So the descriptor that ZMQ listens at is made to mean another
    # socket for a while, at which nobody ever connects.

    def _shut(self) -> None:
        self._is_open = False
        os.dup2(self._nobody.fileno(), self._handed, inheritable=False)

    def _open(self) -> None:
        self._is_open = True
        os.dup2(self.fd, self._handed, inheritable=False)

    def _turn_away(self) -> None:
        """Close what connects: processes try again."""
        with contextlib.suppress(OSError):
            while True:
                self._listening.accept()[0].close()
