"""The life of a request in the scheduler half, as one table. All transitions are here.

    WAITING ──decide──► DECIDED ──load──► LOADING ──loaded──► RUNNING ──void──► VOID
       ▲  ◄─ask again─────┘ └─────run───────────────────────────▲                 │
       └────────────────────────────preempt─────────────────────┴─────────────────┘

A request is tracked from its first sight until the engine says that it is over. LEFT_OUT is for good: nothing of it is
asked, found or saved, but others may rest on the same blocks (`pdx.engine.trust`).
"""

from __future__ import annotations

from enum import IntEnum, auto


class State(IntEnum):
    """Where a request is in its life."""

    LEFT_OUT = auto()
    WAITING = auto()  # for its turn, and for the node's last word
    DECIDED = auto()  # for its turn: its hits are leased and its misses have slots, or nothing of that can be
    LOADING = auto()  # it has blocks, and its hits are on their way into them
    LOADING_VOID = auto()  # likewise, and nothing of its blocks will be saved
    RUNNING = auto()  # it has blocks and waits for no load
    VOID = auto()  # likewise, and nothing of its blocks is saved: computed before a reset, or from pages that failed


class Step(IntEnum):
    """What can happen to a request."""

    DECIDE = auto()
    ASK_AGAIN = auto()  # what the node has said is void, or too old
    LOAD = auto()  # the engine gave it blocks, some of them to be loaded
    RUN = auto()  # the engine gave it blocks, none of them to be loaded
    LOADED = auto()  # its load is over, whatever came of it
    PREEMPT = auto()  # it has lost its blocks
    VOID = auto()  # what its blocks hold is not what its keys say


_QUEUED = (State.WAITING, State.DECIDED)
_IN_BLOCKS = (State.RUNNING, State.VOID)
TRANSITIONS: dict[tuple[State, Step], State] = {
    **{(state, Step.DECIDE): State.DECIDED for state in _QUEUED},
    **{(state, Step.ASK_AGAIN): State.WAITING for state in _QUEUED},
    **{(state, Step.LOAD): State.LOADING for state in _QUEUED},
    **{(state, Step.RUN): State.RUNNING for state in (*_QUEUED, State.RUNNING)},
    **{(state, Step.PREEMPT): State.WAITING for state in _IN_BLOCKS},
    **{(state, Step.VOID): State.VOID for state in _IN_BLOCKS},
    **{(state, Step.VOID): State.WAITING for state in _QUEUED},
    (State.LOADING, Step.LOADED): State.RUNNING,
    (State.LOADING, Step.VOID): State.LOADING_VOID,
    (State.LOADING_VOID, Step.LOADED): State.VOID,
    (State.LOADING_VOID, Step.VOID): State.LOADING_VOID,
    (State.VOID, Step.RUN): State.VOID,
    **{(State.LEFT_OUT, step): State.LEFT_OUT for step in (Step.RUN, Step.PREEMPT, Step.VOID)},
}

LOADING = (State.LOADING, State.LOADING_VOID)
SEATED = (*LOADING, State.RUNNING, State.VOID)  # has a place in the engine's steps, or will before any that waits
