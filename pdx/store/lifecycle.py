"""The life cycle of a slot, as one table. All transitions are here; there is no other way to change a state.

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

A slot that is pushed to a peer is read while it is filled: if its writer lets go meanwhile, it is retired.

A slot in FILLING, QUARANTINED or RETIRED is never given to another owner (docs/architecture.md, invariant 3).
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """A slot's state. FREE slots have no record."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class Step(StrEnum):
    RESERVE = "reserve"
    SEAL = "seal"
    ABORT = "abort"  # the reservation ends unsealed; the writer has not let go yet
    LET_GO = "let_go"  # the writer says that it will not write any more, or is known dead
    DELETE = "delete"  # it can no longer be found or written, but is still read
    UNLEASED = "unleased"  # the last lease ended
    EVICT = "evict"  # not leased, not pinned


# A missing step is a bug in PDX, not a peer's fault.
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


WRITABLE = frozenset({State.FILLING, State.QUARANTINED})  # may still be written
FINDABLE = frozenset({State.FILLING, State.SEALED})  # can be found by key
