"""A write by UCX, and the channel it goes over. Regions and listeners are in `pdx.transports.ucx.region`."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import ChannelBroken, ChannelError, TransferAborted, WriteRefused
from pdx.transports.channel import Channel, Piece, RemoteRegion, Transfer, check_write, merged
from pdx.transports.ucx import messages
from pdx.transports.ucx.engine import Endpoint

if TYPE_CHECKING:
    from pdx.transports.ucx.region import UcxRegion

GRACE_S = 1.5  # for what is in flight to end by itself before an endpoint is closed by force
_CLOSE_S = 4.0  # longer than force needs

_encode = msgspec.msgpack.encode


class UcxTransfer(Transfer):
    """A write. Only the engine's thread advances it."""

    def __init__(self, channel: UcxChannel, pieces: Sequence[Piece], notify: bytes) -> None:
        super().__init__(channel.wake)
        self.pieces = pieces
        self.notify = notify
        self.answer: ChannelError | None = None  # of the reader, once it has answered
        self.has_answer = False
        self.is_sent = False
        self.is_aborted = False
        self._channel = channel

    def abort(self) -> None:
        """Not begun if it still waits behind others; what UCX has begun, it finishes."""
        self.is_aborted = True
        self._channel.abort(self)


class UcxChannel(Channel):
    """To one session of another worker's region. All but `write`, `close`, `lose`, `abort` is the engine thread's."""

    def __init__(self, region: UcxRegion, remote: RemoteRegion, wake: threading.Event) -> None:
        self.id = secrets.token_bytes(16)
        self.answered = threading.Event()  # welcome, or lost
        self.lane = -1
        self._ended = threading.Event()
        self._region = region
        self.wake = wake
        self._remote = remote
        self._endpoint: Endpoint | None = None
        self._lock = threading.Lock()  # guards _is_open: nothing is queued behind `close`
        self._is_open = True
        self._waiting: deque[UcxTransfer] = deque()
        self._under_way: dict[int, UcxTransfer] = {}
        self._number = 0

    def greet(self, address: bytes) -> None:
        """Connect and show the token."""
        self._endpoint = self._region.engine.connect(address, lambda: self.lose("the peer is gone"))
        self._region.channels[self.id] = self
        self._say(messages.Greet(self._remote.token, self.id, self._region.engine.address))

    def welcome(self, lane: int) -> None:
        """The reader knows the token."""
        self.lane = lane
        self.answered.set()

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        check_write(pieces, notify, self._region.memory.nbytes, self._remote.nbytes)
        transfer = UcxTransfer(self, pieces, notify)
        with self._lock:
            if self._is_open:
                self._region.engine.run(lambda: self._queue(transfer))
            else:
                transfer.finish(ChannelBroken("the channel is closed"))
        return transfer

    def close(self) -> None:
        """Wait until UCX has let go of local memory, by force after a moment. Not on the engine's thread."""
        self.lose("the channel was closed")
        self._region.engine.wait(self._ended, _CLOSE_S)

    def lose(self, why: str) -> None:
        """Begin to end the channel. Any thread."""
        with self._lock:
            self._is_open = False
        self._region.on_thread(lambda: self._end(why))

    def abort(self, transfer: UcxTransfer) -> None:
        """Drop it if it has not begun."""
        self._region.engine.run(lambda: self._drop(transfer))

    def done(self, number: int, status: int) -> None:
        """The reader has answered."""
        error: ChannelError | None = None
        if status == messages.REFUSED:
            error = WriteRefused("not inside granted spans")
        elif status != messages.OK:
            error = ChannelBroken("the reader could not receive it")
        self._answered(number, error)

    def _queue(self, transfer: UcxTransfer) -> None:
        self._waiting.append(transfer)
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._under_way) < messages.WINDOW:
            transfer = self._waiting.popleft()
            if transfer.is_aborted:
                transfer.finish(TransferAborted("it was aborted before it began"))
            elif self._endpoint is None:
                transfer.finish(ChannelBroken("the channel is closed"))
            else:
                self._send(self._endpoint, transfer)

    def _send(self, endpoint: Endpoint, transfer: UcxTransfer) -> None:
        number = self._number
        self._number = (number + 1) % (1 << 32)
        self._under_way[number] = transfer

        def sent(is_good: bool) -> None:
            transfer.is_sent = True
            if is_good:
                self._finish(number, transfer)
            else:
                self._answered(number, ChannelBroken("UCX could not send it"))

        self._say(messages.Put(self.id, number, list(transfer.pieces), transfer.notify))
        views = [self._region.span(run.local, run.nbytes) for run in merged(transfer.pieces)]
        endpoint.send(views, messages.payload_tag(self.lane, number), sent)

    def _answered(self, number: int, error: ChannelError | None) -> None:
        """Note the outcome of a write; the first one counts."""
        transfer = self._under_way.get(number)
        if transfer is not None:
            if not transfer.has_answer:
                transfer.has_answer, transfer.answer = True, error
            self._finish(number, transfer)

    def _finish(self, number: int, transfer: UcxTransfer) -> None:
        if transfer.has_answer and transfer.is_sent and self._under_way.pop(number, None) is not None:
            transfer.finish(transfer.answer)
            self._begin()
            self._look_ended()

    def _drop(self, transfer: UcxTransfer) -> None:
        if transfer in self._waiting:
            self._waiting.remove(transfer)
            transfer.finish(TransferAborted("it was aborted before it began"))

    def _say(self, message: messages.Message) -> None:
        if self._endpoint is not None:
            self._endpoint.send([_encode(message)], messages.CONTROL_TAG, lambda _: None)

    def _end(self, why: str) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            return
        self._say(messages.End(self.id))
        self._endpoint = None
        self._region.channels.pop(self.id, None)
        for number in list(self._under_way):
            self._answered(number, ChannelBroken(why))
        self._begin()
        endpoint.close(GRACE_S)
        self._look_ended()
        self.answered.set()

    def _look_ended(self) -> None:
        if self._endpoint is None and not self._under_way:
            self.is_closed = True
            self._ended.set()
