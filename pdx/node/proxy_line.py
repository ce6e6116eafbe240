"""The node's connection to a proxy: reports go out while it is up, cancels and lists of nodes come in."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdx.errors import ProtocolError
from pdx.node.events.follower import Follower
from pdx.security.address import needs_ipv6
from pdx.security.curve_keys import KeyPair
from pdx.security.roster import Roster
from pdx.telemetry.faults import Faults
from pdx.wire.burst import burst
from pdx.wire.messages import MAX_FRAME_BYTES, encode
from pdx.wire.proxy import FromProxy, PeerEntry, ToProxy, decode_from_proxy

log = logging.getLogger("pdx.node")

RECONNECT_MS = 1000  # at most, between two attempts to reach the proxy
_UNREAD = 64  # reports that the proxy may leave unread
_numbers = itertools.count()  # ZMQ may keep the name of a closed monitor for a while


class ProxyLine:
    """A line to worker `number` of the proxy at `base`: a DEALER that reconnects until it is closed. Not thread-safe;
    nothing blocks."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        base: str,
        number: int,
        *,
        roster: Roster,
        own: KeyPair | None,
        follower: Follower,
        faults: Faults,
    ) -> None:
        """`roster` may have the proxy's key; `own`: this node's keys.

        :raises ConfigError: see `Roster.secure_proxy`.
        """
        self.base, self.number = base, number
        self.key, self.own = roster.proxy_key(base), own  # that the two sides prove; empty, None: no key
        self.follower = follower
        self.peers: list[PeerEntry] = []  # its last list
        self.tag = ""  # prefix of its transfers' names
        self.is_up = False
        self._address = address
        self._faults = faults
        with contextlib.ExitStack() as undo:
            self._dealer = undo.enter_context(context.socket(zmq.DEALER))
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.SNDHWM, _UNREAD),
                (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
                (zmq.RECONNECT_IVL_MAX, RECONNECT_MS),
                (zmq.IPV6, int(needs_ipv6(address))),
            ):
                self._dealer.setsockopt(option, value)
            self._events = undo.enter_context(self._monitor(context))
            undo.callback(self._dealer.disable_monitor)
            roster.secure_proxy(self._dealer, own, base)
            self._dealer.connect(address)
            self._undo = undo.pop_all()

    def _monitor(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        name = f"inproc://proxy-line-{next(_numbers)}"
        self._dealer.monitor(name, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        events = context.socket(zmq.PAIR)
        events.setsockopt(zmq.LINGER, 0)
        events.setsockopt(zmq.RCVHWM, 0)  # else ZMQ's thread could block on this one
        events.connect(name)
        return events

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to poll."""
        return self._dealer, self._events

    def heed_events(self) -> bool:
        """Take in connection events; return whether the line has just been connected."""
        is_news = False
        while self._events.poll(0):
            was_up = self.is_up
            self.is_up = recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            is_news = is_news or self.is_up
            if self.is_up is not was_up:
                log.info("the proxy at %s %s", self._address, "is connected" if self.is_up else "is gone")
        return is_news

    def receive(self) -> Iterator[FromProxy]:
        """A burst of the proxy's messages; invalid ones are dropped and counted."""
        for _ in burst():
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames instead of one")
                message = decode_from_proxy(frames[0])
            except ProtocolError as error:
                self._faults.dropped("the proxy", error)
                continue
            yield message

    def send(self, report: ToProxy) -> bool:
        """Send a report, or an answer, without waiting; False: the proxy has left too many unread."""
        try:
            self._dealer.send(encode(report), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def concerns(self, transfer: str) -> bool:
        """Whether the transfer is this proxy's."""
        return bool(self.tag) and transfer.startswith(self.tag)

    def close(self) -> None:
        """Idempotent."""
        self.follower.gone()
        self._undo.close()
