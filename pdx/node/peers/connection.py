"""One connection between two nodes, for both directions: how it is set up, and how it ends.

Either node may dial. From then on each is a session of the other: it may write to the other's memory as far as it was
welcomed. Hello identifies the node that dials; the dialled node's welcome identifies that node and says where its
memory may be written; the dialling node's welcome then says the same. No clock here, and no I/O but the socket's.

A connection is DIALING or NEW, then READY with a welcome, and CLOSED by any `Ending`. It never opens again: the next
one has new tokens.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import zmq

from pdx.config import is_name, is_tier_name
from pdx.errors import PeerRefused, ProtocolError
from pdx.memory.slot import Slot
from pdx.security.peer_socket import Arrival, post
from pdx.telemetry.host import runs_here
from pdx.telemetry.recent import remember
from pdx.transports.channel import TOKEN_BYTES, RemoteRegion
from pdx.wire.messages import (
    VERSION,
    Bye,
    Hello,
    PeerBody,
    PeerFrame,
    Refused,
    Welcome,
    encode,
)

_MAX_NAMES = 4096
_KEPT = 64  # ended epochs kept per name


class ConnectionState(StrEnum):
    DIALING = "dialing"  # this node has sent its hello
    NEW = "new"  # the peer has, and is not welcomed yet
    READY = "ready"
    CLOSED = "closed"


class Ending(StrEnum):
    """Why a connection ended, or was never set up."""

    TURN_DOWN = "turn down"
    BYE = "bye"  # the peer says that it writes no more
    LOST = "lost"  # silent for too long, or it failed: the peer may still be writing
    RESTARTED = "restarted"  # the peer has another epoch, so the process of this connection is dead
    LEAVE = "leave"  # this node writes no more


class Rival(NamedTuple):
    """A hello that waits because this node has dialled its sender."""

    arrival: Arrival
    seq: int
    hello: Hello
    came_at: float


class PeerConnection:
    """A connection to one peer, and the session of that peer here. Owned by the control loop.

    `number` and `token` belong to the session: `number` is the writer of the peer's chunks, and `token` the secret by
    which channels know it. `epoch`, `host` and `pid` are as the peer claims. `why`: why the connection is not ready.
    """

    def __init__(
        self, number: int, name: str, socket: zmq.Socket[bytes], route: bytes = b"", *, said: int = 0, now: float
    ) -> None:
        """`route`: of a peer that dialled; a dialled peer has its own socket. `said`: how many messages it was sent."""
        self.number = number
        self.name = name
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.state = ConnectionState.NEW if route else ConnectionState.DIALING
        self.why = "" if route else "dialled"
        self.why_before = ""  # `why` of the previous connection
        self.epoch = self.pid = 0
        self.host = ""
        self.key = ""  # that the peer has proved; empty without CURVE
        self.address = ""  # where it was dialled; empty: the peer dialled
        self.socket = socket
        self.route = route
        self.heard_at = self.dialled_at = now  # on the clock of `Connections`
        self.is_wanted = False  # something has waited for it since it was dialled
        self.is_invited = False  # the peer has said where its memory may be written
        self.has_welcomed = False  # this node has said where its memory may be written
        self.is_silent = False  # it has not answered a question of `Lookups` in time
        self.fault = ""  # why sending failed; the connection is lost at the next tick
        self._said = said
        self._heard = 0

    def __repr__(self) -> str:
        return f"<PeerConnection {self.number} with {self.name!r} {self.state}{': ' if self.why else ''}{self.why}>"

    @property
    def is_dialled(self) -> bool:
        """Whether this node dialled."""
        return not self.route

    @property
    def source(self) -> str:
        """The source of transfers: the peer, which stays the same when it connects again."""
        return f"peer {self.name}"

    def send(self, body: PeerBody, about: int = 0) -> None:
        """Send a message if the connection is ready. Never blocks; a peer that takes no more is lost at the next tick.

        `about`: the number of the question that the message asks or answers.
        """
        if self.state is ConnectionState.READY:
            self.post(body, about)

    def welcome(self, welcome: Welcome) -> None:
        """Tell the peer where it may write. Only the first call counts; no-op if the peer has gone meanwhile."""
        if self.state in (ConnectionState.CLOSED, ConnectionState.DIALING) or self.has_welcomed:
            return
        self.has_welcomed = True
        if self.state is ConnectionState.NEW:
            self.become_ready()
        self.post(welcome)

    def is_dead_if(self, epoch: int, host: str) -> bool:
        """Whether its process must have ended when its name appears with this epoch on the kernel `host`. Without keys
        another node may have taken the name: on another host, or on this one while the process is seen to run."""
        return epoch != self.epoch and (bool(self.key) or (host == self.host and not runs_here(host, self.pid)))

    # ---- for `Connections` ------------------------------------------------------------------

    def set_identity(self, word: Hello | Welcome) -> None:
        """Note who the peer says it is."""
        self.epoch, self.host, self.pid = word.epoch, word.host, word.pid

    def become_ready(self) -> None:
        """Become ready: the dialled node has sent its welcome."""
        assert self.state in (ConnectionState.DIALING, ConnectionState.NEW)
        self.state, self.why = ConnectionState.READY, ""

    def post(self, body: PeerBody, about: int = 0) -> None:
        """Send a message in any state."""
        if not self.fault:
            self._said += 1
            self.fault = post(self.socket, self.route, encode(PeerFrame(self._said, about, body)))

    def take(self, frame: PeerFrame) -> None:
        """Check a message's number. :raises ProtocolError: this message, or a later one, has come before."""
        if frame.seq <= self._heard:
            raise ProtocolError(f"message {frame.seq} was replayed; {self._heard} is the last")
        self._heard = frame.seq

    def end(self, ending: Ending, why: str) -> None:
        """Close the connection, and tell the peer, unless the peer has ended it."""
        if ending is Ending.LEAVE or self.state is ConnectionState.DIALING:
            self.post(Bye())
        elif ending not in (Ending.BYE, Ending.RESTARTED):
            self.post(refusal(why))
        self.close(why)

    def close(self, why: str) -> None:
        """Close the connection without a message."""
        assert self.state is not ConnectionState.CLOSED
        self.state, self.why = ConnectionState.CLOSED, why


