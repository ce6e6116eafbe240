"""The writing half of channels over streams. Subclasses say what a payload is."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from pdx.errors import (
    ChannelBroken,
    ChannelError,
    ChannelUnavailable,
    ProtocolError,
    TransferAborted,
    WriteRefused,
)
from pdx.transports.channel import Channel, Memory, Piece, Region, RemoteRegion, Transfer, check_write, merged
from pdx.transports.frames import (
    ACK_BYTES,
    OK,
    REFUSED,
    UNREACHABLE,
    pack_body,
    pack_greeting,
    pack_write,
    reason_bytes,
    unpack_ack,
    unpack_reason,
)
from pdx.transports.inbound import StreamListener
from pdx.transports.streams import Buffer, fill, send_all, send_some, shut

_AT_ONCE_BYTES = 128 << 10  # what a call of `write` may copy itself, some ten microseconds
_BLOCKING_BYTES = 4 << 20  # that a thread sends between two looks at acknowledgements
_BUSY_BYTES = 1 << 20  # a stream with less under way takes another write before the next stream is used
_MAX_ACKS = 64  # that are received at once


class StreamTransfer(Transfer):
    """One write of a `StreamChannel`, under whose lock it changes."""

    def __init__(self, channel: StreamChannel, pieces: Sequence[Piece], packed: bytes) -> None:
        self.pieces = pieces
        self.packed = packed
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.number: int | None = None  # on its stream; given when its first byte is sent
        self.unsent: Sequence[Buffer] = ()  # once it has a number
        self._channel = channel
        self._is_over = False

    def poll(self) -> bool:
        """See `Transfer.poll`."""
        return self._is_over

    def abort(self) -> None:
        """See `Transfer.abort`. A write of which a byte may have been sent runs on."""
        self._channel.abort(self)

    def finish(self, error: ChannelError | None) -> None:
        """It is over."""
        self.error = error
        self._is_over = True


class _Stream:
    """One socket: writes go out and are acknowledged in one order. The channel's lock guards all of it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # there is something to send
        self.queue: deque[StreamTransfer] = deque()  # not wholly sent
        self.begun: deque[StreamTransfer] = deque()  # begun and not acknowledged
        self.next_number = 0
        self.nbytes = 0  # of all that are not over


