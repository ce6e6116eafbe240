"""The two ends of a link between nodes: `Link` dials and writes, `PeerSession` accepted and is written to.

Both keep their state by the tables of `handshake` and number what they say. What is to be done about what they hear is
decided by their owners, `links` and `reception`, and by the node's core, the `LinkHandler`. One thread, the control
loop's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

import zmq

from pdx.errors import ProtocolError
from pdx.memory.slot import Slot
from pdx.node.peers.handshake import LINK, SESSION, Identity, LinkState, LinkStep, SessionState, SessionStep
from pdx.telemetry.host import runs_here
from pdx.transports.channel import TOKEN_BYTES, RemoteRegion
from pdx.wire.messages import VERSION, PeerEntry, Refused
from pdx.wire.peer_messages import (
    PeerBody,
    PeerBye,
    PeerFrame,
    PeerHello,
    PeerPing,
    PeerWelcome,
    decode_peer,
    encode_peer,
)

FAREWELL_MS = 200  # a socket that says bye may take so long to send it


class Numbering:
    """Numbers what one end says, and refuses what it heard before."""

    def __init__(self) -> None:
        self._said = 0
        self._heard = 0

    def pack(self, body: PeerBody) -> bytes:
        """The next frame to send."""
        self._said += 1
        return encode_peer(PeerFrame(self._said, body))

    def unpack(self, frame: PeerFrame) -> PeerBody:
        """:raises ProtocolError: this, or something later, was heard before."""
        if frame.seq <= self._heard:
            raise ProtocolError(f"message {frame.seq} was replayed; {self._heard} is the last")
        self._heard = frame.seq
        return frame.body


class Link:
    """The way to one peer whose memory this node writes to; one socket per dialling.

    `epoch`, `host` and `pid` are from the last welcome; `why` says why it is not ready.
    """

    def __init__(self, name: str, *, watch: Callable[[zmq.Socket[bytes]], None], unwatch: Callable[..., None]) -> None:
        self.name = name
        self.state = LinkState.CLOSED
        self.why = "not dialled yet"
        self.said = ""  # why it did not come about the last time
        self.address = ""
        self.server_key = ""
        self.epoch = 0
        self.host = ""
        self.pid = 0
        self.heard_at = 0.0  # on the clock of `Links`, as is the next
        self.pinged_at = 0.0
        self.is_wanted = False  # something waited for it since it was dialled
        self.fault = ""  # sending failed: to be lost at the next tick
        self.socket: zmq.Socket[bytes] | None = None
        self._watch = watch
        self._unwatch = unwatch
        self._numbering = Numbering()

    def __repr__(self) -> str:
        return f"<Link to {self.name!r} {self.state}{': ' if self.why else ''}{self.why}>"

    def send(self, body: PeerBody) -> None:
        """Say it, if the link is ready. Never blocks; a peer that takes nothing more is lost at the next tick."""
        if self.state is LinkState.READY:
            self._post(body)

    def leave(self) -> None:
        """End it: this node will write nothing more to that peer, so close the channels to it before. Idempotent."""
        if self.state is not LinkState.CLOSED:
            self.close(LinkStep.LEAVE, "left", is_told=True)

    # ---- for `Links` ------------------------------------------------------------------------

    def dial(self, socket: zmq.Socket[bytes], entry: PeerEntry, own: Identity, now: float) -> None:
        """Say hello over a socket that is connected, or will be; it is this link's from now on."""
        self.state = LINK[self.state, LinkStep.DIAL]
        self.why = "dialled"
        self.fault = ""
        self.address, self.server_key = entry.address, entry.public_key
        self.heard_at = self.pinged_at = now
        self.socket = socket
        self._numbering = Numbering()
        self._watch(socket)
        self._post(own.hello())

    def read(self) -> PeerBody | None:
        """The next message, None if there is none now.

        :raises ProtocolError: what came is no message, or an old one.
        """
        if self.socket is None:
            return None
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames instead of one")
        return self._numbering.unpack(decode_peer(frames[0]))

    def welcomed(self, welcome: PeerWelcome) -> None:
        """The peer said yes."""
        self.state = LINK[self.state, LinkStep.WELCOMED]
        self.why = ""
        self.epoch, self.host, self.pid = welcome.epoch, welcome.host, welcome.pid

    def ping(self, now: float) -> None:
        """A sign of life, once it is ready."""
        self.pinged_at = now
        self.send(PeerPing(time.monotonic_ns()))

    def close(self, step: LinkStep, why: str, *, is_told: bool = False) -> None:
        """Take the step that ends it, and close the socket. `is_told`: say bye, so nothing is written any more."""
        if is_told:
            self._post(PeerBye())
        self.state = LINK[self.state, step]
        self.why = why
        if self.socket is not None:
            self._unwatch(self.socket)
            self.socket.close(linger=FAREWELL_MS if is_told else 0)
            self.socket = None

    def _post(self, body: PeerBody) -> None:
        if self.socket is None or self.fault:
            return
        try:
            self.socket.send(self._numbering.pack(body), zmq.NOBLOCK)
        except zmq.Again:
            self.fault = "it does not read what it is sent"


