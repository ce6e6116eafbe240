"""Belady's policy: what is wanted again last goes first. It knows the trace, so that no node can have it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from pdx.bench.sim.requests import Request
from pdx.store.chunk import Chunk
from pdx.store.policies.ranks import Ranked

NEVER = 1 << 60


class Future:
    """When each key is wanted again, and where in its prompt it is then. `now`: the request that has its turn."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.now = -1
        self._wanted: dict[bytes, list[int]] = {}
        self._places: dict[bytes, int] = {}
        for number, request in enumerate(requests):
            for place, key in enumerate(request.keys):
                self._wanted.setdefault(key, []).append(number)
                self._places[key] = place

    def next(self, key: bytes) -> int:
        """The number of the next request that wants it, behind the one that has its turn."""
        numbers = self._wanted.get(key, ())
        at = bisect_right(numbers, self.now)
        return numbers[at] if at < len(numbers) else NEVER

    def get(self, key: bytes) -> dict[int, int]:
        """The same for tiers (`TierHost.wanted`); empty: nobody wants it again."""
        number = self.next(key)
        return {} if number == NEVER else {number: self.place(key)}

    def place(self, key: bytes) -> int:
        """Where in its prompt it is."""
        return self._places.get(key, NEVER)


class Belady(Ranked):
    """Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.

    Who replays a trace has the store refresh the chunks of each request when it is over: what a request wanted next
    may be another one then.
    """

    def __init__(self, future: Future) -> None:
        self._future = future
        super().__init__()
        self._numbers = 0

    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        self._numbers += 1
        chunk.rank = -self._future.next(chunk.key), -self._future.place(chunk.key), self._numbers
        self._ranks.add(chunk)

    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        """See `EvictionPolicy.victims`. The order may have changed since a search: each begins anew."""
        return self._ranks.within(None)
