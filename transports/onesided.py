"""What a receiver of one-sided writes can know: what writers say, and whether their processes still exist. No I/O
but reading /proc.

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
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.telemetry.host import host_id, process_stat
from pdx.transports.channel import MAX_UNTAKEN_BYTES, NOTIFICATION_BYTES, TOKEN_BYTES, Notification

HELLO, WRITE, BYE = range(3)
NAME_BYTES = 8
MAX_CONNECTIONS = 4096  # that one session may have at a time
LOOK_S = 0.1  # between two looks whether a session's processes exist: as many spans as it has may be asked about
SWEPT = 4  # sessions that were expelled, looked at for each new one

_log = logging.getLogger(__name__)
_HEAD = struct.Struct(f"!{TOKEN_BYTES}sB{NAME_BYTES}s")


class Process(msgspec.Struct, array_like=True, frozen=True):
    """A process for all time: its kernel's boot, its namespace of process ids, its id and when it started."""

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
    """What a HELLO carries."""
    pid = os.getpid()
    stat = process_stat(pid)
    return msgspec.msgpack.encode(Process(*_place(), pid, 0 if stat is None else stat.started))


def compose(token: bytes, kind: int, name: bytes, payload: bytes) -> bytes:
    """A message."""
    return _HEAD.pack(token, kind, name) + payload


@dataclass(eq=False)
class _Session:
    granted: dict[int, int] = field(default_factory=dict)  # offset -> bytes
    connections: dict[bytes, Process | None] = field(default_factory=dict)
    untaken_bytes: int = 0
    look_at: float = 0.0  # when it is worth to look again at processes that existed
    is_open: bool = True
    was_heard: bool = False
    is_uncounted: bool = False  # it has had more connections than are kept: whether they have ended nobody knows

    def is_over(self, now: float) -> bool:
        """Whether it is known that nobody writes in it any more."""
        if self.is_open or not self.was_heard or self.is_uncounted:
            return False  # one that was never heard of may be connecting now
        if not self.connections:
            return True
        if now < self.look_at:
            return False
        self.look_at = now + LOOK_S
        return all(process is not None and process.is_gone for process in self.connections.values())


class Ledger:
    """The sessions of one listener, over a region of `nbytes`. Any thread may use it.

    One that was expelled stays as long as it may have spans that its writers still write to. It goes when it is known
    to be over, whoever notices that first: a goodbye, a question for a span, or a look at a few of them with each new
    session.
    """

    def __init__(self, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._nbytes = nbytes
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._sessions: dict[bytes, _Session] = {}
        self._expelled: dict[bytes, None] = {}  # those that stay, the one to be looked at next first
        self._landed: list[Notification] = []
        self._unheard: set[_Session] = set()  # whose they are
        self.dropped = 0  # messages of nobody's, or that are none, or for which there was no room
        self._has_overflowed = False

    def open(self, token: bytes) -> None:
        """:raises ValueError: the token is no fresh one."""
        with self._lock:
            if len(token) != TOKEN_BYTES or token in self._sessions:
                raise ValueError("a session needs a fresh token")
            self._sweep()
            self._sessions[token] = _Session()

    def grant(self, token: bytes, offset: int, nbytes: int) -> None:
        """See `Listener.grant`. Nothing is granted to a session that is over.

        :raises ValueError: the span is not inside the region.
        """
        if offset < 0 or not 0 < nbytes <= self._nbytes - offset:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside a region of {self._nbytes} bytes")
        with self._lock:
            session = self._sessions.get(token)
            if session is not None and session.is_open:
                session.granted[offset] = nbytes

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        """See `Listener.revoke`."""
        with self._lock:
            session = self._sessions.get(token)
            if session is None or session.granted.get(offset) != nbytes:
                return True
            return self._forget_if_over(token, session)

    def expel(self, token: bytes) -> None:
        """Nothing more is notified. Idempotent."""
        with self._lock:
            self._expel(token)

    def expel_all(self) -> None:
        """No session is open any more."""
        with self._lock:
            for token in list(self._sessions):
                self._expel(token)

    def hear(self, message: bytes) -> None:
        """A message has come, from anybody."""
        with self._lock:
            if not self._heed(message):
                self.dropped += 1

    def take(self) -> list[Notification]:
        """See `Listener.take`."""
        with self._lock:
            landed, self._landed = self._landed, []
            for session in self._unheard:
                session.untaken_bytes = 0
            self._unheard.clear()
        return landed

    def _expel(self, token: bytes) -> None:
        session = self._sessions.get(token)
        if session is None:
            return
        session.is_open = False
        if not session.granted:
            del self._sessions[token]
        elif not self._forget_if_over(token, session):
            self._expelled[token] = None

    def _forget_if_over(self, token: bytes, session: _Session) -> bool:
        if not session.is_over(self._clock()):
            return False
        del self._sessions[token]
        self._expelled.pop(token, None)
        return True

    def _sweep(self) -> None:
        for token in list(itertools.islice(self._expelled, SWEPT)):
            del self._expelled[token]
            if not self._forget_if_over(token, self._sessions[token]):
                self._expelled[token] = None  # the others first

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
            self._forget_if_over(token, session)
            return True
        if kind == HELLO and len(session.connections) < MAX_CONNECTIONS:
            session.connections[name] = _process(message[_HEAD.size :])
        elif kind == HELLO:
            session.is_uncounted = True
            return False
        elif kind == WRITE and session.is_open and self._has_room(session):
            payload = message[_HEAD.size :]
            self._landed.append(Notification(token, payload))
            session.untaken_bytes += len(payload) + NOTIFICATION_BYTES
            self._unheard.add(session)
        else:
            return False
        session.was_heard = True
        return True

    def _has_room(self, session: _Session) -> bool:
        """What its writer says comes whether there is room or not."""
        if session.untaken_bytes < MAX_UNTAKEN_BYTES:
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