class PeerSession:
    """A peer that dialled this node, to write to its memory; `token` is the secret of this session alone.

    Say yes or no to it once: `welcome` or `turn_down`. A session that is over never opens again.
    """

    def __init__(
        self,
        number: int,
        hello: PeerHello,
        *,
        key: str,
        identity: Callable[[], Identity],
        post: Callable[[bytes], str],
        forget: Callable[[PeerSession], None],
    ) -> None:
        """`key`: the one it was let in with, empty without CURVE. `post` sends a frame and returns what was wrong;
        `forget` is called when this side turned it down."""
        self.number = number
        self.name, self.epoch, self.host, self.pid = hello.name, hello.epoch, hello.host, hello.pid
        self.layouts = hello.layouts
        self.key = key
        self.state = SessionState.NEW
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.heard_at = 0.0  # on the clock of `Links`, as is the next
        self.pinged_at = 0.0
        self.fault = ""  # sending failed: over at the next tick
        self.numbering = Numbering()
        self._identity = identity
        self._post_frame = post
        self._forget = forget

    def __repr__(self) -> str:
        return f"<PeerSession {self.number} of {self.name!r} {self.state}>"

    def is_dead_if(self, epoch: int, host: str) -> bool:
        """Whether its process has ended if its name is heard in this life on this kernel. Without keys, a node of
        another host may have been given the same name, and so may one of this host, where its process can be seen."""
        return epoch != self.epoch and (bool(self.key) or (host == self.host and not runs_here(host, self.pid)))

    def send(self, body: PeerBody) -> None:
        """Say it, if the session is open. Never blocks; a peer that takes nothing more is silent at the next tick."""
        if self.state is SessionState.OPEN:
            self._post(body)

    def welcome(self, regions: list[RemoteRegion], probe: Slot | None) -> None:
        """Yes. Nothing happens if the peer has gone meanwhile."""
        if self.state is not SessionState.NEW:
            return
        own = self._identity()
        self.state = SESSION[self.state, SessionStep.HELLO]
        layouts = sorted(set(own.layouts))
        self._post(PeerWelcome(VERSION, own.name, own.epoch, own.host, own.pid, regions, probe, layouts))

    def turn_down(self, text: str) -> None:
        """No; the handler hears nothing more of it. Nothing happens if the peer has gone meanwhile.

        :raises KeyError: it was welcomed already.
        """
        if self.state is SessionState.OVER:
            return
        self.state = SESSION[self.state, SessionStep.TURN_DOWN]
        self._post(refusal(text))
        self._forget(self)

    # ---- for `Links` ------------------------------------------------------------------------

    def ping(self, now: float) -> None:
        """A sign of life, once it is open."""
        self.pinged_at = now
        self.send(PeerPing(time.monotonic_ns()))

    def end(self, step: SessionStep, farewell: PeerBody | None = None) -> None:
        """Take the step that ends it; one that was not welcomed yet is turned down."""
        if farewell is not None:
            self._post(farewell)
        self.state = SESSION[self.state, SessionStep.TURN_DOWN if self.state is SessionState.NEW else step]

    def _post(self, body: PeerBody) -> None:
        if not self.fault:
            self.fault = self._post_frame(self.numbering.pack(body))


def refusal(text: str) -> Refused:
    """No, for this reason."""
    return Refused("PeerRefused", text[:1024])


class LinkHandler(Protocol):
    """What the node does about its links; called from `Links.serve` and `Links.tick` only."""

    def identity(self) -> Identity:
        """What this node says of itself now."""

    def peer_hello(self, session: PeerSession, schemes: list[str]) -> None:
        """A peer wants to write here by these schemes; `session.welcome` or `session.turn_down`, now or later.

        Any earlier session of that name is over; `PeerSession.is_dead_if` says whether its process is dead for sure.
        """

    def session_message(self, session: PeerSession, body: PeerBody) -> None:
        """A `Chosen`, `Offer`, `LetGo` or `Want` of an open session.

        The numbers in it mean something in this session only; those of another one's pushes are none of its business.

        :raises ProtocolError: it makes no sense; it is dropped and counted.
        """

    def session_over(self, session: PeerSession, step: SessionStep) -> None:
        """RESTARTED: its process is dead for sure; BYE: it will not write; SILENT: nobody knows."""

    def link_ready(self, link: Link, welcome: PeerWelcome, schemes: list[str]) -> None:
        """A peer said yes, to these schemes, best first."""

    def link_message(self, link: Link, body: PeerBody) -> None:
        """A `Granted`, `Stop` or `Coming` of a link that is ready.

        :raises ProtocolError: it makes no sense; it is dropped and counted.
        """

    def link_lost(self, link: Link, step: LinkStep, why: str) -> None:
        """LOST or TURNED_DOWN; not after `leave`."""
