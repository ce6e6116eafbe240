"""The writing half of channels over streams: sockets, and the threads that send and receive acknowledgements."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable, ProtocolError, TransferAborted, WriteRefused
from pdx.transports.channel import Buffer, Channel, Piece, Region, RemoteRegion, Transfer, check_write, merged
from pdx.transports.streams import coded, frames
from pdx.transports.streams.sealed import SealedBlocks
from pdx.transports.streams.sockets import fill, send_some, shut

_AT_ONCE_BYTES = 128 << 10  # what a call of `write` may copy itself, some ten microseconds
_BUSY_BYTES = 1 << 20  # a stream with less in flight takes another write before the next stream is used
_SENT_BYTES = 4 << 20  # at most, before acknowledgements are looked at again
_MAX_ACKS = 64  # that are received at once


class StreamTransfer(Transfer):
    """One write of a `StreamChannel`, under whose lock it changes."""

    def __init__(self, channel: StreamChannel, pieces: Sequence[Piece], packed: bytes) -> None:
        super().__init__(channel.wake)
        self.pieces = pieces
        self.packed = packed
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.is_coded = False
        self.number: int | None = None  # on its stream; given when its first byte is sent
        self.unsent: Sequence[Buffer] = ()  # once it has a number …
        self.blocks: coded.Blocks | SealedBlocks | None = None  # … and what follows that, encoded or sealed
        self._channel = channel

    def abort(self) -> None:
        """No-op for a write of which a byte may have been sent."""
        self._channel.abort(self)


class _Stream:
    """One socket: writes go out and are acknowledged in one order. The channel's lock guards all of it."""

    def __init__(self, sock: socket.socket, wake_fd: int) -> None:
        self.sock = sock
        self.wake_fd = wake_fd  # of its thread: there is something to send
        self.acks = bytearray()  # received in part; the thread's own
        self.queue: deque[StreamTransfer] = deque()  # not wholly sent
        self.begun: deque[StreamTransfer] = deque()  # begun and not acknowledged
        self.next_number = 0
        self.nbytes = 0  # of all that are not over


