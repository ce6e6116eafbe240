"""Which life of each peer is the present one, and which are known to be over. No I/O, bounded."""

from __future__ import annotations

from collections import OrderedDict, deque

_MAX_NAMES = 4096
_KEPT = 64  # ended lives per name


class Lives:
    """Epochs by name. A life that was followed by another of the same name has ended and never comes back."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, deque[int]] = OrderedDict()  # in the order last heard of; the last is no end
        self._now: dict[str, int] = {}

    def now(self, name: str) -> int | None:
        """The epoch last begun, None if nobody of that name was heard of."""
        return self._now.get(name)

    def is_over(self, name: str, epoch: int) -> bool:
        """Whether this life is known to have ended."""
        return epoch in self._ended.get(name, ())

    def begin(self, name: str, epoch: int) -> int | None:
        """`name` is alive in this life; the epoch of the life that thereby has ended, if there is one."""
        before = self._now.get(name)
        self._now[name] = epoch
        ended = self._ended.setdefault(name, deque(maxlen=_KEPT))
        self._ended.move_to_end(name)
        if len(self._ended) > _MAX_NAMES:
            forgotten, _ = self._ended.popitem(last=False)
            del self._now[forgotten]
        if before is None or before == epoch:
            return None
        ended.append(before)
        return before
