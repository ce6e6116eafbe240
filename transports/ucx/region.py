"""Channels by UCX, through UCXX, which replaced UCX-Py: RDMA if there is any, else TCP, on one host, too.

region → one UCX worker and a thread · remote region → the worker's address · channel → an endpoint each way · write → a
message that describes it, and a tagged message for each run of its pieces · notification → inside the description.

UCXX has no one-sided operations for Python, so a write is received: its description is checked against the session's
spans first, then each run is received straight to its place, and the reader answers. A receive that is over, or was
cancelled with its endpoint, lands nothing more: that is what `revoke` waits for.

Memory of a GPU is sent and received as such, if UCX is one with CUDA; either side of a write may be a GPU's.

UCX has no authentication: anyone who reaches its port may write to this process (docs/adr/0018-nixl-and-ucx.md).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

import msgspec

from pdx.cuda.memory import DeviceSpan
from pdx.errors import ChannelBroken, ProtocolError
from pdx.transports.channel import Availability, Memory, Notification, Region, RemoteRegion, merged
from pdx.transports.over_ucx import sealed, settings_for, unsealed
from pdx.transports.sessions import SessionListener, WriteSession
from pdx.transports.ucx import engine as ucx_engine
from pdx.transports.ucx import messages
from pdx.transports.ucx.channel import GRACE_S, UcxChannel
from pdx.transports.ucx.engine import Buffer, Endpoint, UcxEngine

_SETTLE_S = 3.0  # for UCX to let go of what closed endpoints had in flight; longer than GRACE_S
MAX_CHANNELS_OF_A_SESSION = 64
_DEAD_LANES = 64  # of closed channels, whose late messages are still discarded

_encode = msgspec.msgpack.encode


@dataclass(eq=False)
class _Inbound:
    """One writer's connection. Only the engine's thread uses it."""

    id: bytes
    session: WriteSession
    lane: int
    endpoint: Endpoint | None = None
    landing: dict[int, list[int]] = field(default_factory=dict)  # write -> what it has entered
    held: deque[messages.Put] = field(default_factory=deque)  # until notifications of its session are taken

    def say(self, message: messages.Message) -> None:
        if self.endpoint is not None:
            self.endpoint.send([_encode(message)], messages.CONTROL_TAG, lambda _: None)


class UcxListener(SessionListener):
    """Receives writes. Private state belongs to the engine's thread, except for the sessions, which have a lock."""

    def __init__(self, region: UcxRegion) -> None:
        super().__init__(region.scheme, region.memory.nbytes, region.wake, region.engine.address)
        self._region = region
        self._inbounds: dict[bytes, _Inbound] = {}  # by channel
        self._lanes: set[int] = set()
        self._dead_lanes: deque[int] = deque(maxlen=_DEAD_LANES)
        self._holding: dict[bytes, _Inbound] = {}  # those that hold writes; `take` looks whether there are some
        self.dropped = 0  # messages without a session

    def invite(self, token: bytes) -> RemoteRegion:
        return sealed(super().invite(token))

    def expel(self, token: bytes) -> None:
        super().expel(token)
        self._region.engine.run(lambda: self._end_all(lambda inbound: inbound.session.token == token))

    def close(self) -> None:
        """When this returns, nothing lands any more."""
        super().close()
        self._region.on_thread(lambda: self._end_all(lambda _: True))

    def greeted(self, message: messages.Greet) -> None:
        """A writer shows a token. A stranger's address is not even parsed, so it gets no answer."""
        session = self.find(message.token)
        is_crowded = sum(each.session is session for each in self._inbounds.values()) >= MAX_CHANNELS_OF_A_SESSION
        if session is None or message.channel in self._inbounds or is_crowded:
            self.dropped += 1
            return
        lane = secrets.randbelow(messages.MAX_LANE + 1)
        while lane in self._lanes:
            lane = secrets.randbelow(messages.MAX_LANE + 1)
        inbound = _Inbound(message.channel, session, lane)
        inbound.endpoint = self._region.engine.connect(message.address, lambda: self.end(inbound.id))
        self._lanes.add(lane)
        self._inbounds[inbound.id] = inbound
        inbound.say(messages.Welcome(inbound.id, lane))
        self._discard_late()

    def put(self, message: messages.Put) -> None:
        """A write is coming: receive it, or discard it."""
        inbound = self._inbounds.get(message.channel)
        if inbound is None or inbound.endpoint is None:
            self.dropped += 1
            self._discard_late()
            return
        if message.number in inbound.landing or len(inbound.landing) + len(inbound.held) >= messages.WINDOW:
            self.end(inbound.id)  # no writer of PDX does that
        elif inbound.held or not inbound.session.has_room:
            inbound.held.append(message)
            self._holding[inbound.id] = inbound
            self._go_on()  # they may have been taken just now
        else:
            self._receive(inbound, message)

    def take(self) -> list[Notification]:
        found = super().take()
        if self._holding:
            self._region.engine.run(self._go_on)
        return found

    def _go_on(self) -> None:
        """Receive held writes, as far as there is room for notifications."""
        for inbound in list(self._holding.values()):
            while inbound.held and inbound.session.has_room and inbound.endpoint is not None:
                self._receive(inbound, inbound.held.popleft())
            if not inbound.held or inbound.endpoint is None:
                self._holding.pop(inbound.id, None)

    def _receive(self, inbound: _Inbound, message: messages.Put) -> None:
        assert inbound.endpoint is not None
        if message.number in inbound.landing:
            self.end(inbound.id)  # held twice
            return
        entered = self.enter(inbound.session, message.pieces)
        inbound.landing[message.number] = entered or []
        places = merged(message.pieces)
        tag = messages.payload_tag(inbound.lane, message.number)
        if entered is None:
            scrap = [bytearray(1) for _ in places]  # too small, so that UCX drops what comes
            inbound.endpoint.receive(scrap, tag, lambda _: self._refused(inbound, message.number))
            return
        targets = [self._region.span(place.remote, place.nbytes) for place in places]
        inbound.endpoint.receive(targets, tag, lambda is_good: self._landed(inbound, message, is_good))

    def end(self, channel: bytes) -> None:
        """End a connection whose writer is gone, or has to go."""
        inbound = self._inbounds.pop(channel, None)
        if inbound is None or inbound.endpoint is None:
            return
        inbound.say(messages.End(inbound.id))
        endpoint, inbound.endpoint = inbound.endpoint, None
        self._holding.pop(inbound.id, None)
        endpoint.close(GRACE_S)
        self._lanes.discard(inbound.lane)
        self._dead_lanes.append(inbound.lane)
        self._discard_late()

    def _end_all(self, chosen: Callable[[_Inbound], bool]) -> None:
        ended = [inbound for inbound in self._inbounds.values() if chosen(inbound)]
        for inbound in ended:
            self.end(inbound.id)
        self._region.engine.settle(lambda: not any(inbound.landing for inbound in ended), _SETTLE_S)

    def _landed(self, inbound: _Inbound, message: messages.Put, is_good: bool) -> None:
        entered = inbound.landing.pop(message.number)
        if not is_good:
            self.leave(inbound.session, entered)
            inbound.say(messages.Done(inbound.id, message.number, messages.FAILED))
        elif self.land(inbound.session, entered, message.notify):
            inbound.say(messages.Done(inbound.id, message.number, messages.OK))
        # else it was expelled meanwhile, and its End is coming

    def _refused(self, inbound: _Inbound, number: int) -> None:
        del inbound.landing[number]
        inbound.say(messages.Done(inbound.id, number, messages.REFUSED if inbound.session.is_open else messages.FAILED))

    def _discard_late(self) -> None:
        for lane in self._dead_lanes:
            self._region.engine.discard(messages.payload_tag(lane, 0), messages.CONTROL_TAG | messages.LANE_MASK)


