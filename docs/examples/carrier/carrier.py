"""A channel that carries bytes through Unix sockets. docs/tutorials/add-a-channel.md explains it.

A writer's stream: its token, then for each write a head, a verdict from the reader, the bytes, and a word that they are
there. One write at a time; nothing is sent before the reader has looked at the head.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable, TransferAborted, WriteRefused
from pdx.transports.channel import (
    MAX_NOTIFY_BYTES,
    MAX_PIECES,
    TOKEN_BYTES,
    Availability,
    Channel,
    Memory,
    Piece,
    Region,
    RemoteRegion,
    Transfer,
    check_write,
)
from pdx.transports.sessions import SessionListener, WriteSession

YES, NO = b"\1", b"\0"
GREETING_S = 5.0
MAX_HEAD_BYTES = 512 << 10


# ---- what is said -------------------------------------------------------------------------------


class Address(msgspec.Struct, array_like=True, frozen=True):
    """Where a listener is: its host and network namespace, and a name that nobody can guess."""

    place: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What a write is going to be."""

    pieces: Annotated[list[Piece], Meta(min_length=1, max_length=MAX_PIECES)]
    notify: Annotated[bytes, Meta(max_length=MAX_NOTIFY_BYTES)]


def here() -> str:
    """Abstract Unix sockets reach no further than this."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")


def receive(stream: socket.socket, view: memoryview) -> None:
    """Fill `view`.

    :raises OSError: the stream ended or broke before.
    """
    while view.nbytes:
        count = stream.recv_into(view)
        if not count:
            raise ConnectionError("the other side is gone")
        view = view[count:]


def received(stream: socket.socket, nbytes: int) -> bytes:
    """The next `nbytes` bytes."""
    data = bytearray(nbytes)
    receive(stream, memoryview(data))
    return bytes(data)


def shut(stream: socket.socket) -> None:
    """Wake whoever waits at either end."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


# ---- the writing side ---------------------------------------------------------------------------


class CarrierTransfer(Transfer):
    """One write."""

    def __init__(self, head: Head, wake: threading.Event) -> None:
        super().__init__(wake)
        self.head = head
        self.is_aborted = False

    def abort(self) -> None:
        """See `Transfer.abort`: a write that has begun runs on."""
        self.is_aborted = True