class StreamChannel(Channel):
    """Writes over streams that all greeted with the same token; each write goes over one of them.

    Threads block only in `poll`, for room and for acknowledgements: a peer that stops reading does not hold up its
    answers. When one stream fails, all end. A stream's thread declares the stream's open writes broken when it ends:
    only then does nothing read their local bytes any more.
    """

    def __init__(self, region: StreamRegion, remote: RemoteRegion, wake: threading.Event) -> None:
        self._memory = region.memory
        self._sends_bytes, self._seals = region.sends_bytes, region.seals
        self._remote = remote
        self._is_coding = region.codec != "none" and region.sends_bytes and region._decodes(remote)
        self.wake = wake
        self._lock = threading.Lock()  # guards all below, and the transfers
        self._streams: list[_Stream] = []  # without those that have ended
        self._threads: list[threading.Thread] = []
        self._broken: ChannelError | None = None

    def start(self, socks: Sequence[socket.socket]) -> None:
        """Take over these streams, whose greetings were answered.

        Sending bytes fills a core, so each stream has a thread of its own; one is enough if only heads are sent.

        :raises ChannelBroken: no thread or descriptor is left for them.
        """
        name = f"pdx-{self._remote.scheme}-send"
        try:
            for group in [[sock] for sock in socks] if self._sends_bytes else [socks]:
                wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                streams = [_Stream(sock, wake_fd) for sock in group]
                thread = threading.Thread(target=self._run, args=(streams, wake_fd), name=name, daemon=True)
                with self._lock:  # before it runs: the thread removes streams
                    self._streams += streams
                try:
                    thread.start()
                except RuntimeError:
                    os.close(wake_fd)
                    with self._lock:
                        self._streams = [each for each in self._streams if each not in streams]
                    raise
                self._threads.append(thread)
        except (OSError, RuntimeError) as error:
            self.close()
            for sock in socks:
                sock.close()
            raise ChannelBroken(f"cannot connect: {error}") from error

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        check_write(pieces, notify, self._memory.nbytes, self._remote.nbytes)
        is_coded = self._is_coding and sum(piece.nbytes for piece in pieces) >= coded.MIN_BYTES
        transfer = StreamTransfer(self, pieces, frames.pack_body(pieces, notify, is_coded=is_coded))
        transfer.is_coded = is_coded
        with self._lock:
            if self._broken is None:
                self._put(transfer)
                return transfer
            transfer.finish(self._broken)
        return transfer

    def _put(self, transfer: StreamTransfer) -> None:
        """Enqueue it. If nothing is before it, send what the stream takes now and costs the caller little time, which
        excludes what has to be encoded or sealed: that spares the wake-up of a thread. Never blocks."""
        stream = min(self._streams, key=lambda each: each.nbytes // _BUSY_BYTES)
        stream.queue.append(transfer)
        stream.nbytes += transfer.nbytes
        if len(stream.queue) > 1:
            return
        self._begin(stream, transfer)
        try:
            self._sent(stream, send_some(stream.sock, transfer.unsent, _AT_ONCE_BYTES))
        except OSError as error:
            self._break(ChannelBroken(f"the connection broke: {error}"))
            return
        if stream.queue:
            os.eventfd_write(stream.wake_fd, 1)

    def abort(self, transfer: StreamTransfer) -> None:
        """End it if nothing of it has begun."""
        with self._lock:
            stream = next((each for each in self._streams if transfer in each.queue), None)
            if stream is None or transfer.number is not None:
                return
            stream.queue.remove(transfer)
            stream.nbytes -= transfer.nbytes
            transfer.finish(TransferAborted("aborted before it began"))

    def close(self) -> None:
        with self._lock:
            self._break(ChannelBroken("the channel is closed"))
        for thread in self._threads:
            thread.join()

    def _break(self, reason: ChannelError) -> None:
        """Shut all streams, so that their threads end. Under the lock."""
        if self._broken is None:
            self._broken = reason
            for stream in self._streams:
                shut(stream.sock)

    def _begin(self, stream: _Stream, transfer: StreamTransfer) -> None:
        """Its first byte is about to be sent. Under the lock."""
        transfer.number = stream.next_number
        stream.next_number += 1
        stream.begun.append(transfer)
        unsent: list[Buffer] = [*frames.pack_write(transfer.number, transfer.packed)]
        blocks: coded.Blocks | None = None
        if self._sends_bytes:
            view = self._memory.view
            spans = [view[each.local : each.local + each.nbytes] for each in merged(transfer.pieces)]
            if transfer.is_coded:
                blocks = transfer.blocks = coded.Blocks(spans)
            else:
                unsent += spans
        if self._seals is not None:
            unsent, transfer.blocks = [], self._seals(stream.sock, unsent, blocks)
        transfer.unsent = unsent

    def _sent(self, stream: _Stream, unsent: Sequence[Buffer]) -> None:
        """Note what is left of the first write of the queue. Under the lock."""
        transfer = stream.queue[0]
        transfer.unsent = unsent
        if not unsent and not transfer.blocks:
            stream.queue.popleft()

    # ---- on a thread of the channel ---------------------------------------------------------

    def _run(self, streams: list[_Stream], wake_fd: int) -> None:
        reason: ChannelError = ChannelBroken("the peer closed the connection")
        try:
            self._serve(streams, wake_fd)
        except (OSError, ProtocolError) as error:
            reason = ChannelBroken(f"the connection broke: {error}")
        finally:
            with self._lock:
                self._break(reason)
                os.close(wake_fd)
                for stream in streams:
                    self._streams.remove(stream)
                    stream.sock.close()
                    for transfer in {*stream.begun, *stream.queue}:
                        transfer.finish(self._broken)
                self.is_closed = not self._streams

    def _serve(self, streams: list[_Stream], wake_fd: int) -> None:
        """Send and receive acknowledgements until a stream ends."""
        poller = select.poll()
        poller.register(wake_fd, select.POLLIN)
        while True:
            for stream in streams:
                poller.register(stream.sock, select.POLLIN | (select.POLLOUT if stream.queue else 0))
            ready = dict(poller.poll())
            if wake_fd in ready:
                os.eventfd_read(wake_fd)
            for stream in streams:
                found = ready.get(stream.sock.fileno(), 0)
                if found & ~select.POLLOUT and not self._hear(stream):
                    return
                if found & select.POLLOUT:
                    self._send(stream)

    def _send(self, stream: _Stream) -> None:
        """Send the next bytes of the queue, if there are some: as many as the kernel takes now."""
        with self._lock:
            if not stream.queue:
                return
            transfer = stream.queue[0]
            if transfer.number is None:
                self._begin(stream, transfer)
        unsent: Sequence[Buffer] = transfer.unsent
        if not unsent and transfer.blocks:
            unsent = transfer.blocks.take()
        unsent = send_some(stream.sock, unsent, _SENT_BYTES)
        with self._lock:
            self._sent(stream, unsent)

    def _hear(self, stream: _Stream) -> bool:
        """Receive acknowledgements, and complete their writes, which must be wholly sent. False: the stream is over.

        Local bytes are not free because a peer says so, only because nothing reads them any more.
        """
        got = stream.sock.recv(frames.ACK_BYTES * _MAX_ACKS)
        stream.acks += got
        with self._lock:
            while len(stream.acks) >= frames.ACK_BYTES:
                number, status = frames.unpack_ack(stream.acks[: frames.ACK_BYTES])
                del stream.acks[: frames.ACK_BYTES]
                transfer = stream.begun[0] if stream.begun else None
                if transfer is None or transfer.number != number or transfer.unsent or transfer.blocks:
                    raise ProtocolError(f"write {number} was acknowledged and is not under way")
                if status not in (frames.OK, frames.REFUSED):
                    raise ProtocolError(f"an acknowledgement that is none: status {status}")
                stream.begun.popleft()
                stream.nbytes -= transfer.nbytes
                transfer.finish(None if status == frames.OK else WriteRefused("not inside granted spans"))
        return bool(got)


class StreamRegion(Region):
    """What regions of the stream backends have in common: how a channel connects."""

    streams: ClassVar[int] = 2  # of a channel
    sends_bytes: ClassVar[bool]  # bytes follow the head of a write; else the reader copies them
    seals: ClassVar[type[SealedBlocks] | None] = None  # seals what is sent over a stream of `_dial`

    @abstractmethod
    def _dial(self, remote: RemoteRegion, timeout_s: float) -> socket.socket:
        """Connect a stream to the listener of that region.

        :raises ChannelUnavailable: it cannot be reached from here.
        :raises OSError: it does not answer.
        """

    def _decodes(self, remote: RemoteRegion) -> bool:
        """Whether the listener of that region says that it decodes `pdx.transports.streams.coded`."""
        return False

    def _hand_over(self, stream: socket.socket) -> None:
        """Send what belongs to the greeting.

        :raises ChannelUnavailable: it cannot be handed over.
        :raises OSError: the stream broke.
        """

    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: threading.Event) -> StreamChannel:
        """A channel over greeted streams of one session, all or none."""
        deadline = time.monotonic() + timeout_s
        channel = StreamChannel(self, remote, wake)
        with contextlib.ExitStack() as stack:
            streams = []
            try:
                for _ in range(self.streams):
                    stream = stack.enter_context(self._dial(remote, max(deadline - time.monotonic(), 1e-6)))
                    stream.settimeout(max(deadline - time.monotonic(), 1e-6))
                    stream.sendall(frames.pack_greeting(remote.token))
                    self._hand_over(stream)
                    _hear_answer(stream, deadline)
                    stream.settimeout(None)
                    streams.append(stream)
            except (OSError, ProtocolError) as error:
                raise ChannelBroken(f"cannot connect: {error}") from error
            stack.pop_all()
        channel.start(streams)
        return channel


def _hear_answer(stream: socket.socket, deadline: float) -> None:
    """Receive the answer to a greeting.

    :raises ChannelUnavailable: the reader cannot take what was handed over.
    :raises ChannelBroken: the token is not known there.
    :raises ProtocolError: the other side does not speak PDX's protocol.
    :raises OSError: the stream broke, or the deadline is over.
    """
    answer = bytearray(frames.ACK_BYTES)
    if not fill(stream, answer, deadline=deadline):
        raise ChannelBroken("the peer closed the connection instead of answering")
    number, status = frames.unpack_ack(answer)
    if status == frames.UNREACHABLE:
        if number > frames.MAX_REASON_BYTES:
            raise ProtocolError(f"a reason of {number} bytes; at most {frames.MAX_REASON_BYTES} are possible")
        reason = bytearray(number)
        if reason:
            fill(stream, reason, deadline=deadline)
        raise ChannelUnavailable(f"the peer cannot reach this region's memory: {frames.unpack_reason(reason)}")
    if status != frames.OK:
        raise ChannelBroken("the peer does not know this token")
