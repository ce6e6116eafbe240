"""Channels by UCX, through UCXX, the library that replaced UCX-Py: RDMA, shared memory or TCP, as UCX finds best.

region → one UCX worker and a thread · remote region → the worker's address · channel → an endpoint each way · write → a
message that describes it, and a tagged message for each run of its pieces · notification → inside the description.

UCXX has no one-sided operations for Python, so a write is received: what it says is checked against the session's spans
first, then each run is received straight to its place, and the reader answers. UCX reads large runs out of the writer's
memory or sends them in pieces; either way the reader's endpoint is in command, and closing it ends all that lands.

UCX has no authentication: whoever reaches its port may write to this process (docs/adr/0014-ucx-and-nixl.md).
"""

from __future__ import annotations

import ipaddress
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from pdx.channel import (
    Availability,
    Channel,
    Listener,
    Memory,
    Notification,
    Piece,
    Region,
    RemoteRegion,
    Transfer,
    check_write,
)
from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable, ProtocolError, TransferAborted, WriteRefused
from pdx.transports import ucx_engine
from pdx.transports.sealed import seal, unseal
from pdx.transports.sessions import Session, Sessions
from pdx.transports.ucx_engine import Endpoint, UcxEngine
from pdx.transports.ucx_messages import (
    CONTROL_TAG,
    FAILED,
    LANE_MASK,
    MAX_LANE,
    MAX_MESSAGE_BYTES,
    OK,
    REFUSED,
    WINDOW,
    Done,
    End,
    Greet,
    Message,
    Put,
    Welcome,
    decode,
    payload_tag,
    runs,
)

# Of UCX. A dead process of this host is noticed after two keepalive intervals. With get_zcopy the reader's side moves
# the bytes wherever the technology can, so nothing lands behind its back.
_SETTINGS = {"KEEPALIVE_INTERVAL": "1s", "RNDV_THRESH": "8192"}
_LOOPBACK_SETTINGS = {"NET_DEVICES": "lo"}
_DRAIN_S = 0.25  # for writes under way to end by themselves before a channel is closed by force
_LOST_S = 2.5  # for UCX to notice that the reader has closed its endpoint
_SETTLE_S = 3.0  # for UCX to let go of what a closed endpoint had under way
_DEAD_LANES = 64  # of closed channels, whose late messages are still thrown away

_encode = msgspec.msgpack.encode


class UcxTransfer(Transfer):
    """A write. The engine's thread moves it; others only look."""

    def __init__(self, channel: UcxChannel, pieces: Sequence[Piece], notify: bytes) -> None:
        self.pieces = pieces
        self.notify = notify
        self.answer: ChannelError | None = None  # of the reader, once it has answered
        self.has_answer = False
        self.is_sent = False
        self.is_aborted = False
        self._channel = channel
        self._is_over = False

    def poll(self) -> bool:
        """See `Transfer.poll`."""
        return self._is_over

    def abort(self) -> None:
        """It is not begun if it waits behind others; what UCX has begun, it finishes."""
        self.is_aborted = True
        self._channel.abort(self)

    def end(self, error: ChannelError | None) -> None:
        """It is over; the first call counts."""
        if not self._is_over:
            self.error = error
            self._is_over = True


