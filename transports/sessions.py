"""Who may write where, and what has landed: the one table of a listener, for any transport. No I/O."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Sequence

from pdx.transports.channel import (
    MAX_UNTAKEN_BYTES,
    NOTIFICATION_BYTES,
    TOKEN_BYTES,
    Listener,
    Notification,
    Piece,
    RemoteRegion,
)


class WriteSession:
    """One peer's permission to write, and the spans granted to it. Its listener locks it.

    A span in use (`enter` … `leave`) is being written; it can be revoked, but is not free before the last `leave`.
    """

    def __init__(self, token: bytes = b"") -> None:
        self.token = token
        self.is_open = True
        self.untaken_bytes = 0  # of notifications that were not taken yet
        self.granted: dict[int, int] = {}  # offset -> bytes
        self._starts: list[int] = []  # the same offsets, sorted
        self._in_use: dict[int, int] = {}  # offset of the span -> writes landing in it, also after it was revoked

    @property
    def is_landing(self) -> bool:
        """Whether a write has entered and not left."""
        return bool(self._in_use)

    @property
    def has_room(self) -> bool:
        """Whether another of its writes may be received; also if it is over, so that none will be."""
        return self.untaken_bytes < MAX_UNTAKEN_BYTES or not self.is_open

    def grant(self, offset: int, nbytes: int) -> None:
        """Add a span; spans of one session do not overlap."""
        if offset not in self.granted:
            bisect.insort(self._starts, offset)
        self.granted[offset] = nbytes

    def revoke(self, offset: int, nbytes: int) -> bool:
        if self.granted.get(offset) == nbytes:
            del self.granted[offset]
            del self._starts[bisect.bisect_left(self._starts, offset)]
        return not self._in_use.get(offset)

    def end(self) -> None:
        """End the session and all its grants."""
        self.is_open = False
        self.granted.clear()
        self._starts.clear()

    def enter(self, spans: Iterable[tuple[int, int]]) -> list[int] | None:
        """Note these (offset, nbytes) as about to be written. Returns what to `leave` with; None: one is not granted.

        Each must lie inside one granted span. Each costs the logarithm of the number of granted spans.
        """
        entered = []
        for offset, nbytes in spans:
            index = bisect.bisect_right(self._starts, offset) - 1
            start = self._starts[index] if index >= 0 else 0
            if index < 0 or offset + nbytes > start + self.granted[start]:
                return None
            entered.append(start)
        for start in entered:
            self._in_use[start] = self._in_use.get(start, 0) + 1
        return entered

    def leave(self, entered: Iterable[int]) -> None:
        """Note that these were written, or never will be."""
        for start in entered:
            self._in_use[start] -= 1
            if not self._in_use[start]:
                del self._in_use[start]


class SessionListener(Listener):
    """The half of a listener that is the same for any transport: sessions, their grants, and notifications. A subclass
    receives: each write of a session goes through `enter`, and then `land` or `leave`, on any thread. `wake` is set
    outside the lock."""

    def __init__(self, scheme: str, nbytes: int, wake: threading.Event, detail: bytes) -> None:
        """For a region of `nbytes` bytes. `detail`: what a peer needs to connect."""
        self.scheme = scheme
        self._nbytes = nbytes
        self._wake = wake
        self._detail = detail
        # Guards all below, everything in the sessions, and what subclasses say; reentrant. An expelled session stays
        # until its last write has left. The condition is room for notifications.
        self._lock = threading.Condition()
        self._sessions: dict[bytes, WriteSession] = {}
        self._untaken: list[Notification] = []
        self._unheard: set[WriteSession] = set()  # their sessions

    def invite(self, token: bytes) -> RemoteRegion:
        """:raises ValueError: the token is not fresh."""
        with self._lock:
            if len(token) != TOKEN_BYTES or token in self._sessions:
                raise ValueError("a session needs a fresh token")
            self._sessions[token] = self._new(token)
        return RemoteRegion(self.scheme, self._nbytes, token, self._detail)

    def find(self, token: bytes) -> WriteSession | None:
        """The open session of a token that a stranger has shown.

        The time that this takes says nothing about existing tokens: their hash uses a secret of the process.
        """
        with self._lock:
            session = self._sessions.get(token)
            return session if session is not None and session.is_open else None

    def grant(self, token: bytes, offset: int, nbytes: int) -> None:
        """Nothing is granted to a session that is over. :raises ValueError: the span is not inside the region."""
        if offset < 0 or not 0 < nbytes <= self._nbytes - offset:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside a region of {self._nbytes} bytes")
        with self._lock:
            session = self._sessions.get(token)
            if session is not None and session.is_open:
                session.grant(offset, nbytes)

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        with self._lock:
            session = self._sessions.get(token)
            return session is None or session.revoke(offset, nbytes)

    def expel(self, token: bytes) -> None:
        """Nothing new enters, nothing more is notified. Idempotent."""
        with self._lock:
            if (session := self._sessions.get(token)) is not None:
                self._end(session)
                self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            for session in list(self._sessions.values()):
                self._end(session)
            self._lock.notify_all()

    def enter(self, session: WriteSession, pieces: Sequence[Piece]) -> list[int] | None:
        """Note these pieces as about to land. Returns what to `leave` or `land` with; None: one of them may not."""
        with self._lock:
            return session.enter((piece.remote, piece.nbytes) for piece in pieces) if session.is_open else None

    def leave(self, session: WriteSession, entered: Iterable[int]) -> None:
        """The write with these entries has failed; nothing of it will land any more."""
        with self._lock:
            session.leave(entered)
            self._forget(session)

    def land(self, session: WriteSession, entered: Iterable[int], payload: bytes) -> bool:
        """The write with these entries has landed. False: its session was expelled meanwhile, so it is not notified."""
        with self._lock:
            is_open = session.is_open
            if is_open:
                self._notify(session, payload)
            session.leave(entered)
            self._forget(session)
        if is_open:
            self._wake.set()
        return is_open

    def wait_for_room(self, session: WriteSession) -> bool:
        """Wait until another write of this session may be received. False: the session is over."""
        with self._lock:
            self._lock.wait_for(lambda: session.has_room)
            return session.is_open

    def take(self) -> list[Notification]:
        with self._lock:
            untaken, self._untaken = self._untaken, []
            for session in self._unheard:
                session.untaken_bytes = 0
            self._unheard.clear()
            self._lock.notify_all()
        return untaken

    # ---- under the lock ---------------------------------------------------------------------

    def _new(self, token: bytes) -> WriteSession:
        return WriteSession(token)

    def _notify(self, session: WriteSession, payload: bytes) -> None:
        self._untaken.append(Notification(session.token, payload))
        session.untaken_bytes += len(payload) + NOTIFICATION_BYTES
        self._unheard.add(session)

    def _end(self, session: WriteSession) -> None:
        session.end()
        self._forget(session)

    def _forget(self, session: WriteSession) -> None:
        if not session.is_open and not session.is_landing:
            self._sessions.pop(session.token, None)
