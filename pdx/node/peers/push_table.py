"""The life of a push, one table per side. No I/O, no clock. All transitions are here.

Sender                                             Receiver

    OFFERED ──grant──► STREAMING                       QUEUED ──grant──► LANDING
       │                   │ all sent,                    │  │              │   │ let go
       │ cancel, stop,     │ cancel, stop,           stop │  │ let go, lost │   └──► OVER
       │ lost              ▼ lost                         │  └──► OVER      │
       └──────────────► DRAINING ──drained──► OVER        │                 │ stop, lost
                                                          └──► CLOSING ◄────┘
                                                                  │ fenced, let go
                                                                  └──► OVER

DRAINING: writes under way still read our memory. CLOSING: something may still be written to ours; its slots are in
quarantine until the sender lets go, or the channel says that nothing lands any more, or the sender is known dead.
"""

from __future__ import annotations

from enum import StrEnum


class SenderState(StrEnum):
    """Where a push is, for the node that sends."""

    OFFERED = "offered"
    STREAMING = "streaming"
    DRAINING = "draining"
    OVER = "over"


class SenderStep(StrEnum):
    """What can happen to it there."""

    GRANT = "grant"
    ALL_SENT = "all sent"
    CANCEL = "cancel"  # this side gives up: cancelled, aborted, too late
    STOP = "stop"  # the receiver gives up
    LOST = "lost"
    DRAINED = "drained"


SENDER: dict[tuple[SenderState, SenderStep], SenderState] = {
    (SenderState.OFFERED, SenderStep.GRANT): SenderState.STREAMING,
    (SenderState.OFFERED, SenderStep.CANCEL): SenderState.DRAINING,
    (SenderState.OFFERED, SenderStep.STOP): SenderState.DRAINING,
    (SenderState.OFFERED, SenderStep.LOST): SenderState.DRAINING,
    (SenderState.STREAMING, SenderStep.ALL_SENT): SenderState.DRAINING,
    (SenderState.STREAMING, SenderStep.CANCEL): SenderState.DRAINING,
    (SenderState.STREAMING, SenderStep.STOP): SenderState.DRAINING,
    (SenderState.STREAMING, SenderStep.LOST): SenderState.DRAINING,
    (SenderState.DRAINING, SenderStep.DRAINED): SenderState.OVER,
}


class ReceiverState(StrEnum):
    """Where a push is, for the node that receives."""

    QUEUED = "queued"
    LANDING = "landing"
    CLOSING = "closing"
    OVER = "over"


class ReceiverStep(StrEnum):
    """What can happen to it there."""

    GRANT = "grant"
    STOP = "stop"  # this side gives up: cancelled, too late, a digest does not match
    LET_GO = "let go"  # the sender says it writes no more
    LOST = "lost"
    FENCED = "fenced"  # nothing lands any more, whatever the sender does


RECEIVER: dict[tuple[ReceiverState, ReceiverStep], ReceiverState] = {
    (ReceiverState.QUEUED, ReceiverStep.GRANT): ReceiverState.LANDING,
    (ReceiverState.QUEUED, ReceiverStep.STOP): ReceiverState.CLOSING,
    (ReceiverState.QUEUED, ReceiverStep.LET_GO): ReceiverState.OVER,
    (ReceiverState.QUEUED, ReceiverStep.LOST): ReceiverState.OVER,
    (ReceiverState.LANDING, ReceiverStep.LET_GO): ReceiverState.OVER,
    (ReceiverState.LANDING, ReceiverStep.STOP): ReceiverState.CLOSING,
    (ReceiverState.LANDING, ReceiverStep.LOST): ReceiverState.CLOSING,
    (ReceiverState.CLOSING, ReceiverStep.LET_GO): ReceiverState.OVER,
    (ReceiverState.CLOSING, ReceiverStep.FENCED): ReceiverState.OVER,
}
