"""The sessions of one listener: who may write where, and what has landed. For backends that check writes; no I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pdx.transports.channel import (
    MAX_UNTAKEN_BYTES,
    NOTIFICATION_BYTES,
    TOKEN_BYTES,
    Listener,
    Notification,
    Piece,
    Spans,
)


@dataclass(eq=False)
class Session:
    """One peer's permission to write. Only `Sessions` changes it, under its lock."""

    token: bytes
    spans: Spans = field(default_factory=Spans)
    landing: int = 0  # writes that have entered and not left
    untaken_bytes: int = 0  # of notifications that nobody has taken
    is_open: bool = True

    @property
    def has_room(self) -> bool:
        """Whether another write of it may be received, or it is over, so that none will be."""
        return self.untaken_bytes < MAX_UNTAKEN_BYTES or not self.is_open


class Sessions:
    """All sessions of a listener over a region of `nbytes`. For any thread; `wake` is called without the lock."""

    def __init__(self, nbytes: int, wake: Callable[[], None]) -> None:
        self._nbytes = nbytes
        self._wake = wake
        # Guards all below, and everything in the sessions. An expelled session stays until its last write has left.
        # Waited for: room for notifications.
        self._lock = threading.Condition()
        self._sessions: dict[bytes, Session] = {}
        self._landed: list[Notification] = []
        self._unheard: set[Session] = set()  # whose they are

    def open(self, token: bytes) -> None:
        """:raises ValueError: the token is no fresh one."""
        with self._lock:
            if len(token) != TOKEN_BYTES or token in self._sessions:
                raise ValueError("a session needs a fresh token")
            self._sessions[token] = Session(token)

    def find(self, token: bytes) -> Session | None:
        """The open session of a token that a stranger showed.

        How long this takes says nothing of the tokens there are: they are found by a hash with a secret of the process.
        """
        with self._lock:
            session = self._sessions.get(token)
            return session if session is not None and session.is_open else None

    def grant(self, token: bytes, offset: int, nbytes: int) -> None:
        """See `Listener.grant`. Nothing is granted to a session that is over.

        :raises ValueError: the span is not inside the region.
        """
        if offset < 0 or not 0 < nbytes <= self._nbytes - offset:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside a region of {self._nbytes} bytes")
        with self._lock:
            session = self._sessions.get(token)
            if session is not None and session.is_open:
                session.spans.grant(offset, nbytes)

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        """See `Listener.revoke`."""
        with self._lock:
            session = self._sessions.get(token)
            return session is None or session.spans.revoke(offset, nbytes)

    def expel(self, token: bytes) -> None:
        """Nothing new enters, nothing more is notified. Idempotent."""
        with self._lock:
            if (session := self._sessions.get(token)) is not None:
                self._end(session)

    def expel_all(self) -> None:
        """No session is open any more."""
        with self._lock:
            for session in list(self._sessions.values()):
                self._end(session)

    def enter(self, session: Session, pieces: Sequence[Piece]) -> list[int] | None:
        """These pieces are about to land: what to `leave` or `land` with, None if one of them may not."""
        with self._lock:
            if not session.is_open:
                return None
            entered = session.spans.enter((piece.remote, piece.nbytes) for piece in pieces)
            session.landing += entered is not None
            return entered

    def leave(self, session: Session, entered: Iterable[int]) -> None:
        """The write that entered so has failed; nothing of it will land any more."""
        with self._lock:
            self._leave(session, entered)

    def land(self, session: Session, entered: Iterable[int], payload: bytes) -> bool:
        """The write that entered so has landed. False if its session was expelled meanwhile: nobody hears of it."""
        with self._lock:
            is_open = session.is_open
            if is_open:
                self._landed.append(Notification(session.token, payload))
                session.untaken_bytes += len(payload) + NOTIFICATION_BYTES
                self._unheard.add(session)
            self._leave(session, entered)
        if is_open:
            self._wake()
        return is_open

    def wait_for_room(self, session: Session) -> bool:
        """Wait until another write of this session may be received; False: it is over."""
        with self._lock:
            self._lock.wait_for(lambda: session.has_room)
            return session.is_open

    def take(self) -> list[Notification]:
        """See `Listener.take`."""
        with self._lock:
            landed, self._landed = self._landed, []
            for session in self._unheard:
                session.untaken_bytes = 0
            self._unheard.clear()
            self._lock.notify_all()
        return landed

    def _leave(self, session: Session, entered: Iterable[int]) -> None:
        session.spans.leave(entered)
        session.landing -= 1
        self._forget(session)

    def _end(self, session: Session) -> None:
        session.is_open = False
        self._lock.notify_all()
        session.spans.revoke_all()
        self._forget(session)

    def _forget(self, session: Session) -> None:
        if not session.is_open and not session.landing:
            self._sessions.pop(session.token, None)


class SessionListener(Listener):
    """Over `Sessions`, which answer all that concerns no connection. Subclasses invite, expel and close."""

    def __init__(self, nbytes: int, wake: Callable[[], None]) -> None:
        self._sessions = Sessions(nbytes, wake)

    def grant(self, token: bytes, offset: int, nbytes: int) -> None:
        """See `Listener.grant`."""
        self._sessions.grant(token, offset, nbytes)

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        """See `Listener.revoke`."""
        return self._sessions.revoke(token, offset, nbytes)

    def take(self) -> list[Notification]:
        """See `Listener.take`."""
        return self._sessions.take()