class UcxChannel(Channel):
    """To one session of another worker's region. All but `write`, `close` and `abort` is its thread's."""

    def __init__(self, region: UcxRegion, remote: RemoteRegion) -> None:
        self.id = secrets.token_bytes(16)
        self.answered = threading.Event()  # welcome, or lost
        self.lane = -1
        self._region = region
        self._remote = remote
        self._endpoint: Endpoint | None = None
        self._lock = threading.Lock()  # guards _is_open: nothing is queued behind `close`
        self._is_open = True
        self._waiting: deque[UcxTransfer] = deque()
        self._under_way: dict[int, UcxTransfer] = {}
        self._number = 0

    def __repr__(self) -> str:
        return f"<UcxChannel {self.id.hex()[:8]} {len(self._under_way)} under way {len(self._waiting)} waiting>"

    def greet(self, address: bytes) -> None:
        """Connect and show the token."""
        self._endpoint = self._region.engine.connect(address, lambda: self.lose("the peer is gone"))
        self._region.channels[self.id] = self
        self._say(Greet(self._remote.token, self.id, self._region.engine.address))

    def welcome(self, lane: int) -> None:
        """The reader knows the token."""
        self.lane = lane
        self.answered.set()

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """See `Channel.write`."""
        check_write(pieces, notify, self._region.memory.nbytes, self._remote.nbytes)
        transfer = UcxTransfer(self, pieces, notify)
        with self._lock:
            if self._is_open:
                self._region.engine.run(lambda: self._queue(transfer))
            else:
                transfer.end(ChannelBroken("the channel is closed"))
        return transfer

    def close(self) -> None:
        """See `Channel.close`."""
        self.lose("the channel was closed")

    def lose(self, why: str, grace_s: float = 0.0) -> None:
        """End it, from any thread. `grace_s`: there is a reason why UCX will soon find the peer gone."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        self._region.on_thread(lambda: self._end(why if was_open else "the channel is closed", grace_s))

    def abort(self, transfer: UcxTransfer) -> None:
        """Drop it if it has not begun."""
        self._region.engine.run(lambda: self._drop(transfer))

    def done(self, number: int, status: int) -> None:
        """The reader has answered."""
        transfer = self._under_way.get(number)
        if transfer is None or transfer.has_answer:
            return
        transfer.has_answer = True
        if status == REFUSED:
            transfer.answer = WriteRefused("not inside granted spans")
        elif status != OK:
            transfer.answer = ChannelBroken("the reader could not receive it")
        self._finish(number, transfer)

    def _queue(self, transfer: UcxTransfer) -> None:
        self._waiting.append(transfer)
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._under_way) < WINDOW:
            transfer = self._waiting.popleft()
            if transfer.is_aborted:
                transfer.end(TransferAborted("it was aborted before it began"))
                self._region.wake()
            elif self._endpoint is None:
                transfer.end(ChannelBroken("the channel is closed"))
                self._region.wake()
            else:
                self._send(self._endpoint, transfer)

    def _send(self, endpoint: Endpoint, transfer: UcxTransfer) -> None:
        number = self._number
        self._number = (number + 1) % (1 << 32)
        self._under_way[number] = transfer

        def sent(is_good: bool) -> None:
            transfer.is_sent = True
            if not is_good and not transfer.has_answer:
                transfer.has_answer = True
                transfer.answer = ChannelBroken("UCX could not send it")
            self._finish(number, transfer)

        self._say(Put(self.id, number, list(transfer.pieces), transfer.notify))
        view = self._region.memory.view
        views = [view[run.local : run.local + run.nbytes] for run in runs(transfer.pieces)]
        endpoint.send(views, payload_tag(self.lane, number), sent)

    def _finish(self, number: int, transfer: UcxTransfer) -> None:
        if transfer.has_answer and transfer.is_sent and self._under_way.pop(number, None) is not None:
            transfer.end(transfer.answer)
            self._region.wake()
            self._begin()

    def _drop(self, transfer: UcxTransfer) -> None:
        if transfer in self._waiting:
            self._waiting.remove(transfer)
            transfer.end(TransferAborted("it was aborted before it began"))
            self._region.wake()

    def _say(self, message: Message) -> None:
        if self._endpoint is not None:
            self._endpoint.send([_encode(message)], CONTROL_TAG, lambda _: None)

    def _end(self, why: str, grace_s: float) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            return
        self._say(End(self.id))
        self._endpoint = None
        self._region.channels.pop(self.id, None)
        if grace_s:
            endpoint.close(grace_s)
        else:
            self._settle(_DRAIN_S)
            endpoint.close()
        for number, transfer in list(self._under_way.items()):
            if not transfer.has_answer:
                transfer.has_answer = True
                transfer.answer = ChannelBroken(why)
                self._finish(number, transfer)
        self._begin()
        if not grace_s:
            self._settle(_SETTLE_S)
        for transfer in self._under_way.values():
            transfer.end(transfer.answer)
        self._under_way.clear()
        self.answered.set()
        self._region.wake()

    def _settle(self, timeout_s: float) -> None:
        self._region.engine.settle(lambda: all(transfer.is_sent for transfer in self._under_way.values()), timeout_s)


@dataclass(eq=False)
class _Inbound:
    """One writer's connection. Only the engine's thread uses it."""

    id: bytes
    session: Session
    lane: int
    endpoint: Endpoint | None = None
    landing: dict[int, list[int]] = field(default_factory=dict)  # write -> what it has entered

    def say(self, message: Message) -> None:
        """Answer."""
        if self.endpoint is not None:
            self.endpoint.send([_encode(message)], CONTROL_TAG, lambda _: None)


class UcxListener(Listener):
    """Receives writes. What is not public belongs to the engine's thread, but for `_sessions`, which locks itself."""

    def __init__(self, region: UcxRegion) -> None:
        self._region = region
        self._sessions = Sessions(region.memory.nbytes, region.wake)
        self._inbounds: dict[bytes, _Inbound] = {}  # by channel
        self._lanes: set[int] = set()
        self._dead_lanes: deque[int] = deque(maxlen=_DEAD_LANES)
        self.dropped = 0  # messages that belong to nobody

    def invite(self, token: bytes) -> RemoteRegion:
        """See `Listener.invite`."""
        self._sessions.open(token)
        return seal(UcxRegion.scheme, self._region.memory.nbytes, token, self._region.engine.address)

    def grant(self, token: bytes, offset: int, nbytes: int) -> None:
        """See `Listener.grant`."""
        self._sessions.grant(token, offset, nbytes)

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        """See `Listener.revoke`."""
        return self._sessions.revoke(token, offset, nbytes)

    def take(self) -> list[Notification]:
        """See `Listener.take`."""
        return self._sessions.take()

    def expel(self, token: bytes) -> None:
        """See `Listener.expel`."""
        self._sessions.expel(token)
        self._region.engine.run(lambda: self._end_all(lambda inbound: inbound.session.token == token))

    def close(self) -> None:
        """See `Listener.close`. When it returns nothing lands any more."""
        self._sessions.expel_all()
        self._region.on_thread(lambda: self._end_all(lambda _: True))

    def greeted(self, message: Greet) -> None:
        """A writer shows a token. A stranger's address is not even parsed, so it gets no answer."""
        session = self._sessions.find(message.token)
        if session is None or message.channel in self._inbounds:
            self.dropped += 1
            return
        lane = secrets.randbelow(MAX_LANE + 1)
        while lane in self._lanes:
            lane = secrets.randbelow(MAX_LANE + 1)
        inbound = _Inbound(message.channel, session, lane)
        inbound.endpoint = self._region.engine.connect(message.address, lambda: self.end(inbound.id))
        self._lanes.add(lane)
        self._inbounds[inbound.id] = inbound
        inbound.say(Welcome(inbound.id, lane))
        self._discard_late()

    def put(self, message: Put) -> None:
        """A write is coming: receive it, or throw it away."""
        inbound = self._inbounds.get(message.channel)
        if inbound is None or inbound.endpoint is None:
            self.dropped += 1
            self._discard_late()
            return
        if message.number in inbound.landing or len(inbound.landing) >= WINDOW:
            self.end(inbound.id)  # no writer of ours does that
            return
        nbytes = self._region.memory.nbytes
        is_inside = all(piece.remote + piece.nbytes <= nbytes for piece in message.pieces)
        entered = self._sessions.enter(inbound.session, message.pieces) if is_inside else None
        inbound.landing[message.number] = entered or []
        places = runs(message.pieces)
        tag = payload_tag(inbound.lane, message.number)
        if entered is None:
            scrap = [bytearray(1) for _ in places]  # too small, so that UCX drops what comes
            inbound.endpoint.receive(scrap, tag, lambda _: self._refused(inbound, message.number))
            return
        view = self._region.memory.view
        targets = [view[place.remote : place.remote + place.nbytes] for place in places]
        inbound.endpoint.receive(targets, tag, lambda is_good: self._landed(inbound, message, is_good))

    def end(self, channel: bytes) -> None:
        """The writer is gone, or has to go."""
        inbound = self._inbounds.pop(channel, None)
        if inbound is None or inbound.endpoint is None:
            return
        inbound.say(End(inbound.id))
        endpoint, inbound.endpoint = inbound.endpoint, None
        endpoint.close(_DRAIN_S)
        self._lanes.discard(inbound.lane)
        self._dead_lanes.append(inbound.lane)
        self._discard_late()

    def _end_all(self, chosen: Callable[[_Inbound], bool]) -> None:
        ended = [inbound for inbound in self._inbounds.values() if chosen(inbound)]
        for inbound in ended:
            self.end(inbound.id)
        self._region.engine.settle(lambda: not any(inbound.landing for inbound in ended), _SETTLE_S)

    def _landed(self, inbound: _Inbound, message: Put, is_good: bool) -> None:
        entered = inbound.landing.pop(message.number)
        if not is_good:
            self._sessions.leave(inbound.session, entered)
            inbound.say(Done(inbound.id, message.number, FAILED))
        elif self._sessions.land(inbound.session, entered, message.notify):
            inbound.say(Done(inbound.id, message.number, OK))
        # else it was expelled meanwhile, and its End is coming

    def _refused(self, inbound: _Inbound, number: int) -> None:
        del inbound.landing[number]
        inbound.say(Done(inbound.id, number, REFUSED if inbound.session.is_open else FAILED))

    def _discard_late(self) -> None:
        for lane in self._dead_lanes:
            self._region.engine.discard(payload_tag(lane, 0), CONTROL_TAG | LANE_MASK)


