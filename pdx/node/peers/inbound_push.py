"""One push from a peer to this node: what was asked for, who may write where, and when that is over.

    QUEUED ──grant──► LANDING
       │  │              │   │ let go
  stop │  │ let go, lost │   └──► OVER
       │  └──► OVER      │
       │                 │ stop, lost
       └──► CLOSING ◄────┘
               │ fenced, let go
               └──► OVER

A push in CLOSING may still be written to: its slots are in quarantine until the sender lets go, or the channel says
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
    """Where a push is, for the node that receives."""

    QUEUED = "queued"
    LANDING = "landing"
    CLOSING = "closing"
    OVER = "over"


class PushStep(StrEnum):
    """What can happen to it there."""

    GRANT = "grant"
    STOP = "stop"  # this side gives up: cancelled, too late, a digest does not match
    LET_GO = "let go"  # the sender says it writes no more
    LOST = "lost"
    FENCED = "fenced"  # nothing lands any more, whatever the sender does


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
    """A session of a peer that has chosen by which channel it writes here."""

    def __init__(self, session: PeerConnection, scheme: str) -> None:
        self.session = session
        self.scheme = scheme
        self.pushes: dict[int, InboundPush] = {}  # that are not over, by number …
        self.wants: Counter[int] = Counter()  # … and how many of them answer a question of this node, by its number
        self.is_over = False  # the session is; what was being written may still land


class Account(msgspec.Struct):
    """What one peer has here, whatever sessions it came in."""

    pushes: int = 0  # not over
    keys: int = 0  # offered in them
    nbytes: int = 0  # granted and not over: all its sessions share one share
    landed_bytes: int = 0  # in chunks that are whole, ever


class InboundPush:
    """What a peer asked room for, by its `Admit` of this number. `chunks` are those it may write to, by offset."""

    def __init__(self, writer: Writer, number: int, offer: Admit, now: float) -> None:
        self.writer = writer
        self.session = writer.session
        self.number = number
        self.offer = offer
        self.state = PushState.QUEUED
        self.deadline = now + offer.wait_s  # of waiting for room; then, of landing
        self.wanted_bytes = round_up(offer.nbytes) * offer.shards * len(offer.keys)
        self.chunks: dict[int, Chunk] = {}
        self.lacking = 0.0  # bytes that it found no room for; nobody looks for its room while fewer are available …
        self.look_at = 0.0  # … or before this
        self.opened_at = 0.0  # when it got its room
        self.landed_bytes = 0
        self.is_let_go = False  # its writer writes nothing more, or is dead; what it wrote may still be on its way in

    def __repr__(self) -> str:
        return f"<InboundPush {self.number} of {self.session.name} {self.state} {len(self.chunks)} chunks>"


def check(session: PeerConnection, offer: Admit) -> None:
    """:raises ProtocolError: the offer makes no sense."""
    if not offer.keys or len(offer.keys) * offer.shards > MAX_SLOTS or len(set(offer.keys)) != len(offer.keys):
        raise ProtocolError(f"{session.name} offers {len(offer.keys)} keys of {offer.shards} shards")
    least = offer.tail_nbytes or offer.nbytes
    if not offer.nbytes or offer.layers > least or least > offer.nbytes:
        raise ProtocolError(f"{session.name} offers {offer.nbytes}, {least} bytes in {offer.layers} layers")
