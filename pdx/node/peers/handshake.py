"""How two nodes come to trust each other, and when they stop: one table per side, and the checks. No I/O, no clock.

A link goes from the node that dials, and that will write, to the node that accepts. Two nodes that write to each
other have two links. The dialling side:

    CLOSED ──dial──► DIALING ──welcomed──► READY ──lost──► CLOSED
                        │                    │
                    turned down / lost     leave ──► CLOSED
                        └──► CLOSED

The accepting side has a session per link: NEW ──hello──► OPEN ──bye, silent, restarted──► OVER. A session that is over
never opens again: its peer must say hello anew, and gets new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from pdx.errors import PeerRefused
from pdx.wire.messages import VERSION
from pdx.wire.peer_messages import PeerHello, PeerWelcome


class LinkState(StrEnum):
    """Of the dialling side."""

    CLOSED = "closed"
    DIALING = "dialing"
    READY = "ready"


class LinkStep(StrEnum):
    """What can happen to a link."""

    DIAL = "dial"
    WELCOMED = "welcomed"
    TURNED_DOWN = "turned down"
    LOST = "lost"  # silent for too long, or its channel broke
    LEAVE = "leave"


LINK: dict[tuple[LinkState, LinkStep], LinkState] = {
    (LinkState.CLOSED, LinkStep.DIAL): LinkState.DIALING,
    (LinkState.DIALING, LinkStep.WELCOMED): LinkState.READY,
    (LinkState.DIALING, LinkStep.TURNED_DOWN): LinkState.CLOSED,
    (LinkState.DIALING, LinkStep.LOST): LinkState.CLOSED,
    (LinkState.DIALING, LinkStep.LEAVE): LinkState.CLOSED,
    (LinkState.READY, LinkStep.LOST): LinkState.CLOSED,
    (LinkState.READY, LinkStep.LEAVE): LinkState.CLOSED,
}


class SessionState(StrEnum):
    """Of the accepting side."""

    NEW = "new"
    OPEN = "open"
    OVER = "over"


class SessionStep(StrEnum):
    """What can happen to a session."""

    HELLO = "hello"
    TURN_DOWN = "turn down"
    BYE = "bye"
    SILENT = "silent"
    RESTARTED = "restarted"  # its peer says hello in another life, so the one before is dead


SESSION: dict[tuple[SessionState, SessionStep], SessionState] = {
    (SessionState.NEW, SessionStep.HELLO): SessionState.OPEN,
    (SessionState.NEW, SessionStep.TURN_DOWN): SessionState.OVER,
    (SessionState.OPEN, SessionStep.BYE): SessionState.OVER,
    (SessionState.OPEN, SessionStep.SILENT): SessionState.OVER,
    (SessionState.OPEN, SessionStep.RESTARTED): SessionState.OVER,
}


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself; `layouts` are those of the engines attached to it now."""

    name: str
    epoch: int
    host: str
    pid: int
    schemes: Sequence[str]
    layouts: Sequence[bytes] = ()
    without: Mapping[str, str] = {}  # why it has not got other schemes; told to a peer that has no other

    def hello(self) -> PeerHello:
        """The first message of a link."""
        return PeerHello(
            VERSION, self.name, self.epoch, self.host, self.pid, list(self.schemes), sorted(set(self.layouts))
        )


def check_hello(own: Identity, hello: PeerHello, *, authenticated: str | None, buried: bool) -> list[str]:
    """The schemes to open for this peer, in our order of preference.

    `authenticated`: the name that the roster gives the peer's CURVE key; None where sockets are this user's alone.
    `buried`: this life of the peer is known to be over, so the message is an old one.

    :raises PeerRefused: no; the text is for the peer.
    """
    _check_version(hello.version)
    if authenticated is not None and hello.name != authenticated:
        raise PeerRefused(f"the key is that of {authenticated!r}, not of {hello.name!r}")
    if hello.name == own.name:
        raise PeerRefused(f"two nodes are named {own.name!r}; give each its own --name")
    if not hello.name:
        raise PeerRefused("a node without a name")
    if buried:
        raise PeerRefused(f"this life of {hello.name!r} (epoch {hello.epoch}) has ended")
    _check_layouts(own, hello.name, hello.layouts)
    return _common(own, hello.schemes, hello.name)


def check_welcome(own: Identity, expected: str, welcome: PeerWelcome) -> list[str]:
    """The schemes that the peer opened and this node has, in our order of preference.

    :raises PeerRefused: it is not the peer that was dialled, or it cannot be worked with.
    """
    _check_version(welcome.version)
    if welcome.name != expected:
        raise PeerRefused(f"dialled {expected!r}, {welcome.name!r} answered: the roster has a wrong address")
    if welcome.epoch == own.epoch:
        raise PeerRefused(f"{expected!r} is this node itself")
    _check_layouts(own, welcome.name, welcome.layouts)
    return _common(own, [region.scheme for region in welcome.regions], welcome.name)


def _check_version(version: int) -> None:
    if version != VERSION:
        raise PeerRefused(f"this node speaks version {VERSION}, the peer {version}; upgrade the older")


def _check_layouts(own: Identity, name: str, theirs: Sequence[bytes]) -> None:
    if own.layouts and theirs and not set(own.layouts) & set(theirs):
        raise PeerRefused(
            f"no engine of {name!r} has the KV layout of any engine of {own.name!r}: model, dtype, block size, "
            "chunk size, tensor parallel size and attention backend must be equal"
        )


def _common(own: Identity, theirs: Sequence[str], name: str) -> list[str]:
    common = [scheme for scheme in own.schemes if scheme in set(theirs)]
    if not common:
        reasons = "".join(f"; {scheme}: {own.without[scheme]}" for scheme in theirs if scheme in own.without)
        raise PeerRefused(
            f"no channel in common with {name!r}: one side has {', '.join(own.schemes) or 'none'}, "
            f"the other {', '.join(theirs) or 'none'}; `pdx doctor` says what is missing{reasons}"
        )
    return common