class CarrierChannel(Channel):
    """A stream, and a thread that sends one write after the other."""

    def __init__(self, stream: socket.socket, memory: Memory, remote_nbytes: int, wake: threading.Event) -> None:
        self._stream = stream
        self._memory = memory
        self._remote_nbytes = remote_nbytes
        self._wake = wake
        self._writes: SimpleQueue[CarrierTransfer | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards is_closed, and that nothing is queued behind the None of `close`
        self._thread = threading.Thread(target=self._run, name="carrier-write", daemon=True)
        self._thread.start()

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """See `Channel.write`."""
        check_write(pieces, notify, self._memory.nbytes, self._remote_nbytes)
        transfer = CarrierTransfer(Head(list(pieces), notify), self._wake)
        with self._lock:
            if self.is_closed:
                transfer.finish(ChannelBroken("the channel is closed"))
            else:
                self._writes.put(transfer)
        return transfer

    def close(self) -> None:
        """See `Channel.close`. What is queued fails, because the stream is shut."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
        shut(self._stream)
        if not was_closed:
            self._writes.put(None)
        self._thread.join()
        self._stream.close()

    def _run(self) -> None:
        while (transfer := self._writes.get()) is not None:
            transfer.finish(self._carry(transfer))

    def _carry(self, transfer: CarrierTransfer) -> ChannelError | None:
        if transfer.is_aborted:
            return TransferAborted("aborted before it began")
        head = msgspec.msgpack.encode(transfer.head)
        try:
            self._stream.sendall(len(head).to_bytes(4, "big") + head)
            if received(self._stream, 1) == NO:
                return WriteRefused("not inside granted spans")
            for piece in transfer.head.pieces:
                self._stream.sendall(self._memory.view[piece.local : piece.local + piece.nbytes])
            received(self._stream, 1)
        except OSError as error:
            shut(self._stream)  # half a write may be on its way: nothing more can be sent behind it
            return ChannelBroken(str(error))
        return None


# ---- the reading side ---------------------------------------------------------------------------


class CarrierListener(SessionListener):
    """Accepts streams; a thread for each receives straight into the memory."""

    def __init__(self, memory: Memory, wake: threading.Event) -> None:
        name = secrets.token_hex(16)
        detail = msgspec.msgpack.encode(Address(here(), name))
        super().__init__(CarrierRegion.scheme, memory.nbytes, wake, detail)
        self._memory = memory
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(f"\0carrier-{name}")
        self._server.listen()
        # The lock of sessions guards the two below, too.
        self._streams: dict[socket.socket, bytes] = {}  # each with its session's token, empty before it is told
        self._threads: set[threading.Thread] = set()
        self._start(self._accept)

    def expel(self, token: bytes) -> None:
        """And its streams end."""
        super().expel(token)
        with self._lock:
            for stream, its_token in self._streams.items():
                if its_token == token:
                    shut(stream)

    def close(self) -> None:
        """When it returns, no thread writes to the memory any more."""
        super().close()
        shut(self._server)
        with self._lock:
            for stream in self._streams:
                shut(stream)
        while threads := self._running():
            for thread in threads:
                thread.join()
        self._server.close()

    def _running(self) -> list[threading.Thread]:
        with self._lock:
            return list(self._threads)

    def _start(self, target: Callable[..., None], *arguments: socket.socket) -> None:
        def run() -> None:
            target(*arguments)
            with self._lock:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="carrier-read", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the end: the server is shut
            while True:
                stream, _ = self._server.accept()
                with self._lock:
                    self._streams[stream] = b""
                self._start(self._serve, stream)

    def _serve(self, stream: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, msgspec.DecodeError):  # the end of a stream is the end of its channel
                session = self._greet(stream)
                while session is not None and self.wait_for_room(session) and self._take_in(stream, session):
                    pass
        finally:
            with self._lock:
                del self._streams[stream]
            stream.close()

    def _greet(self, stream: socket.socket) -> WriteSession | None:
        stream.settimeout(GREETING_S)  # a stranger has so long to say who it is
        token = received(stream, TOKEN_BYTES)
        with self._lock:
            self._streams[stream] = token
        session = self.find(token)  # behind the line above, so that `expel` meets one of the two
        stream.sendall(YES if session else NO)
        stream.settimeout(None)  # a friend may be silent for ever
        return session

    def _take_in(self, stream: socket.socket, session: WriteSession) -> bool:
        """One write. Whether another may follow."""
        nbytes = int.from_bytes(received(stream, 4), "big")
        if nbytes > MAX_HEAD_BYTES:
            return False
        head = msgspec.msgpack.decode(received(stream, nbytes), type=Head)
        entered = self.enter(session, head.pieces)
        if entered is None and not session.is_open:
            return False
        if entered is None:
            stream.sendall(NO)
            return True
        try:
            stream.sendall(YES)
            for piece in head.pieces:
                receive(stream, self._memory.view[piece.remote : piece.remote + piece.nbytes])
        except OSError:
            self.leave(session, entered)
            raise
        is_heard = self.land(session, entered, head.notify)
        if is_heard:
            stream.sendall(YES)
        return is_heard


# ---- the region ---------------------------------------------------------------------------------


class CarrierRegion(Region):
    """Host memory; nothing is registered anywhere."""

    scheme: ClassVar[str] = "carrier"
    crosses_wire: ClassVar[bool] = False  # bytes stay in this host's memory
    # Another user of this host could take a dead listener's name, be told the token and use it elsewhere.
    is_authenticated: ClassVar[bool] = False

    @classmethod
    def availability(cls) -> Availability:
        """On Linux."""
        if not Path("/proc/self/ns/net").exists():
            return Availability(False, "this is not Linux", "use tcp")
        return Availability(True)

    def _listening(self) -> CarrierListener:
        try:
            return CarrierListener(self.memory, self.wake)
        except OSError as error:
            raise ChannelUnavailable(f"cannot listen: {error}") from error

    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: threading.Event) -> CarrierChannel:
        name = self._name_of(remote)
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(timeout_s)
            stream.connect(f"\0carrier-{name}")
            stream.sendall(remote.token)
            if received(stream, 1) == NO:
                raise ConnectionError("it does not know this token")
            stream.settimeout(None)
        except OSError as error:
            stream.close()
            raise ChannelBroken(f"carrier: {error}") from error
        return CarrierChannel(stream, self.memory, remote.nbytes, wake)

    def _name_of(self, remote: RemoteRegion) -> str:
        """What a peer says of itself is a stranger's word: typed, bounded, and checked."""
        try:
            address = msgspec.msgpack.decode(remote.detail, type=Address)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ChannelUnavailable(f"not an address of a carrier listener: {error}") from error
        if address.place != here():
            raise ChannelUnavailable("the peer runs on another host, or in another network namespace")
        return address.name
