"""The writing half of channels over streams: queues, windows, acknowledgements. Subclasses say what a payload is."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from pdx.errors import (
    ChannelBroken,
    ChannelError,
    ChannelUnavailable,
    ProtocolError,
    TransferAborted,
    WriteRefused,
)
from pdx.transports.arrivals import WINDOW
from pdx.transports.channel import Channel, Piece, RemoteRegion, Transfer, check_write
from pdx.transports.frames import (
    ACK_BYTES,
    OK,
    REFUSED,
    UNREACHABLE,
    Ack,
    Greeting,
    Head,
    cut,
    pack_body,
    pack_greeting,
    pack_part,
    parts_of,
    reason_bytes,
    unpack_ack,
    unpack_reason,
)
from pdx.transports.streams import Buffer, fill, send_all, send_some, shut

_AT_ONCE_BYTES = 128 << 10  # what a call of `write` may copy itself, some ten microseconds


class StreamTransfer(Transfer):
    """One write of a `StreamChannel`, under whose lock it changes. Over when acknowledged *and* wholly sent: the local
    bytes are not free because a peer says so, only because nobody reads them any more."""

    def __init__(self, channel: StreamChannel, pieces: Sequence[Piece], packed: bytes, parts: int) -> None:
        self.pieces = pieces
        self.packed = packed
        self.parts = parts
        self.number: int | None = None  # given when its first part begins
        self.left = parts + 1  # sent parts and the acknowledgement
        self.verdict: ChannelError | None = None
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


@dataclass(frozen=True)
class _Part:
    """What a sending thread is to send: a part of a write, or the rest of one that has begun."""

    transfer: StreamTransfer
    index: int
    rest: Sequence[Buffer] = ()


class StreamChannel(Channel):
    """Writes over a group of streams that all greeted with the same token.

    Each stream has a thread that sends and one that receives acknowledgements. When one of them fails, all end, and
    the last one out declares the open transfers broken: only then nothing reads their local bytes any more.
    """

    def __init__(self, local_nbytes: int, remote: RemoteRegion, wake: Callable[[], None]) -> None:
        self._local_nbytes = local_nbytes
        self._remote = remote
        self._wake = wake
        self._streams: list[socket.socket] = []
        self._queues: list[SimpleQueue[_Part | None]] = []
        self._threads: list[threading.Thread] = []
        # The lock guards all below and the transfers. Waited for: room in the window.
        self._room = threading.Condition()
        self._broken: ChannelError | None = None
        self._open: dict[StreamTransfer, None] = {}  # in the order of their writes
        self._unacknowledged: dict[int, StreamTransfer] = {}  # in the order of their numbers
        self._next_number = 0
        self._next_stream = 0
        self._waiting: list[int] = []  # parts queued or being sent, by stream
        self._running = 0  # threads that may read local memory, or will still touch the streams

    def __repr__(self) -> str:
        state = self._broken or f"{len(self._open)} transfers open"
        return f"<{type(self).__name__} {len(self._streams)} streams, {state}>"

    @abstractmethod
    def _payload(self, pieces: list[Piece]) -> Sequence[Buffer]:
        """What is sent behind the head of a part with these pieces."""

    def start(self, streams: Sequence[socket.socket]) -> None:
        """Take over these streams, whose greetings were answered."""
        for number, stream in enumerate(streams):
            stream.settimeout(None)
            self._streams.append(stream)
            self._queues.append(SimpleQueue())
            self._waiting.append(0)
            for kind, run in (("send", self._send_parts), ("ack", self._receive_acks)):
                name = f"pdx-{self._remote.scheme}-{kind}"
                self._threads.append(threading.Thread(target=self._guard, args=(run, number), name=name, daemon=True))
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """See `Channel.write`. Large writes are cut into parts, which go over different streams."""
        check_write(pieces, notify, self._local_nbytes, self._remote.nbytes)
        parts = parts_of(sum(piece.nbytes for piece in pieces), len(self._streams))
        transfer = StreamTransfer(self, pieces, pack_body(pieces, notify), parts)
        with self._room:
            if self._broken is None:
                idle = self._place(transfer)
            else:
                transfer.finish(self._broken)
                idle = {}
        if idle:
            self._send_at_once(transfer, idle)
        elif transfer.poll():
            self._wake()
        return transfer

    def _place(self, transfer: StreamTransfer) -> dict[int, int]:
        """Queue its parts; those of idle streams are not queued but returned, stream by part.

        They are for the calling thread to send: that spares the wake-up of another.
        """
        self._open[transfer] = None
        is_next = self._has_room()
        idle = {}
        for index in range(transfer.parts):
            stream = self._next_stream
            self._next_stream = (stream + 1) % len(self._queues)
            if is_next and not self._waiting[stream]:
                idle[index] = stream
            else:
                self._queues[stream].put(_Part(transfer, index))
            self._waiting[stream] += 1
        if idle:
            self._number(transfer)
            self._running += 1
        return idle

    def _send_at_once(self, transfer: StreamTransfer, idle: dict[int, int]) -> None:
        """As much as the streams take now and costs the caller little time; their threads send the rest."""
        try:
            for index, stream in idle.items():
                rest = send_some(self._streams[stream], self._frame(transfer, index), _AT_ONCE_BYTES // len(idle))
                if rest:
                    self._queues[stream].put(_Part(transfer, index, rest))
                else:
                    self._sent(transfer, stream)
        except OSError as error:
            self._break(ChannelBroken(f"the connection broke: {error}"))
        finally:
            self._leave()

    def abort(self, transfer: StreamTransfer) -> None:
        """End it if nothing of it has begun."""
        with self._room:
            if transfer.number is not None or transfer.poll():
                return
            del self._open[transfer]
            transfer.finish(TransferAborted("aborted before it began"))
            self._room.notify_all()
        self._wake()

    @property
    def is_closed(self) -> bool:
        """Whether no thread and no stream of it is left."""
        return not self._running

    def close(self) -> None:
        """See `Channel.close`."""
        self._break(ChannelBroken("the channel is closed"))
        for thread in self._threads:
            thread.join()
        with self._room:
            self._room.wait_for(lambda: not self._running)  # a thread that is in `write`; it does not block there

    def _guard(self, run: Callable[[int], None], number: int) -> None:
        """The root of each thread: any end of one of them is the end of the channel."""
        reason: ChannelError = ChannelBroken("the peer closed the connection")
        try:
            run(number)
        except (OSError, ProtocolError) as error:
            reason = ChannelBroken(f"the connection broke: {error}")
        finally:
            self._break(reason)
            self._leave()

    def _break(self, reason: ChannelError) -> None:
        with self._room:
            if self._broken is None:
                self._broken = reason
                for stream in self._streams:
                    shut(stream)
                for queue in self._queues:
                    queue.put(None)
                self._room.notify_all()

    def _leave(self) -> None:
        with self._room:
            self._running -= 1
            if self._running:
                return
            for stream in self._streams:
                stream.close()
            over = list(self._open)
            for transfer in over:
                transfer.finish(self._broken)
            self._open.clear()
            self._unacknowledged.clear()
            self._room.notify_all()
        if over:
            self._wake()

    def _send_parts(self, number: int) -> None:
        stream, queue = self._streams[number], self._queues[number]
        while (part := queue.get()) is not None:
            transfer = part.transfer
            if part.rest:
                send_all(stream, part.rest)
            elif self._begin(transfer):
                send_all(stream, self._frame(transfer, part.index))
            else:
                with self._room:
                    self._waiting[number] -= 1
                continue
            self._sent(transfer, number)

    def _frame(self, transfer: StreamTransfer, index: int) -> Sequence[Buffer]:
        """All that is sent of one part."""
        assert transfer.number is not None
        head = Head(self._remote.token, transfer.number, index, transfer.parts, len(transfer.packed))
        payload = self._payload(cut(transfer.pieces, index, transfer.parts))
        return [*pack_part(head, transfer.packed), *payload]

    def _begin(self, transfer: StreamTransfer) -> bool:
        """A part of it is about to be sent. False if it is not to be sent (any more)."""
        with self._room:
            if transfer.number is None:
                self._room.wait_for(lambda: self._broken or transfer.poll() or self._has_room())
            if self._broken is not None or transfer.poll():
                return False
            if transfer.number is None:
                self._number(transfer)
            return True

    def _number(self, transfer: StreamTransfer) -> None:
        transfer.number = self._next_number
        self._next_number += 1
        self._unacknowledged[transfer.number] = transfer

    def _has_room(self) -> bool:
        oldest = next(iter(self._unacknowledged), self._next_number)
        return self._next_number < oldest + WINDOW

    def _receive_acks(self, number: int) -> None:
        stream = self._streams[number]
        for ack in _acks(stream):
            if not hmac.compare_digest(ack.token, self._remote.token) or ack.status not in (OK, REFUSED):
                raise ProtocolError(f"an acknowledgement that is none: status {ack.status}")
            with self._room:
                transfer = self._unacknowledged.pop(ack.number, None)
                if transfer is None:
                    raise ProtocolError(f"write {ack.number} was acknowledged and is not under way")
                if ack.status == REFUSED:
                    transfer.verdict = WriteRefused("not inside granted spans")
                self._room.notify_all()
                is_over = self._step(transfer)
            if is_over:
                self._wake()

    def _sent(self, transfer: StreamTransfer, stream: int) -> None:
        """One of its parts is with the kernel."""
        with self._room:
            self._waiting[stream] -= 1
            is_over = self._step(transfer)
        if is_over:
            self._wake()

    def _step(self, transfer: StreamTransfer) -> bool:
        """One of the things that it waits for has happened; whether it was the last."""
        transfer.left -= 1
        if transfer.left:
            return False
        del self._open[transfer]
        transfer.finish(transfer.verdict)
        return True


def _acks(stream: socket.socket) -> Iterator[Ack]:
    """All that come, until the stream ends."""
    buffer = bytearray(ACK_BYTES * 64)
    view = memoryview(buffer)
    held = 0
    while got := stream.recv_into(view[held:]):
        held += got
        whole = held - held % ACK_BYTES
        for start in range(0, whole, ACK_BYTES):
            yield unpack_ack(view[start : start + ACK_BYTES])
        view[: held - whole] = bytes(view[whole:held])
        held -= whole


def greet(stream: socket.socket, greeting: Greeting, *, deadline: float, hand_over: Callable[[], None]) -> None:
    """Say whose stream this is and wait for the answer; `hand_over` sends what belongs to the greeting.

    :raises ChannelBroken: the token is not known there.
    :raises ChannelUnavailable: the reader cannot take what was handed over, or there is nothing to hand over.
    :raises ProtocolError: the other side does not speak our protocol.
    :raises OSError: the stream broke, or the deadline is over.
    """
    stream.settimeout(max(deadline - time.monotonic(), 1e-6))
    send_all(stream, [pack_greeting(greeting)])
    hand_over()
    answer = bytearray(ACK_BYTES)
    if not fill(stream, answer, deadline=deadline):
        raise ChannelBroken("the peer closed the connection instead of answering")
    ack = unpack_ack(answer)
    if not hmac.compare_digest(ack.token, greeting.token):
        raise ProtocolError("the answer is for somebody else")
    if ack.status == UNREACHABLE:
        reason = bytearray(reason_bytes(ack))
        if reason:
            fill(stream, reason, deadline=deadline)
        raise ChannelUnavailable(f"the peer cannot reach this region's memory: {unpack_reason(reason)}")
    if ack.status != OK:
        raise ChannelBroken("the peer does not know this token")


def open_streams(
    connect: Callable[[float], socket.socket],
    token: bytes,
    count: int,
    timeout_s: float,
    hand_over: Callable[[socket.socket, int], None] = lambda stream, index: None,
) -> list[socket.socket]:
    """`count` greeted streams of one group, all or none. `connect` gets the seconds that are left.

    :raises ChannelError: see `greet`; everything else that goes wrong is `ChannelBroken`.
    """
    deadline = time.monotonic() + timeout_s
    group = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        streams = []
        try:
            for index in range(count):
                stream = stack.enter_context(connect(max(deadline - time.monotonic(), 1e-6)))
                greeting = Greeting(token, group, index, count)
                greet(stream, greeting, deadline=deadline, hand_over=partial(hand_over, stream, index))
                streams.append(stream)
        except (OSError, ProtocolError) as error:
            raise ChannelBroken(f"cannot connect: {error}") from error
        stack.pop_all()
        return streams
