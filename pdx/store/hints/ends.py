"""When chunks are to be forgotten, wherever they lie by then."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from pdx.store.deadlines import Deadlines

MAX_ENDS = 1 << 17  # keys that have an end
MAX_TAKEN = 2048  # at one time: to forget them takes 25 ms of the control loop


class Ends:
    """Keys whose chunks have a time to live (`Hints.ttl_s`). Owned by the control loop; each call costs what it names.

    A chunk lives as long as the longest of the requests that use it: one that uses it and sets no end takes the end
    away, and so what has no end gets none. The node remembers ends in memory alone.
    """

    def __init__(self) -> None:
        self.until: dict[bytes, float] = {}  # of each key its end, for others to read only
        self._deadlines: Deadlines[bytes] = Deadlines()
        self._over: deque[bytes] = deque()  # their time is over, unless they were used since; to be taken

    def __len__(self) -> int:
        return len(self.until)

    def set(self, new: Iterable[bytes], known: Iterable[bytes], until: float) -> tuple[int, int, int]:
        """A request that ends so uses these: `new` ones are nobody else's, `known` ones may have no end.

        :returns: how many have an end now, how many do not because others use them, and how many because there is no
            place.
        """
        ended = others = excess = 0
        for keys, are_new in ((new, True), (known, False)):
            for key in keys:
                was = self.until.get(key)
                if was is None and not are_new:
                    others += 1
                    continue
                if was is None and len(self.until) >= MAX_ENDS:
                    excess += 1
                    continue
                ended += 1
                if was is None or until > was:
                    self._move(key, was, until)
        return ended, others, excess

    def _move(self, key: bytes, was: float | None, until: float) -> None:
        if was is not None:
            self._deadlines.discard(key, was)
        self.until[key] = until
        self._deadlines.add((key,), until)

    def use(self, keys: Iterable[bytes]) -> None:
        """A request that sets no end uses these."""
        for key in keys:
            was = self.until.pop(key, None)
            if was is not None:
                self._deadlines.discard(key, was)

    def postpone(self, keys: Iterable[bytes], until: float) -> None:
        """These cannot be forgotten yet."""
        for key in keys:
            self._move(key, self.until.get(key), until)

    def take(self, now: float) -> list[bytes]:
        """Those whose time is over, or some of them; they are forgotten here."""
        self._over += self._deadlines.take(now)
        keys: list[bytes] = []
        while self._over and len(keys) < MAX_TAKEN:
            key = self._over.popleft()
            if self.until.get(key, math.inf) <= now:
                del self.until[key]
                keys.append(key)
        return keys
