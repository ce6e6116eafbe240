"""Both regions in one process: the reference that other backends are read against. A write is a copy, made at once."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from pdx.channel import (
    Availability,
    Channel,
    Memory,
    Piece,
    Region,
    RemoteRegion,
    Transfer,
    check_on_host,
    check_write,
)
from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable, WriteRefused
from pdx.transports.sessions import Session, SessionListener

_HERE = secrets.token_bytes(16)  # which process this is


class InprocTransfer(Transfer):
    """Over from the beginning."""

    def __init__(self, error: ChannelError | None) -> None:
        self.error = error

    def poll(self) -> bool:
        """Always."""
        return True

    def abort(self) -> None:
        """Too late."""


class InprocChannel(Channel):
    """Copies from one region to another. `close` waits for a copy that another thread is making."""

    def __init__(
        self,
        region: InprocRegion,
        target: InprocListener,
        session: Session,
        remote_nbytes: int,
        wake: Callable[[], None],
    ) -> None:
        self._region = region
        self._wake = wake
        self._target = target
        self._session = session
        self._remote_nbytes = remote_nbytes
        self._lock = threading.Lock()  # guards _is_open, and that nothing is copied behind `close`
        self._is_open = True

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """Copy everything, then tell both sides."""
        check_write(pieces, notify, self._region.memory.nbytes, self._remote_nbytes)
        with self._lock:
            if self._is_open:
                error = self._target.receive(self._session, self._region.memory, pieces, notify)
            else:
                error = ChannelBroken("the channel is closed")
        self._wake()
        return InprocTransfer(error)

    def close(self) -> None:
        """No more copies."""
        with self._lock:
            self._is_open = False
        self._region.forget(self)


class InprocListener(SessionListener):
    """The receiving side of a region of this process."""

    def __init__(self, memory: Memory, wake: Callable[[], None]) -> None:
        super().__init__(memory.nbytes, wake)
        self._memory = memory
        self._lock = threading.Lock()  # copies are made one after the other, and none behind `close`

    def invite(self, token: bytes) -> RemoteRegion:
        """See `Listener.invite`."""
        self._sessions.open(token)
        with _LISTENERS_LOCK:
            _LISTENERS[token] = self
        return RemoteRegion(InprocRegion.scheme, self._memory.nbytes, token, _HERE)

    def expel(self, token: bytes) -> None:
        """See `Listener.expel`."""
        self._sessions.expel(token)
        with _LISTENERS_LOCK:
            _LISTENERS.pop(token, None)

    def close(self) -> None:
        """End all sessions, behind the copy that is being made."""
        with _LISTENERS_LOCK:
            for token in [token for token, listener in _LISTENERS.items() if listener is self]:
                del _LISTENERS[token]
        with self._lock:
            self._sessions.expel_all()

    def session(self, token: bytes) -> Session | None:
        """The open session of this token."""
        return self._sessions.find(token)

    def receive(self, session: Session, source: Memory, pieces: Sequence[Piece], notify: bytes) -> ChannelError | None:
        """Copy the pieces from `source`, or say why not."""
        with self._lock:
            if not session.is_open:
                return ChannelBroken("the session is over")
            entered = self._sessions.enter(session, pieces)
            if entered is None:
                return WriteRefused("not inside granted spans")
            target = self._memory.view
            for piece in pieces:
                bytes_ = source.view[piece.local : piece.local + piece.nbytes]
                target[piece.remote : piece.remote + piece.nbytes] = bytes_
            is_heard = self._sessions.land(session, entered, notify)
        return None if is_heard else ChannelBroken("the session is over")


_LISTENERS_LOCK = threading.Lock()
_LISTENERS: dict[bytes, InprocListener] = {}  # who invited whom, by token


class InprocRegion(Region):
    """Memory of this process."""

    scheme: ClassVar[str] = "inproc"
    crosses_wire: ClassVar[bool] = False

    def __init__(self, memory: Memory, wake: Callable[[], None]) -> None:
        self.memory = memory
        self._wake = wake
        self._listener = InprocListener(memory, wake)
        self._channels: set[InprocChannel] = set()

    def __repr__(self) -> str:
        return f"<InprocRegion {self.memory} {len(self._channels)} channels>"

    @classmethod
    def availability(cls) -> Availability:
        """Everywhere."""
        return Availability(is_ok=True)

    @classmethod
    def register(
        cls, memory: Memory, *, host: str = "127.0.0.1", wake: Callable[[], None] = lambda: None
    ) -> InprocRegion:
        """See `Region.register`; there is nothing to do."""
        check_on_host(memory, cls.scheme)
        return cls(memory, wake)

    def listen(self) -> InprocListener:
        """See `Region.listen`."""
        return self._listener

    def connect(
        self, remote: RemoteRegion, *, timeout_s: float = 5.0, wake: Callable[[], None] | None = None
    ) -> InprocChannel:
        """See `Region.connect`."""
        if remote.scheme != self.scheme or remote.detail != _HERE:
            raise ChannelUnavailable(f"an inproc region of process {os.getpid()} was expected, not {remote.scheme!r}")
        with _LISTENERS_LOCK:
            listener = _LISTENERS.get(remote.token)
        session = listener.session(remote.token) if listener else None
        if listener is None or session is None:
            raise ChannelBroken("nobody has invited with this token")
        channel = InprocChannel(self, listener, session, remote.nbytes, wake or self._wake)
        self._channels.add(channel)
        return channel

    def forget(self, channel: InprocChannel) -> None:
        """It is closed."""
        self._channels.discard(channel)

    def close(self) -> None:
        """Close all channels and the listener."""
        for channel in list(self._channels):
            channel.close()
        self._listener.close()