def key_after(before: PeerConnection | None, keys: Sequence[str]) -> str:
    """The key that a dialled peer must prove: that of its last connection, or another if it did not answer then."""
    if before is None or before.key not in keys:
        return keys[0]
    return next((key for key in keys if not before.epoch and key != before.key), before.key)


class Epochs:
    """Epochs by name. An epoch that was followed by another of the same name has ended for good. Bounded."""

    def __init__(self) -> None:
        # By name, ended epochs and then the live one; names in the order in which they were last heard.
        self._known: OrderedDict[str, deque[int]] = OrderedDict()

    def is_over(self, name: str, epoch: int) -> bool:
        known = self._known.get(name)
        return known is not None and epoch != known[-1] and epoch in known

    def begin(self, name: str, epoch: int) -> None:
        """Note that `name` is alive in this epoch, and its other epochs have ended."""
        known = remember(self._known, name, self._known.get(name) or deque(maxlen=_KEPT + 1), _MAX_NAMES)
        if not known or known[-1] != epoch:
            known.append(epoch)


def welcome(own: Hello, regions: Sequence[RemoteRegion], probe: Slot | None) -> Welcome:
    """The answer to a hello, and to that answer: who this node is, and where it may be written."""
    return Welcome(
        own.epoch,
        own.pid,
        version=own.version,
        name=own.name,
        host=own.host,
        regions=list(regions),
        probe=probe,
        layouts=own.layouts,
    )


def refusal(text: str) -> Refused:
    return Refused(PeerRefused.__name__, text[:1024])


def check_hello(
    own: Hello, hello: Hello, without: Mapping[str, str], *, authenticated: str | None, is_over: bool
) -> list[str]:
    """The schemes to open for this peer, in our order of preference.

    `authenticated`: the name that the roster gives the peer's CURVE key; None if sockets are this user's alone.
    `is_over`: this epoch of the peer is known to have ended, so the message is an old one.

    :raises PeerRefused: the peer is refused; the text is for the peer.
    """
    _check_version(hello.version)
    if authenticated is not None and hello.name != authenticated:
        raise PeerRefused(f"the key is that of {authenticated!r}, not of {hello.name!r}")
    if hello.name == own.name:
        raise PeerRefused(f"two nodes are named {own.name!r}; give each its own --name")
    if not hello.name:
        raise PeerRefused("a node without a name")
    if not is_name(hello.name):
        raise PeerRefused(f"a node cannot be named {hello.name!r:.80}; give it another --name")
    if is_tier_name(hello.name):
        raise PeerRefused(f"a node cannot be named {hello.name!r}, as a tier of every node is; give it another --name")
    if is_over:
        raise PeerRefused(f"epoch {hello.epoch} of {hello.name!r} has ended")
    _check_layouts(own, hello.name, hello.layouts)
    return _common(own, hello.schemes, hello.name, without)


def check_welcome(own: Hello, expected: str, welcome: Welcome, without: Mapping[str, str]) -> list[str]:
    """The schemes that the peer opened and this node has, in our order of preference.

    :raises PeerRefused: it is not the peer that was dialled, or it is incompatible.
    """
    _check_version(welcome.version)
    if welcome.name != expected:
        raise PeerRefused(f"dialled {expected!r}, {welcome.name!r} answered: the roster has a wrong address")
    if welcome.epoch == own.epoch:
        raise PeerRefused(f"{expected!r} is this node itself")
    _check_layouts(own, welcome.name, welcome.layouts)
    return _common(own, [region.scheme for region in welcome.regions], welcome.name, without)


def _check_version(version: int) -> None:
    if version != VERSION:
        raise PeerRefused(f"this node speaks version {VERSION}, the peer {version}; upgrade the older")


def _check_layouts(own: Hello, name: str, theirs: Sequence[bytes]) -> None:
    if own.layouts and theirs and not set(own.layouts) & set(theirs):
        raise PeerRefused(
            f"no engine of {name!r} has the KV layout of any engine of {own.name!r}: model, dtype, block size, "
            "chunk size, shards (of --tensor-parallel-size, if `shards` is not set), stages (likewise) and attention "
            "backend must be equal"
        )


def _common(own: Hello, theirs: Sequence[str], name: str, without: Mapping[str, str]) -> list[str]:
    common = [scheme for scheme in own.schemes if scheme in set(theirs)]
    if not common:
        reasons = "".join(f"; {scheme}: {without[scheme]}" for scheme in theirs if scheme in without)
        raise PeerRefused(
            f"no channel in common with {name!r}: one side has {', '.join(own.schemes) or 'none'}, "
            f"the other {', '.join(theirs) or 'none'}; `pdx doctor` says what is missing{reasons}"
        )
    return common