class UcxRegion(Region):
    """Memory that a UCX worker of its own sends from and receives to."""

    scheme: ClassVar[str] = "ucx"
    is_authenticated: ClassVar[bool] = False  # PDX's messages are, UCX itself is not
    takes_gpus: ClassVar[bool] = True
    settings: ClassVar[dict[str, str]] = {}  # more of UCX

    def __init__(self, memory: Memory, host: str, wake: Event) -> None:
        """The user's UCX_NET_DEVICES takes precedence; UCX_TLS selects UCX's transports."""
        super().__init__(memory, host, wake)
        settings = settings_for(host, **{"RNDV_THRESH": "8192", **self.settings})
        self.channels: dict[bytes, UcxChannel] = {}  # the engine's thread's
        self.engine = UcxEngine(
            settings, messages.CONTROL_TAG, messages.MAX_MESSAGE_BYTES, self._receive, gpu=memory.gpu
        )
        self._receiver = UcxListener(self)

    @classmethod
    def availability(cls) -> Availability:
        return ucx_engine.availability()

    def _listening(self) -> UcxListener:
        return self._receiver  # the worker listens from the start

    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: Event) -> UcxChannel:
        address = unsealed(remote)
        channel = UcxChannel(self, remote, wake)
        self.engine.call(lambda: channel.greet(address))
        if not channel.answered.wait(timeout_s) or channel.lane < 0:
            channel.lose("nobody answered")
            raise ChannelBroken(f"nobody answers within {timeout_s} s, or does not know the token")
        return channel

    def span(self, offset: int, nbytes: int) -> Buffer:
        """Bytes of the memory, for UCX."""
        if self.memory.gpu:
            return DeviceSpan(self.memory.address + offset, nbytes)
        return self.memory.view[offset : offset + nbytes]

    def on_thread(self, work: Callable[[], None]) -> None:
        """Have the engine's thread do this, unless the engine has ended."""
        try:
            self.engine.call(work)
        except ChannelBroken:
            return

    def close(self) -> None:
        for channel in list(self.channels.values()):  # all begin to end before the first is waited for
            channel.lose("the region was closed")
        super().close()
        self._receiver.close()
        self.engine.close()

    def _receive(self, data: bytes) -> None:
        try:
            message = messages.decode(data)
        except ProtocolError:
            self._receiver.dropped += 1
            return
        if isinstance(message, messages.Greet):
            self._receiver.greeted(message)
        elif isinstance(message, messages.Put):
            self._receiver.put(message)
        elif (channel := self.channels.get(message.channel)) is None:
            if isinstance(message, messages.End):
                self._receiver.end(message.channel)
        elif isinstance(message, messages.Welcome):
            channel.welcome(message.lane)
        elif isinstance(message, messages.Done):
            channel.done(message.number, message.status)
        else:
            channel.lose("the reader has closed it")
