"""Both regions in one process: the reference that other backends are read against. A write is a copy, made at once."""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable, TransferAborted, WriteRefused
from pdx.transports.channel import Channel, Memory, Notification, Piece, Region, RemoteRegion, Transfer, check_write
from pdx.transports.sessions import SessionListener, WriteSession

_HERE = secrets.token_bytes(16)  # which process this is


class InprocTransfer(Transfer):
    """Over from the beginning, but where too many notifications of its session were not taken. Its listener's lock
    guards what changes."""

    def __init__(self, channel: InprocChannel, pieces: Sequence[Piece], notify: bytes) -> None:
        super().__init__(channel.wake)
        self.channel = channel
        self.pieces = pieces
        self.notify = notify

    def abort(self) -> None:
        """See `Transfer.abort`: one that waits."""
        self.channel.target.give_up(lambda each: each is self, TransferAborted("aborted before it began"))


class InprocChannel(Channel):
    """Copies from one region to another. `close` waits for a copy that another thread is making."""

    def __init__(
        self, memory: Memory, target: InprocListener, session: WriteSession, nbytes: int, wake: threading.Event
    ) -> None:
        """`nbytes`: of the remote region."""
        self.wake = wake
        self.target = target
        self.session = session
        self.memory = memory
        self._remote_nbytes = nbytes
        self._lock = threading.Lock()  # guards is_closed, and that nothing is copied behind `close`

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """Copy everything, then tell both sides."""
        check_write(pieces, notify, self.memory.nbytes, self._remote_nbytes)
        transfer = InprocTransfer(self, pieces, notify)
        with self._lock:
            if not self.is_closed:
                self.target.receive(transfer)
                return transfer
        transfer.finish(ChannelBroken("the channel is closed"))
        return transfer

    def close(self) -> None:
        """No more copies."""
        with self._lock:
            self.is_closed = True
        self.target.give_up(lambda each: each.channel is self, ChannelBroken("the channel is closed"))


class InprocListener(SessionListener):
    """The receiving side of a region of this process."""

    def __init__(self, memory: Memory, wake: threading.Event) -> None:
        super().__init__(InprocRegion.scheme, memory.nbytes, wake, _HERE)
        self._memory = memory
        self._copying = threading.Lock()  # copies are made one after the other, and none behind `close`
        self._waiting: dict[WriteSession, deque[InprocTransfer]] = {}  # for notifications to be taken

    def invite(self, token: bytes) -> RemoteRegion:
        with _LISTENERS_LOCK:
            _LISTENERS[token] = self
        return super().invite(token)

    def expel(self, token: bytes) -> None:
        super().expel(token)
        with _LISTENERS_LOCK:
            _LISTENERS.pop(token, None)
        self._go_on()

    def take(self) -> list[Notification]:
        found = super().take()
        if self._waiting:
            self._go_on()
        return found

    def close(self) -> None:
        """End all sessions, behind the copy that is being made."""
        with _LISTENERS_LOCK:
            for token in [token for token, listener in _LISTENERS.items() if listener is self]:
                del _LISTENERS[token]
        with self._copying:
            super().close()
        self._go_on()

    def receive(self, transfer: InprocTransfer) -> None:
        """Make this copy as soon as its session has room for the notification."""
        session = transfer.channel.session
        with self._copying:
            self._waiting.setdefault(session, deque()).append(transfer)
            self._advance(session)

    def give_up(self, chosen: Callable[[InprocTransfer], bool], error: ChannelError) -> None:
        """Those that wait and are chosen will not be made."""
        with self._copying:
            for session, queue in list(self._waiting.items()):
                self._waiting[session] = deque(each for each in queue if not chosen(each))
                for transfer in filter(chosen, queue):
                    transfer.finish(error)

    def _go_on(self) -> None:
        with self._copying:
            for session in list(self._waiting):
                self._advance(session)

    def _advance(self, session: WriteSession) -> None:
        """Make the copies of this session that may be made now."""
        queue = self._waiting[session]
        while queue and session.has_room:
            transfer = queue.popleft()
            transfer.finish(self.copy(transfer))
        if not queue:
            del self._waiting[session]

    def copy(self, transfer: InprocTransfer) -> ChannelError | None:
        """Copy the pieces, or say why not."""
        session, source = transfer.channel.session, transfer.channel.memory.view
        if not session.is_open:
            return ChannelBroken("the session is over")
        entered = self.enter(session, transfer.pieces)
        if entered is None:
            return WriteRefused("not inside granted spans")
        target = self._memory.view
        for piece in transfer.pieces:
            target[piece.remote : piece.remote + piece.nbytes] = source[piece.local : piece.local + piece.nbytes]
        is_heard = self.land(session, entered, transfer.notify)
        return None if is_heard else ChannelBroken("the session is over")


_LISTENERS_LOCK = threading.Lock()
_LISTENERS: dict[bytes, InprocListener] = {}  # who invited whom, by token


class InprocRegion(Region):
    """Memory of this process."""

    scheme: ClassVar[str] = "inproc"
    crosses_wire: ClassVar[bool] = False

    def _listening(self) -> InprocListener:
        return InprocListener(self.memory, self.wake)

    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: threading.Event) -> InprocChannel:
        if remote.detail != _HERE:
            raise ChannelUnavailable(f"an inproc region of process {os.getpid()} was expected, not another's")
        with _LISTENERS_LOCK:
            listener = _LISTENERS.get(remote.token)
        session = listener.find(remote.token) if listener else None
        if listener is None or session is None:
            raise ChannelBroken("nobody has invited with this token")
        return InprocChannel(self.memory, listener, session, remote.nbytes, wake)
