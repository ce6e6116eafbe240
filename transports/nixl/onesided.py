"""What a receiver of one-sided writes can know: what writers say, and whether their processes still exist. No I/O
except reading /proc.

Every message names the session by its secret and the writer's connection within it. A session is over when it was
expelled and each connection that it ever had has said goodbye, or belonged to a process of this host that is gone.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.telemetry.host import host_id, process_stat
from pdx.transports.channel import TOKEN_BYTES
from pdx.transports.sessions import SessionListener, WriteSession

HELLO, WRITE, BYE = range(3)
NAME_BYTES = 8
MAX_CONNECTIONS = 4096  # that one session may have at a time
LOOK_S = 0.1  # between two checks that a session's processes exist: `revoke` may ask about each of its spans
SWEPT = 4  # expelled sessions that are checked for each new one

_log = logging.getLogger(__name__)
_HEAD = struct.Struct(f"!{TOKEN_BYTES}sB{NAME_BYTES}s")


class Process(msgspec.Struct, array_like=True, frozen=True):
    """Identifies a process for all time: its kernel's boot, its PID namespace, its PID and when it started."""

    boot: Annotated[str, Meta(max_length=64)]
    namespace: Annotated[str, Meta(max_length=64)]
    pid: Annotated[int, Meta(ge=1, le=1 << 31)]
    started: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

    @property
    def is_gone(self) -> bool:
        """Whether it is known to exist no more; a zombie counts as existing."""
        boot, namespace = _place()
        if (self.boot, self.namespace) != (boot, namespace):
            return False
        stat = process_stat(self.pid)
        return stat is None or stat.started != self.started


def this_process() -> bytes:
    """This process, as a HELLO carries it."""
    pid = os.getpid()
    stat = process_stat(pid)
    return msgspec.msgpack.encode(Process(*_place(), pid, 0 if stat is None else stat.started))


def compose(token: bytes, kind: int, name: bytes, payload: bytes) -> bytes:
    return _HEAD.pack(token, kind, name) + payload


class _Session(WriteSession):
    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self.connections: dict[bytes, Process | None] = {}
        self.look_at = 0.0  # when to check again the processes that existed
        self.was_heard = False
        self.is_uncounted = False  # it has had more connections than are kept: their end cannot be known

    def is_over(self, now: float) -> bool:
        """Whether it is known that nothing writes in it any more."""
        if self.is_open or not self.was_heard or self.is_uncounted:
            return False  # its first writer may be connecting now
        if not self.connections:
            return True
        if now < self.look_at:
            return False
        self.look_at = now + LOOK_S
        return all(process is not None and process.is_gone for process in self.connections.values())


class Ledger(SessionListener):
    """Sessions whose writes the receiver does not see.

    An expelled session stays, with its spans, as long as its writers may still write to them. It is removed when it is
    known to be over, noticed by a goodbye, a `revoke`, or the check of a few of them with each new session.
    """

    _sessions: dict[bytes, _Session]  # type: ignore[assignment]  # as `_new` makes them

    def __init__(
        self,
        scheme: str,
        nbytes: int,
        wake: threading.Event,
        detail: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scheme, nbytes, wake, detail)
        self._clock = clock
        self._expelled: dict[bytes, None] = {}  # those that stay, the next to be checked first
        self.dropped = 0  # messages without a session, invalid ones, and those without room
        self._has_overflowed = False

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        with self._lock:
            session = self._sessions.get(token)
            if session is None or session.granted.get(offset) != nbytes:
                return True
            return self._forget_if_over(session)

    def hear(self, message: bytes) -> None:
        """Take a message, from any sender."""
        with self._lock:
            if not self._heed(message):
                self.dropped += 1

    def _new(self, token: bytes) -> _Session:
        for each in list(itertools.islice(self._expelled, SWEPT)):
            del self._expelled[each]
            if not self._forget_if_over(self._sessions[each]):
                self._expelled[each] = None  # behind the others
        return _Session(token)

    def _end(self, session: WriteSession) -> None:
        session.is_open = False
        if not session.granted:
            del self._sessions[session.token]
        elif not self._forget_if_over(self._sessions[session.token]):
            self._expelled[session.token] = None

    def _forget_if_over(self, session: _Session) -> bool:
        if not session.is_over(self._clock()):
            return False
        del self._sessions[session.token]
        self._expelled.pop(session.token, None)
        return True

    def _heed(self, message: bytes) -> bool:
        if len(message) < _HEAD.size:
            return False
        token, kind, name = _HEAD.unpack_from(message)
        session = self._sessions.get(token)
        if session is None:
            return False
        if kind == BYE:
            session.connections.pop(name, None)
            session.was_heard = True
            self._forget_if_over(session)
            return True
        if kind == HELLO and len(session.connections) < MAX_CONNECTIONS:
            session.connections[name] = _process(message[_HEAD.size :])
        elif kind == HELLO:
            session.is_uncounted = True
            return False
        elif kind == WRITE and session.is_open and self._has_room(session):
            self._notify(session, message[_HEAD.size :])
        else:
            return False
        session.was_heard = True
        return True

    def _has_room(self, session: WriteSession) -> bool:
        """Whether a notification can be kept: its writer cannot be held back."""
        if session.has_room:
            return True
        if not self._has_overflowed:
            self._has_overflowed = True
            _log.warning("notifications of a peer are dropped: %d bytes of them were not taken", session.untaken_bytes)
        return False


def _process(encoded: bytes) -> Process | None:
    try:
        return msgspec.msgpack.decode(encoded, type=Process)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None  # then it is never known to be gone


@functools.cache
def _place() -> tuple[str, str]:
    return host_id(), os.readlink("/proc/self/ns/pid")
