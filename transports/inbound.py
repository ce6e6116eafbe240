"""The reading half of channels over streams: who may join, what may land, what is acknowledged.

A stream belongs to a stranger until its greeting names an open session. Strangers are few and have a deadline; one that
comes when all places are taken takes that of the one which has had the most time. Whatever is wrong with a stream ends
its channel and nothing else. Subclasses say what a payload is.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

from pdx.errors import ChannelBroken, ChannelUnavailable, ProtocolError
from pdx.transports.arrivals import Arrival, Arrivals
from pdx.transports.channel import Memory, Piece, RemoteRegion
from pdx.transports.frames import (
    GREETING_HEAD_BYTES,
    HEAD_BYTES,
    OK,
    REFUSED,
    UNKNOWN,
    UNREACHABLE,
    Ack,
    Greeting,
    Head,
    cut,
    greeting_bytes,
    inline_body,
    pack_ack,
    pack_answer,
    unpack_greeting,
    unpack_head,
)
from pdx.transports.sessions import Session, SessionListener, Sessions
from pdx.transports.streams import fill, send_all, shut

MAX_STRANGERS = 64  # at once
MAX_STRANGERS_OF_AN_ORIGIN = 16  # so that those of one host do not drive out those of others
MAX_STREAMS_OF_A_SESSION = 64
GREETING_S = 5.0
_ACCEPT_PAUSE_S = 0.05  # after an accept that failed, as without free descriptors: no busy loop

_log = logging.getLogger(__name__)


class Group:
    """The streams of one channel, seen from its reader. Its listener changes `streams` and `is_open` under its lock."""

    def __init__(self, session: Session, greeting: Greeting) -> None:
        self.session = session
        self.id = greeting.group
        self.size = greeting.streams
        self.streams: dict[int, socket.socket] = {}
        self.is_open = True
        self.luggage: Any = None  # what a backend keeps for it
        self._lock = threading.Lock()  # guards the arrivals
        self._arrivals = Arrivals()

    def begin(self, head: Head, packed: bytes, sessions: Sessions) -> Arrival:
        """A part is about to arrive; its write was checked, all of it, and may land unless `entered` is None."""
        with self._lock:
            arrival = self._arrivals.begin(head, packed)
            if len(arrival.came) == 1:
                arrival.entered = sessions.enter(self.session, arrival.body.pieces)
            return arrival

    def end_part(self, arrival: Arrival) -> bool:
        """Whether that was the last part."""
        with self._lock:
            return self._arrivals.end_part(arrival)

    def give_up(self, sessions: Sessions) -> None:
        """No stream is left: nothing that has begun will go on."""
        with self._lock:
            for arrival in self._arrivals.unfinished():
                if arrival.entered is not None:
                    sessions.leave(self.session, arrival.entered)


class StreamListener(SessionListener):
    """Accepts streams and receives writes, with one thread for each stream and one that accepts."""

    scheme: str

    def __init__(self, memory: Memory, wake: Callable[[], None], server: socket.socket) -> None:
        super().__init__(memory.nbytes, wake)
        self._memory = memory
        self._server = server
        self._acceptor = threading.Thread(target=self._accept, name=f"pdx-{self.scheme}-accept", daemon=True)
        self._closing = threading.Event()
        # Guards all below, and that no descriptor is used by one thread while another closes it.
        self._lock = threading.Lock()
        self._streams: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, object] = {}  # with their origins, in the order they came
        self._groups: dict[tuple[bytes, bytes], Group] = {}
        self.faults: Counter[str] = Counter()  # what was wrong with streams, by kind

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._streams)} streams of {len(self._groups)} channels>"

    @property
    def strangers(self) -> int:
        """Connections that have not greeted yet."""
        return len(self._strangers)

    @abstractmethod
    def _origin(self, stream: socket.socket, address: Any) -> object:
        """Who is answerable for a stream that was just accepted from `address`, as a host or a process.

        :raises OSError: the stream is broken.
        """

    @abstractmethod
    def _detail(self) -> bytes:
        """What a peer needs to connect."""

    @abstractmethod
    def _vet(self, stream: socket.socket) -> None:
        """Look at a stream that was just accepted, set its options.

        :raises ProtocolError: it is not wanted.
        """

    @abstractmethod
    def _admit(self, stream: socket.socket, group: Group, *, is_first: bool) -> None:
        """Take what belongs to the greeting, within the stream's timeout; the token was right.

        :raises ChannelUnavailable: the memory of this peer cannot be reached.
        """

    @abstractmethod
    def _land(self, stream: socket.socket, group: Group, pieces: list[Piece]) -> None:
        """Bring the payload of these pieces, all of which may land, into memory.

        :raises OSError: the stream ended or broke before it was complete.
        :raises ChannelBroken: it cannot be brought there.
        """

    @abstractmethod
    def _drop(self, stream: socket.socket, nbytes: int) -> None:
        """Take the payload of a refused part off the stream."""

    def _dismiss(self, group: Group) -> None:
        """The last stream of the group is gone."""

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def invite(self, token: bytes) -> RemoteRegion:
        """See `Listener.invite`."""
        self._sessions.open(token)
        return RemoteRegion(self.scheme, self._memory.nbytes, token, self._detail())

    def expel(self, token: bytes) -> None:
        """See `Listener.expel`."""
        self._sessions.expel(token)
        with self._lock:
            for group in self._groups.values():
                if group.session.token == token:
                    self._end(group)

    def close(self) -> None:
        """End all sessions; when it returns no thread of it is left, and nothing more lands."""
        self._closing.set()
        self._sessions.expel_all()
        with self._lock:
            shut(self._server)
            for stream in self._streams:
                shut(stream)
            threads = list(self._streams.values())
        self._acceptor.join()
        for thread in threads:
            thread.join()
        self._server.close()

    def _accept(self) -> None:
        """The root of the accepting thread. Nothing that a stranger does ends it."""
        while not self._closing.is_set():
            try:
                stream, address = self._server.accept()
            except OSError as error:
                if not self._closing.wait(_ACCEPT_PAUSE_S):
                    self._fault("accept", error)
                continue
            try:
                origin = self._origin(stream, address)
            except OSError as error:
                stream.close()
                self._fault("lost", error)
                continue
            self._take_in(stream, origin)

    def _take_in(self, stream: socket.socket, origin: object) -> None:
        thread = threading.Thread(target=self._serve, args=(stream,), name=f"pdx-{self.scheme}-receive", daemon=True)
        with self._lock:
            is_wanted = not self._closing.is_set()
            is_crowded = is_wanted and self._make_place(origin)
            if is_wanted:
                self._strangers[stream] = origin
                self._streams[stream] = thread
                try:
                    thread.start()  # under the lock, so that `close` joins only threads that run
                except RuntimeError as error:  # no more threads can be had
                    del self._streams[stream], self._strangers[stream]
                    is_wanted = False
                    _log.warning("channel %s: %s", self.scheme, error)
        if not is_wanted:
            stream.close()
        if is_crowded:
            self._fault("strangers", f"too many connections that have not greeted, the last from {origin}")

    def _make_place(self, origin: object) -> bool:
        """Whether a stranger had to go for one from `origin`: the oldest from there, or the oldest of all."""
        own = [stream for stream, each in self._strangers.items() if each == origin]
        if len(own) < MAX_STRANGERS_OF_AN_ORIGIN and len(self._strangers) < MAX_STRANGERS:
            return False
        oldest = own[0] if len(own) >= MAX_STRANGERS_OF_AN_ORIGIN else next(iter(self._strangers))
        del self._strangers[oldest]
        shut(oldest)  # its thread closes it
        return True

    def _serve(self, stream: socket.socket) -> None:
        """The root of the thread of one stream."""
        group: Group | None = None
        try:
            try:
                group = self._greeted(stream)
            finally:
                with self._lock:
                    self._strangers.pop(stream, None)
            if group is not None:
                stream.settimeout(None)
                self._receive(stream, group)
        except ProtocolError as error:
            self._fault("greeting" if group is None else "frame", error)
        except OSError as error:
            self._fault("silence" if group is None else "lost", error)
        except ChannelBroken as error:
            self._fault("broken", error)
        finally:
            self._forget(stream, group)

    def _greeted(self, stream: socket.socket) -> Group | None:
        """The group that this stream has joined; None if it may not."""
        deadline = time.monotonic() + GREETING_S
        self._vet(stream)
        head = bytearray(GREETING_HEAD_BYTES)
        if not fill(stream, head, deadline=deadline):
            return None
        packed = bytearray(greeting_bytes(head))
        if not fill(stream, packed, deadline=deadline):
            raise ProtocolError("an empty greeting")
        greeting = unpack_greeting(packed)
        group = self._join(stream, greeting)
        if group is None:
            send_all(stream, [pack_answer(greeting.token, UNKNOWN)])
            self._fault("token", "a token that opens nothing")
            return None
        try:
            why = self._why_not(stream, group, greeting)
            send_all(stream, [pack_answer(greeting.token, UNREACHABLE if why else OK, why)])
        except (OSError, ProtocolError):
            self._leave(stream, group)
            raise
        if why:
            self._leave(stream, group)
            return None
        return group

    def _why_not(self, stream: socket.socket, group: Group, greeting: Greeting) -> str:
        try:
            self._admit(stream, group, is_first=greeting.index == 0)
        except ChannelUnavailable as error:
            self._fault("unreachable", error)
            return str(error) or "it cannot be reached"
        return ""

    def _join(self, stream: socket.socket, greeting: Greeting) -> Group | None:
        session = self._sessions.find(greeting.token)
        if session is None:
            return None
        with self._lock:
            if not session.is_open:  # expelled meanwhile: under the lock, so that `expel` has shut all there are
                return None
            mine = [group for group in self._groups.values() if group.session is session]
            if sum(len(group.streams) for group in mine) >= MAX_STREAMS_OF_A_SESSION:
                raise ProtocolError(f"more than {MAX_STREAMS_OF_A_SESSION} streams of one session")
            key = (session.token, greeting.group)
            group = self._groups.setdefault(key, Group(session, greeting))
            if not group.is_open or group.size != greeting.streams or greeting.index in group.streams:
                raise ProtocolError(f"stream {greeting.index} of {greeting.streams} does not belong to its group")
            group.streams[greeting.index] = stream
            self._strangers.pop(stream, None)  # from now on nobody takes its place
        return group

    def _receive(self, stream: socket.socket, group: Group) -> None:
        head_bytes = bytearray(HEAD_BYTES)
        # A writer whose notifications are not taken is not read from: it fills its window and the kernel's buffers.
        while self._sessions.wait_for_room(group.session) and fill(stream, head_bytes):
            head = unpack_head(head_bytes)
            if not hmac.compare_digest(head.token, group.session.token):
                raise ProtocolError("a frame with another session's token")
            packed = inline_body(head, head_bytes)
            arrival = group.begin(head, packed or _body(stream, head), self._sessions)
            pieces = cut(arrival.body.pieces, head.part, head.parts)
            if arrival.entered is None:
                self._drop(stream, sum(piece.nbytes for piece in pieces))
            else:
                self._land(stream, group, pieces)
            if group.end_part(arrival):
                self._acknowledge(stream, group, arrival)

    def _acknowledge(self, stream: socket.socket, group: Group, arrival: Arrival) -> None:
        status = OK
        if arrival.entered is None:
            self._fault("refused", f"write {arrival.number} is not inside granted spans")
            status = REFUSED
        elif not self._sessions.land(group.session, arrival.entered, arrival.body.notify):
            raise ConnectionError("the session is over")
        send_all(stream, [pack_ack(Ack(group.session.token, arrival.number, status))])

    def _forget(self, stream: socket.socket, group: Group | None) -> None:
        if group is not None:
            self._leave(stream, group)
        with self._lock:
            stream.close()
            self._streams.pop(stream, None)

    def _leave(self, stream: socket.socket, group: Group) -> None:
        """One stream less; the others end, too, and the last one tidies up."""
        with self._lock:
            group.streams = {index: each for index, each in group.streams.items() if each is not stream}
            self._end(group)
            if group.streams:
                return
            del self._groups[group.session.token, group.id]
        group.give_up(self._sessions)
        self._dismiss(group)

    def _end(self, group: Group) -> None:
        group.is_open = False
        for stream in group.streams.values():
            shut(stream)

    def _fault(self, kind: str, reason: object) -> None:
        """Count it; the first of a kind is logged, so that nobody can fill the log."""
        with self._lock:
            self.faults[kind] += 1
            is_first = self.faults[kind] == 1
        if is_first:
            # As text: an exception kept by a logger would keep this thread's frames, and with them the memory.
            text = str(reason)
            _log.warning("channel %s, %s: %s (the next ones are only counted)", self.scheme, kind, text)


def _body(stream: socket.socket, head: Head) -> bytes:
    packed = bytearray(head.body_bytes)
    if not fill(stream, packed):
        raise ConnectionError("the stream ended behind the head of a write")
    return bytes(packed)
