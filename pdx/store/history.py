"""Why recent chunks are no longer in memory, or in a tier, so that a miss can be explained and a chunk that is computed
again is recognized."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

import msgspec

MAX_GONE = 1 << 16  # keys that are remembered


class Cause(Enum):
    """Why a chunk is gone: the kind that `pdx why` shows, and a sentence with room for one detail."""

    EVICTED = "evicted", "evicted for {}"
    OVER_QUOTA = "evicted", "evicted for {}, being over the quota of its cache salt"
    DEMOTED = "evicted", "evicted: a request or an application has had it demoted"
    BY_CONTROLLER = "evicted", "evicted by a controller"
    EXPIRED = "expired", "expired (--policy)"
    DELETED = "deleted", "deleted"
    ENDED = "deleted", "deleted: its time to live was over"
    MOVED = "gone", "moved"
    SHARD_MISSING = "dropped", "dropped, because another shard of it was missing"
    LONGER = "dropped", "dropped, because a longer chunk has all of it"
    TRANSFER_OVER = "dropped", "dropped with its transfer"
    NOT_LOADED = "failed", "not loaded from {}"
    NOT_COPIED = "failed", "not copied between arenas in time"
    GIVEN_UP = "unfinished", "never whole: its writer gave it up"
    DIED = "unfinished", "never whole: its process ended"
    LATE = "unfinished", "not filled in time"
    # In a tier:
    NOT_STORED = "tier", "not stored: {}"
    OVERRUN = "policy", "not stored: it did not keep up, and the chunk was evicted before its turn"
    REMOVED = "evicted", "removed to make room"
    FORGOTTEN = "evicted", "deleted, or broken"

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text


class Gone(msgspec.Struct, frozen=True, gc=False):
    """What became of a chunk, and when (the store's clock)."""

    at: float
    why: Cause
    detail: str = ""
    is_stored: bool = True  # whether it had been given to the tiers below when memory evicted it

    @property
    def text(self) -> str:
        return self.why.text.format(self.detail)

    def sentence(self, now: float) -> str:
        return f"{self.text}, {ago(now - self.at)}"


class History:
    """The keys that went last, with the reasons. Owned by the control loop; calls are linear in their keys."""

    def __init__(self) -> None:
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()
        self.has_forgotten = False  # whether an unknown key may have been here

    def note(self, keys: Iterable[bytes], why: Cause, now: float, *, detail: str = "", is_stored: bool = True) -> None:
        gone = Gone(now, why, detail, is_stored)
        for key in keys:
            if key in self._gone:
                self._gone.move_to_end(key)
            self._gone[key] = gone
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
            self.has_forgotten = True

    def why(self, key: bytes) -> Gone | None:
        """What became of the last chunk of this key; None if it never was here, or that is forgotten."""
        return self._gone.get(key)

    def is_missed(self, key: bytes) -> bool:
        """Whether the last chunk of this key was whole and then evicted or expired, not deleted."""
        gone = self._gone.get(key)
        return gone is not None and gone.why.kind in ("evicted", "expired")


def ago(seconds: float) -> str:
    return f"{seconds:.1f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
