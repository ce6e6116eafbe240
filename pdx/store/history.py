"""Why chunks that were here, or in a tier, are not any more: of the last ones, so that a miss can be explained, and
what is computed again is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

MAX_GONE = 1 << 16  # keys that are remembered
_OUTLIVED = ("evicted", "expired")  # so begins why, where nobody asked for it to go


class Gone(msgspec.Struct, frozen=True, gc=False):
    """What became of a chunk, and when (the store's clock)."""

    at: float
    why: str
    is_stored: bool = True  # when it was evicted from memory, the tiers below had been given it

    def told(self, now: float) -> str:
        """In a sentence."""
        return f"{self.why}, {ago(now - self.at)}"


class History:
    """The last keys that are gone. Owned by the control loop; each call costs what it names."""

    def __init__(self) -> None:
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()
        self.has_forgotten = False  # so that a key it does not know may have been here

    def note(self, keys: Iterable[bytes], why: str, now: float, *, is_stored: bool = True) -> None:
        """These are gone from now on."""
        gone = Gone(now, why, is_stored)
        for key in keys:
            if key in self._gone:
                self._gone.move_to_end(key)
            self._gone[key] = gone
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
            self.has_forgotten = True

    def why(self, key: bytes) -> Gone | None:
        """What became of the last chunk of this key; None: it never was here, or that is forgotten."""
        return self._gone.get(key)

    def is_missed(self, key: bytes) -> bool:
        """Whether the last chunk of this key was whole, and left memory for others or by its age: nobody deleted it."""
        gone = self._gone.get(key)
        return gone is not None and gone.why.startswith(_OUTLIVED)


def ago(seconds: float) -> str:
    """How long something is over."""
    return f"{seconds:.1f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