class StreamChannel(Channel):
    """Writes over streams that all greeted with the same token; each write goes over one of them.

    Each stream has one thread, which sends and receives acknowledgements. When one stream fails, all end. The thread
    of a stream declares the stream's open writes broken when it ends: only then nothing reads their local bytes.
    """

    def __init__(self, local_nbytes: int, remote: RemoteRegion, wake: Callable[[], None]) -> None:
        self._local_nbytes = local_nbytes
        self._remote = remote
        self._wake = wake
        self._lock = threading.Lock()  # guards all below, and the transfers
        self._streams: list[_Stream] = []  # without those that have ended
        self._threads: list[threading.Thread] = []
        self._broken: ChannelError | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._streams)} streams, {self._broken or 'open'}>"

    @abstractmethod
    def _payload(self, pieces: list[Piece]) -> Sequence[Buffer]:
        """What is sent behind the head of a write with these pieces."""

    def start(self, socks: Sequence[socket.socket]) -> None:
        """Take over these streams, whose greetings were answered.

        :raises ChannelBroken: no thread or descriptor is left for them.
        """
        name = f"pdx-{self._remote.scheme}-send"
        try:
            for sock in socks:
                sock.settimeout(None)
                stream = _Stream(sock)
                self._streams.append(stream)
                thread = threading.Thread(target=self._run, args=(stream,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except (OSError, RuntimeError) as error:
            self.close()
            while self._streams:  # one whose thread has not started
                os.close(self._streams.pop().bell)
            for sock in socks:
                sock.close()
            raise ChannelBroken(f"cannot connect: {error}") from error

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """See `Channel.write`."""
        check_write(pieces, notify, self._local_nbytes, self._remote.nbytes)
        transfer = StreamTransfer(self, pieces, pack_body(pieces, notify))
        with self._lock:
            if self._broken is None:
                self._put(transfer)
                return transfer
            transfer.finish(self._broken)
        self._wake()
        return transfer

    def _put(self, transfer: StreamTransfer) -> None:
        """Queue it. If nothing is before it, send what the stream takes now and costs the caller little time: that
        spares the wake-up of a thread. Never blocks."""
        stream = min(self._streams, key=lambda each: each.nbytes // _BUSY_BYTES)
        stream.queue.append(transfer)
        stream.nbytes += transfer.nbytes
        if len(stream.queue) > 1:
            return
        self._begin(stream, transfer)
        try:
            self._sent(stream, send_some(stream.sock, transfer.unsent, _AT_ONCE_BYTES, socket.MSG_DONTWAIT))
        except OSError as error:
            self._break(ChannelBroken(f"the connection broke: {error}"))
            return
        if stream.queue:
            os.eventfd_write(stream.bell, 1)

    def abort(self, transfer: StreamTransfer) -> None:
        """End it if nothing of it has begun."""
        with self._lock:
            stream = next((each for each in self._streams if transfer in each.queue), None)
            if stream is None or transfer.number is not None:
                return
            stream.queue.remove(transfer)
            stream.nbytes -= transfer.nbytes
            transfer.finish(TransferAborted("aborted before it began"))
        self._wake()

    @property
    def is_closed(self) -> bool:
        """Whether no thread and no stream of it is left."""
        return not self._streams

    def close(self) -> None:
        """See `Channel.close`."""
        with self._lock:
            self._break(ChannelBroken("the channel is closed"))
        for thread in self._threads:
            thread.join()

    def _break(self, reason: ChannelError) -> None:
        """End all streams: their threads come back. Under the lock."""
        if self._broken is None:
            self._broken = reason
            for stream in self._streams:
                shut(stream.sock)

    def _begin(self, stream: _Stream, transfer: StreamTransfer) -> None:
        """Its first byte is about to be sent. Under the lock."""
        transfer.number = stream.next_number
        stream.next_number += 1
        stream.begun.append(transfer)
        payload = self._payload(merged(transfer.pieces))
        transfer.unsent = [*pack_write(transfer.number, transfer.packed), *payload]

    def _sent(self, stream: _Stream, unsent: Sequence[Buffer]) -> None:
        """That much is left of the first write of the queue. Under the lock."""
        stream.queue[0].unsent = unsent
        if not unsent:
            stream.queue.popleft()

    # ---- on a stream's own thread -----------------------------------------------------------

    def _run(self, stream: _Stream) -> None:
        reason: ChannelError = ChannelBroken("the peer closed the connection")
        try:
            self._serve(stream)
        except (OSError, ProtocolError) as error:
            reason = ChannelBroken(f"the connection broke: {error}")
        finally:
            with self._lock:
                self._break(reason)
                self._streams.remove(stream)
                stream.sock.close()
                os.close(stream.bell)
                for transfer in {*stream.begun, *stream.queue}:
                    transfer.finish(self._broken)
            self._wake()

    def _serve(self, stream: _Stream) -> None:
        """Send and receive acknowledgements until the stream ends."""
        poller = select.poll()
        poller.register(stream.bell, select.POLLIN)
        poller.register(stream.sock, select.POLLIN)
        acks = bytearray()
        while True:
            ready = dict(poller.poll(0 if stream.queue else None))
            if stream.bell in ready:
                os.eventfd_read(stream.bell)
            if stream.sock.fileno() in ready:
                got = stream.sock.recv(ACK_BYTES * _MAX_ACKS)
                if not got:
                    return
                acks += got
                whole = len(acks) - len(acks) % ACK_BYTES
                self._heed(stream, bytes(acks[:whole]))
                del acks[:whole]
            self._send(stream)

    def _send(self, stream: _Stream) -> None:
        """The next bytes of the queue, if there are some. Blocks until the kernel has taken them."""
        with self._lock:
            if not stream.queue:
                return
            transfer = stream.queue[0]
            if transfer.number is None:
                self._begin(stream, transfer)
        unsent = send_some(stream.sock, transfer.unsent, _BLOCKING_BYTES)
        with self._lock:
            self._sent(stream, unsent)

    def _heed(self, stream: _Stream, acks: bytes) -> None:
        """The writes that are over: acknowledged and wholly sent. Local bytes are not free because a peer says so,
        only because nobody reads them any more."""
        with self._lock:
            for at in range(0, len(acks), ACK_BYTES):
                ack = unpack_ack(acks[at : at + ACK_BYTES])
                transfer = stream.begun[0] if stream.begun else None
                if transfer is None or transfer.number != ack.number or transfer.unsent:
                    raise ProtocolError(f"write {ack.number} was acknowledged and is not under way")
                if ack.status not in (OK, REFUSED):
                    raise ProtocolError(f"an acknowledgement that is none: status {ack.status}")
                stream.begun.popleft()
                stream.nbytes -= transfer.nbytes
                transfer.finish(None if ack.status == OK else WriteRefused("not inside granted spans"))
        self._wake()


class StreamRegion(Region):
    """What regions of the stream backends have in common: one listener, many channels, and an end of all of them. Any
    thread may use it."""

    def __init__(self, memory: Memory, host: str, wake: Callable[[], None]) -> None:
        self._memory = memory
        self._host = host
        self._wake = wake
        self._lock = threading.Lock()  # guards all below
        self._listener: StreamListener | None = None
        self._channels: list[StreamChannel] = []
        self._is_open = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._memory} {self._listener} {len(self._channels)} channels>"

    @abstractmethod
    def _listening(self) -> StreamListener:
        """A new listener, not started.

        :raises ChannelUnavailable: the address cannot be had.
        """

    @abstractmethod
    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: Callable[[], None]) -> StreamChannel:
        """A new channel, started. Raises as `Region.connect`."""

    def listen(self) -> StreamListener:
        """See `Region.listen`."""
        with self._lock:
            if not self._is_open:
                raise ChannelUnavailable("the region is closed")
            if self._listener is None:
                self._listener = self._listening()
                self._listener.start()
            return self._listener

    def connect(
        self, remote: RemoteRegion, *, timeout_s: float = 5.0, wake: Callable[[], None] | None = None
    ) -> StreamChannel:
        """See `Region.connect`."""
        if remote.scheme != self.scheme:
            raise ChannelUnavailable(f"a region of scheme {remote.scheme!r} cannot be reached over {self.scheme}")
        channel = self._connected(remote, timeout_s, wake or self._wake)
        with self._lock:
            self._channels = [each for each in self._channels if not each.is_closed] + [channel]
            is_open = self._is_open
        if not is_open:
            channel.close()
            raise ChannelBroken("the region is closed")
        return channel

    def close(self) -> None:
        """See `Region.close`."""
        with self._lock:
            self._is_open = False
            channels, self._channels = self._channels, []
            listener = self._listener
        for channel in channels:
            channel.close()
        if listener is not None:
            listener.close()


def open_streams(
    connect: Callable[[float], socket.socket],
    token: bytes,
    count: int,
    timeout_s: float,
    hand_over: Callable[[socket.socket], None] = lambda stream: None,
) -> list[socket.socket]:
    """`count` greeted streams of one session, all or none. `connect` gets the seconds that are left; `hand_over` sends
    what belongs to the greeting.

    :raises ChannelUnavailable: the reader cannot take what was handed over, or there is nothing to hand over.
    :raises ChannelBroken: the token is not known there; everything else that goes wrong.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        streams = []
        try:
            for _ in range(count):
                stream = stack.enter_context(connect(max(deadline - time.monotonic(), 1e-6)))
                stream.settimeout(max(deadline - time.monotonic(), 1e-6))
                send_all(stream, [pack_greeting(token)])
                hand_over(stream)
                _hear_answer(stream, deadline)
                streams.append(stream)
        except (OSError, ProtocolError) as error:
            raise ChannelBroken(f"cannot connect: {error}") from error
        stack.pop_all()
        return streams


def _hear_answer(stream: socket.socket, deadline: float) -> None:
    """The answer to a greeting. Raises as `open_streams`.

    :raises ProtocolError: the other side does not speak our protocol.
    :raises OSError: the stream broke, or the deadline is over.
    """
    answer = bytearray(ACK_BYTES)
    if not fill(stream, answer, deadline=deadline):
        raise ChannelBroken("the peer closed the connection instead of answering")
    ack = unpack_ack(answer)
    if ack.status == UNREACHABLE:
        reason = bytearray(reason_bytes(ack))
        if reason:
            fill(stream, reason, deadline=deadline)
        raise ChannelUnavailable(f"the peer cannot reach this region's memory: {unpack_reason(reason)}")
    if ack.status != OK:
        raise ChannelBroken("the peer does not know this token")