class UcxRegion(Region):
    """Memory that a UCX worker of its own sends from and receives to."""

    scheme: ClassVar[str] = "ucx"
    settings: ClassVar[dict[str, str]] = {}  # more of UCX

    def __init__(self, memory: Memory, settings: dict[str, str], wake: Callable[[], None]) -> None:
        self.memory = memory
        self.wake = wake
        self.channels: dict[bytes, UcxChannel] = {}  # the engine's thread's
        self._listener = UcxListener(self)
        self.engine = UcxEngine(settings, CONTROL_TAG, MAX_MESSAGE_BYTES, self._receive)

    def __repr__(self) -> str:
        return f"<UcxRegion {self.memory} {len(self.channels)} channels>"

    @classmethod
    def availability(cls) -> Availability:
        """See `Region.availability`."""
        return ucx_engine.availability()

    @classmethod
    def register(cls, memory: Memory, *, host: str = "127.0.0.1", wake: Callable[[], None] = lambda: None) -> UcxRegion:
        """See `Region.register`.

        UCX listens on the loopback interface alone if `host` is a loopback address, else on every interface. The user's
        UCX_NET_DEVICES has precedence; UCX_TLS says by what means.
        """
        found = cls.availability()
        if not found.is_ok:
            raise ChannelUnavailable(f"{found.why}; {found.fix}")
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        return cls(memory, {**_SETTINGS, **(_LOOPBACK_SETTINGS if is_loopback else {}), **cls.settings}, wake)

    def listen(self) -> UcxListener:
        """See `Region.listen`. The worker is listening since it was made."""
        return self._listener

    def connect(self, remote: RemoteRegion, *, timeout_s: float = 5.0) -> UcxChannel:
        """See `Region.connect`."""
        address = unseal(self.scheme, remote)
        channel = UcxChannel(self, remote)
        self.engine.call(lambda: channel.greet(address))
        if not channel.answered.wait(timeout_s) or channel.lane < 0:
            channel.close()
            raise ChannelBroken(f"nobody answers within {timeout_s} s, or does not know the token")
        return channel

    def on_thread(self, work: Callable[[], None]) -> None:
        """Have the engine's thread do this, unless it has ended and everything with it."""
        try:
            self.engine.call(work)
        except ChannelBroken:
            return

    def close(self) -> None:
        """See `Region.close`."""
        self.on_thread(self._close_channels)
        self._listener.close()
        self.engine.close()

    def _close_channels(self) -> None:
        for channel in list(self.channels.values()):
            channel.lose("the region was closed")

    def _receive(self, data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError:
            self._listener.dropped += 1
            return
        if isinstance(message, Greet):
            self._listener.greeted(message)
        elif isinstance(message, Put):
            self._listener.put(message)
        elif (channel := self.channels.get(message.channel)) is None:
            if isinstance(message, End):
                self._listener.end(message.channel)
        elif isinstance(message, Welcome):
            channel.welcome(message.lane)
        elif isinstance(message, Done):
            channel.done(message.number, message.status)
        else:
            channel.lose("the reader has closed it", _LOST_S)
