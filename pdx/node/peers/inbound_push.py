"""One push from a peer to this node: the offer, the chunks that the peer may write, and the states until its end.

    QUEUED ──grant──► LANDING
       │  │              │   │ let go
  stop │  │ let go, lost │   └──► OVER
       │  └──► OVER      │
       │                 │ stop, lost
       └──► CLOSING ◄────┘
               │ fenced, let go
               └──► OVER

A push in CLOSING may still be written: its slots are in quarantine until the sender lets go, the channel guarantees
that nothing lands any more, or the sender is known dead.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

import msgspec

from pdx.errors import ProtocolError
from pdx.memory.arena import round_up
from pdx.node.peers.connection import PeerConnection
from pdx.store.chunk import Chunk
from pdx.wire.base import MAX_SLOTS
from pdx.wire.messages import Admit


class PushState(StrEnum):
    """The state of a push at its receiver."""

    QUEUED = "queued"
    LANDING = "landing"
    CLOSING = "closing"
    OVER = "over"


class PushStep(StrEnum):
    """The transitions of a push at its receiver."""

    GRANT = "grant"
    STOP = "stop"  # this side gives up: cancelled, too late, or a digest does not match
    LET_GO = "let go"  # the sender says that it writes no more
    LOST = "lost"
    FENCED = "fenced"  # nothing can land any more, whatever the sender does


PUSH: dict[tuple[PushState, PushStep], PushState] = {
    (PushState.QUEUED, PushStep.GRANT): PushState.LANDING,
    (PushState.QUEUED, PushStep.STOP): PushState.CLOSING,
    (PushState.QUEUED, PushStep.LET_GO): PushState.OVER,
    (PushState.QUEUED, PushStep.LOST): PushState.OVER,
    (PushState.LANDING, PushStep.LET_GO): PushState.OVER,
    (PushState.LANDING, PushStep.STOP): PushState.CLOSING,
    (PushState.LANDING, PushStep.LOST): PushState.CLOSING,
    (PushState.CLOSING, PushStep.LET_GO): PushState.OVER,
    (PushState.CLOSING, PushStep.FENCED): PushState.OVER,
}


class Writer:
    """A session of a peer that has chosen the channel by which it writes here."""

    def __init__(self, session: PeerConnection, scheme: str) -> None:
        self.session = session
        self.scheme = scheme
        self.pushes: dict[int, InboundPush] = {}  # not over, by number …
        self.wants: Counter[int] = Counter()  # … and how many of them answer each fetch of this node, by its number
        self.is_over = False  # whether the session is over; writes in flight may still land


class Account(msgspec.Struct):
    """What one peer takes up here, over all its sessions."""

    pushes: int = 0  # not over
    keys: int = 0  # offered in them
    nbytes: int = 0  # granted and not over; limited per peer, not per session
    landed_bytes: int = 0  # of whole chunks, ever


class InboundPush:
    """A push for which a peer asked room by its `Admit` of this number. `chunks`: those it may write to, by offset."""

    def __init__(self, writer: Writer, number: int, offer: Admit, now: float) -> None:
        self.writer = writer
        self.session = writer.session
        self.number = number
        self.offer = offer
        self.state = PushState.QUEUED
        self.deadline = now + offer.wait_s  # for room; later, for landing
        self.wanted_bytes = round_up(offer.nbytes) * offer.shards * len(offer.keys)
        self.chunks: dict[int, Chunk] = {}
        self.lacking = 0.0  # bytes that it needs: it is not tried again before as many are available …
        self.look_at = 0.0  # … or this time has come
        self.opened_at = 0.0  # when it got room
        self.landed_bytes = 0
        self.is_let_go = False  # its writer writes no more, or is dead; writes in flight may still land

    def __repr__(self) -> str:
        return f"<InboundPush {self.number} of {self.session.name} {self.state} {len(self.chunks)} chunks>"


def check(session: PeerConnection, offer: Admit) -> None:
    """:raises ProtocolError: the offer is invalid."""
    if not offer.keys or len(offer.keys) * offer.shards > MAX_SLOTS or len(set(offer.keys)) != len(offer.keys):
        raise ProtocolError(f"{session.name} offers {len(offer.keys)} keys of {offer.shards} shards")
    least = offer.tail_nbytes or offer.nbytes
    if not offer.nbytes or offer.layers > least or least > offer.nbytes:
        raise ProtocolError(f"{session.name} offers {offer.nbytes}, {least} bytes in {offer.layers} layers")
