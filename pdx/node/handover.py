"""Hands over the handle of a node's GPU memory on a Unix socket, one message each way; `pdx.cuda.arena` is the client.

The process shows the ticket from its welcome (`pdx.wire.messages.Welcome`). The node checks the peer credentials that
the kernel reports, and sends the handle, with the memory's file descriptor if there is one. The socket preserves
message boundaries (SOCK_SEQPACKET), so one bounded message is all there is to parse.
"""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import msgspec
import zmq

from pdx.cuda.memory import DeviceMemory
from pdx.errors import GpuError
from pdx.node.sessions import TICKET_BYTES, Sessions
from pdx.security.unix_peer import peer_of
from pdx.telemetry.env import Env

MAX_UNPROVED = 16  # connections without a ticket so far; further ones wait in the backlog
MAX_OF_ONE_PROCESS = 4
TIMEOUT_S = 1.0  # for a connection to show its ticket
_BACKLOG = 256


class _Asker(msgspec.Struct):
    """A connection that has not shown its ticket yet."""

    stream: socket.socket
    pid: int
    deadline: float


class HandoverServer:
    """The node's side. Owned by its control loop; nothing blocks, nothing raises."""

    def __init__(self, path: Path, sessions: Sessions, memory: DeviceMemory, poller: zmq.Poller, env: Env) -> None:
        """`path` must be free. The owner of `poller` calls `serve` when a descriptor is readable."""
        self.path = path
        self._sessions = sessions
        self._memory = memory
        self._poller = poller
        self._env = env
        self._askers: dict[int, _Asker] = {}  # by file descriptor
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._is_listening = False
        try:
            self._listener.bind(str(path))
            path.chmod(0o600)
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listen()

    def serve(self, fd: int) -> bool:
        """Handle a readable descriptor; False: it is not this server's."""
        if fd == self._listener.fileno():
            self._accept()
            return True
        asker = self._askers.get(fd)
        if asker is None:
            return False
        self._answer(asker)
        return True

    def tick(self) -> None:
        """Close connections that have shown no ticket in time; call it a few times a second."""
        now = self._env.clock()
        for asker in [asker for asker in self._askers.values() if asker.deadline <= now]:
            self._refuse(asker, f"no ticket within {TIMEOUT_S:g} s")
        self._listen()

    def close(self) -> None:
        """Close everything and remove the socket. Idempotent."""
        for asker in list(self._askers.values()):
            self._end(asker)
        if self._listener.fileno() >= 0:
            if self._is_listening:
                self._poller.unregister(self._listener.fileno())
            self._listener.close()
            self.path.unlink(missing_ok=True)

    # ---- one connection ---------------------------------------------------------------------

    def _listen(self, *, may_accept: bool = True) -> None:
        """Accept connections exactly as long as there is room for one, and until this is closed."""
        if self._listener.fileno() < 0:
            return
        is_free = may_accept and len(self._askers) < MAX_UNPROVED
        if is_free and not self._is_listening:
            self._poller.register(self._listener.fileno(), select.POLLIN)
        if self._is_listening and not is_free:
            self._poller.unregister(self._listener.fileno())
        self._is_listening = is_free

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except BlockingIOError:  # the client has left
            return
        except OSError as error:  # no descriptor is left, and the waiting client keeps the listener readable
            self._env.faults.warn("no connection is accepted", f"GPU memory is handed over later: {error}")
            self._listen(may_accept=False)  # until the next tick
            return
        pid, uid = peer_of(stream)
        stream.setblocking(False)
        asker = _Asker(stream, pid, self._env.clock() + TIMEOUT_S)
        self._askers[stream.fileno()] = asker
        self._poller.register(stream.fileno(), select.POLLIN)
        if uid != os.geteuid():
            self._refuse(asker, f"user {uid}")
        elif not self._sessions.is_attached(pid):
            self._refuse(asker, "it is not attached")
        elif sum(other.pid == pid for other in self._askers.values()) > MAX_OF_ONE_PROCESS:
            self._refuse(asker, f"{MAX_OF_ONE_PROCESS} connections of it are here already")
        self._listen()

    def _answer(self, asker: _Asker) -> None:
        try:
            ticket = asker.stream.recv(TICKET_BYTES + 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(asker, str(error))
            return
        if len(ticket) != TICKET_BYTES or not self._sessions.admits(asker.pid, ticket):
            self._refuse(asker, "that is not its ticket" if ticket else "it left")
            return
        try:
            self._hand_over(asker)
        except (OSError, GpuError) as error:
            self._refuse(asker, str(error))
            return
        self._env.counters["handovers"] += 1
        self._end(asker)

    def _hand_over(self, asker: _Asker) -> None:
        handle, fd = self._memory.export()
        try:
            message = msgspec.msgpack.encode(handle)
            socket.send_fds(asker.stream, [message], [fd] if fd >= 0 else [])
        finally:
            if fd >= 0:
                os.close(fd)

    def _refuse(self, asker: _Asker, why: str) -> None:
        self._env.counters["handover_refused"] += 1
        about = f"GPU memory is not handed over to process {asker.pid}"
        self._env.faults.warn(about, f"{about}: {why}")
        self._end(asker)

    def _end(self, asker: _Asker) -> None:
        del self._askers[asker.stream.fileno()]
        self._poller.unregister(asker.stream.fileno())
        asker.stream.close()
        self._listen()
