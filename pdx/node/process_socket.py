"""The socket to which processes of this host attach, open to this user only."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import zmq

from pdx.security.accept_queue import AcceptQueue
from pdx.wire.messages import MAX_FRAME_BYTES


def sender_pid(frames: list[zmq.Frame]) -> int:
    """The pid of the process that connected, as the kernel reported it then; 0: it is not visible from here."""
    try:  # ZMQ's form is host:user:group:process
        return int(str(frames[0].get("Peer-Address")).rpartition(":")[2])
    except (IndexError, ValueError, zmq.ZMQError):
        return 0


class ProcessSocket:
    """A bound ROUTER. Open from construction to `close`, which removes the path. Not thread-safe."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, counters: Counter[str]) -> None:
        """`path` must be free, and this process its owner (`pdx.security.socket_lock`).

        :raises ConfigError: it cannot be bound.
        """
        with contextlib.ExitStack() as undo:
            self.socket = undo.enter_context(context.socket(zmq.ROUTER))
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer that does not fit is an error
            self.queue = undo.enter_context(contextlib.closing(AcceptQueue(path, self.socket, counters)))
            self._undo = undo.pop_all()

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """The route and frames of the next message; None: there is none. New senders do not wait behind busy ones."""
        # Asking for events makes ZMQ look for new senders; `recv` alone does so only every hundredth message.
        if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        try:
            route, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return route.bytes, frames

    def send(self, route: bytes, frame: bytes) -> bool:
        """Send without waiting; False: that process has left a thousand answers unread, or is gone."""
        try:
            self.socket.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self) -> None:
        """Stop accepting processes. Idempotent."""
        self._undo.close()
