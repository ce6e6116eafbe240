"""The reading half of channels over streams: who may join, what may land, what is acknowledged.

A stream belongs to a stranger until its greeting names an open session. Strangers are few and have a deadline; when all
places are taken, a new one replaces the oldest. An error in a stream ends that stream alone. Subclasses say what a
payload is.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from abc import abstractmethod
from collections import Counter
from typing import Any, ClassVar

from pdx.errors import ChannelBroken, ChannelUnavailable, ProtocolError
from pdx.transports.channel import Piece, Region, merged
from pdx.transports.sessions import SessionListener, WriteSession
from pdx.transports.streams import coded, frames
from pdx.transports.streams.sockets import fill, shut, take

MAX_STRANGERS = 64  # at once
MAX_STRANGERS_OF_AN_ORIGIN = 16  # so that one host's do not drive out others'
MAX_STREAMS_OF_A_SESSION = 64
GREETING_S = 5.0
_ACCEPT_PAUSE_S = 0.05  # after a failed accept, as without free descriptors: no busy loop

_log = logging.getLogger(__name__)


class StreamListener(SessionListener):
    """Accepts streams and receives writes, with one thread for each stream and one that accepts."""

    takes_coded: ClassVar[bool] = False  # payloads of `pdx.transports.streams.coded`

    def __init__(self, region: Region, server: socket.socket, detail: bytes) -> None:
        """Listens at `server`; `detail` is what a peer needs to connect to it."""
        super().__init__(region.scheme, region.memory.nbytes, region.wake, detail)
        self.memory = region.memory
        self._server = server
        self._closing = threading.Event()
        # The lock guards all below, too, and that no descriptor is used by one thread while another closes it.
        self._streams: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, object] = {}  # with their origins, in the order they came
        self._joined: dict[WriteSession, set[socket.socket]] = {}
        self.faults: Counter[str] = Counter()  # what was wrong with streams, by kind
        self._acceptor = threading.Thread(target=self._accept, name=f"pdx-{self.scheme}-accept", daemon=True)
        self._acceptor.start()

    @abstractmethod
    def _meet(self, stream: socket.socket, address: Any) -> object:
        """Check a stream that was just accepted from `address`, and set its options. Returns its origin: a host, say.

        :raises ProtocolError: it is not wanted.
        :raises OSError: it is broken.
        """

    def _admit(self, stream: socket.socket) -> Any:
        """Receive what belongs to the greeting, within the stream's timeout; the token was right. The result goes to
        `_land`, and is closed after the stream's end.

        :raises ChannelUnavailable: the memory of this peer cannot be reached.
        """

    @abstractmethod
    def _land(self, stream: socket.socket, source: Any, pieces: list[Piece]) -> None:
        """Bring the payload of these pieces, all of which may land, into memory. Nothing lands after this has returned
        or raised.

        :raises OSError: the stream ended or broke before it was complete.
        :raises ChannelBroken: it cannot be brought there.
        """

    def _drop(self, stream: socket.socket, nbytes: int) -> None:
        """Receive and discard the payload of a refused write."""

    def expel(self, token: bytes) -> None:
        with self._lock:
            session = self.find(token)
            super().expel(token)
            for stream in self._joined.get(session, ()) if session is not None else ():
                shut(stream)

    def close(self) -> None:
        """End all sessions; when this returns, no thread of the listener is left, and nothing more lands."""
        self._closing.set()
        super().close()
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
                self._take_in(stream, self._meet(stream, address))
            except (OSError, ProtocolError) as error:
                self._fault("greeting" if isinstance(error, ProtocolError) else "lost", error)
                stream.close()

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
        """Drop a stranger if one from `origin` needs its place: the oldest from there, or of all. True: one went."""
        own = [stream for stream, each in self._strangers.items() if each == origin]
        if len(own) < MAX_STRANGERS_OF_AN_ORIGIN and len(self._strangers) < MAX_STRANGERS:
            return False
        oldest = own[0] if len(own) >= MAX_STRANGERS_OF_AN_ORIGIN else next(iter(self._strangers))
        del self._strangers[oldest]
        shut(oldest)  # its thread closes it
        return True

    def _serve(self, stream: socket.socket) -> None:
        """The root of the thread of one stream."""
        is_greeted = False
        source: Any = None
        session: WriteSession | None = None
        try:
            session = self._greeted(stream)
            if session is not None:
                source = self._admit(stream)
                stream.sendall(frames.pack_answer(frames.OK))
                is_greeted = True
                stream.settimeout(None)
                self._receive(stream, session, source)
        except ProtocolError as error:
            self._fault("frame" if is_greeted else "greeting", error)
        except OSError as error:
            self._fault("lost" if is_greeted else "silence", error)
        except ChannelUnavailable as error:
            self._fault("unreachable", error)
            with contextlib.suppress(OSError):
                stream.sendall(frames.pack_answer(frames.UNREACHABLE, str(error) or "it cannot be reached"))
        except ChannelBroken as error:
            self._fault("broken", error)
        finally:
            if source is not None:
                source.close()
            with self._lock:
                stream.close()
                self._streams.pop(stream, None)
                self._strangers.pop(stream, None)
                if session is not None:
                    self._joined[session].discard(stream)
                    if not self._joined[session]:
                        del self._joined[session]

    def _greeted(self, stream: socket.socket) -> WriteSession | None:
        """The session that this stream belongs to from now on; None: it may not join one."""
        packed = bytearray(frames.GREETING_BYTES)
        if not fill(stream, packed, deadline=time.monotonic() + GREETING_S):
            return None
        session = self.find(frames.unpack_greeting(packed))
        if session is not None:
            with self._lock:
                if len(self._joined.get(session, ())) >= MAX_STREAMS_OF_A_SESSION:
                    raise ProtocolError(f"more than {MAX_STREAMS_OF_A_SESSION} streams of one session")
                if session.is_open:  # not expelled meanwhile: under the lock, so that `expel` has shut all there are
                    self._joined.setdefault(session, set()).add(stream)
                    self._strangers.pop(stream, None)  # no stranger takes its place from now on
                    return session
        self._fault("token", "a token that opens nothing")
        stream.sendall(frames.pack_answer(frames.UNKNOWN))
        return None

    def _receive(self, stream: socket.socket, session: WriteSession, source: Any) -> None:
        head_bytes = bytearray(frames.HEAD_BYTES)
        number = 0
        # A writer whose notifications are not taken is not read from: it fills the kernel's buffers.
        while self.wait_for_room(session) and fill(stream, head_bytes):
            found, body_bytes, packed = frames.unpack_head(head_bytes)
            if found != number:
                raise ProtocolError(f"write {found} came where write {number} was to come")
            if packed is None:
                packed = bytearray(body_bytes)
                take(stream, packed)
            body = frames.unpack_body(packed)
            if body.is_coded and not self.takes_coded:
                raise ProtocolError("a payload that is encoded, which nobody here has offered to decode")
            is_landed = self._take_write(stream, session, source, body)
            stream.sendall(frames.pack_ack(number, frames.OK if is_landed else frames.REFUSED))
            number += 1

    def _take_write(self, stream: socket.socket, session: WriteSession, source: Any, body: frames.Body) -> bool:
        """Receive a write, which is checked as a whole before a byte of it lands. False: refused."""
        entered = self.enter(session, body.pieces)
        if entered is None:
            if body.is_coded:
                coded.drop(stream, [piece.nbytes for piece in merged(body.pieces)])
            else:
                self._drop(stream, sum(piece.nbytes for piece in body.pieces))
            self._fault("refused", "a write that is not inside granted spans")
            return False
        try:
            if body.is_coded:
                view = self.memory.view
                whole = merged(body.pieces)
                coded.receive(stream, [view[piece.remote : piece.remote + piece.nbytes] for piece in whole])
            else:
                self._land(stream, source, merged(body.pieces))
        except BaseException:
            self.leave(session, entered)
            raise
        if not self.land(session, entered, body.notify):
            raise ConnectionError("the session is over")
        return True

    def _fault(self, kind: str, reason: object) -> None:
        """Count a fault; only the first of a kind is logged, so that strangers cannot fill the log."""
        with self._lock:
            self.faults[kind] += 1
            is_first = self.faults[kind] == 1
        if is_first:
            # As text: an exception kept by a logger would keep this thread's frames, and with them the memory.
            text = str(reason)
            _log.warning("channel %s, %s: %s (the next ones are only counted)", self.scheme, kind, text)
