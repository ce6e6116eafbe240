"""The life of a slot, as one table. All transitions are here; there is no other way to change a state.

    FREE ──reserve──► FILLING ──seal──► SEALED ──evict──► FREE
                         │                 │
                       abort             delete (while leased)
                         ▼                 ▼
                    QUARANTINED ────────► RETIRED
                  (a writer may  delete  (a reader
                   still write)          still reads)
                         │                 │
                      let_go            unleased
                         └──────► FREE ◄───┘

A slot that is pushed to a peer is read while it is filled: when its writer lets go meanwhile, it is retired.

A slot in FILLING, QUARANTINED or RETIRED is never given to anybody else (docs/architecture.md, invariant 3).
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a slot is in its life. FREE slots have no record: it is the state before and after."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class Step(StrEnum):
    RESERVE = "reserve"
    SEAL = "seal"
    ABORT = "abort"  # its reservation ends unsealed, the writer has not let go yet
    LET_GO = "let_go"  # the writer says it will not write any more, or is known dead
    DELETE = "delete"  # nobody may find or write it any more, while somebody reads it
    UNLEASED = "unleased"  # the last lease ended
    EVICT = "evict"  # not leased, not pinned


# A step that is not here is a bug of ours, not of a peer.
TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.FREE, Step.RESERVE): State.FILLING,
    (State.FILLING, Step.SEAL): State.SEALED,
    (State.FILLING, Step.ABORT): State.QUARANTINED,
    (State.FILLING, Step.LET_GO): State.FREE,
    (State.FILLING, Step.DELETE): State.RETIRED,
    (State.QUARANTINED, Step.LET_GO): State.FREE,
    (State.QUARANTINED, Step.DELETE): State.RETIRED,
    (State.SEALED, Step.DELETE): State.RETIRED,
    (State.SEALED, Step.EVICT): State.FREE,
    (State.RETIRED, Step.UNLEASED): State.FREE,
}


WRITABLE = frozenset({State.FILLING, State.QUARANTINED})  # somebody may still write there
FINDABLE = frozenset({State.FILLING, State.SEALED})  # its key leads to it
