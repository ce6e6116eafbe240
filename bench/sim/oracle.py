"""Belady's policy: what is wanted again last goes first. It knows the trace, so that no node can have it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from pdx.bench.sim.requests import Request
from pdx.store.policies.policy import E
from pdx.store.policies.ranks import Ranked

NEVER = 1 << 60


class Future(Mapping[bytes, Mapping[int, int]]):
    """When each key is wanted again, and where in its prompt it is then, in the form of what a queue wants
    (`TierHost.wanted`). `now`: the request that has its turn."""

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

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.next(key) != NEVER

    def __getitem__(self, key: bytes) -> Mapping[int, int]:
        return {self.next(key): self.place(key)}

    def __iter__(self) -> Iterator[bytes]:
        return filter(self.__contains__, self._wanted)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def place(self, key: bytes) -> int:
        """Where in its prompt it is."""
        return self._places.get(key, NEVER)


class Belady(Ranked[E]):
    """Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.

    Who replays a trace has the store refresh the chunks of each request when it is over: what a request wanted next
    may be another one then.
    """

    def __init__(self, future: Future) -> None:
        self._future = future
        super().__init__()
        self._numbers = 0

    def insert(self, chunk: E, before: E | None = None) -> None:
        self._numbers += 1
        chunk.rank = -self._future.next(chunk.key), -self._future.place(chunk.key), self._numbers
        self._ranks.add(chunk)

    def victims(self, start: E | None) -> Iterator[E]:
        """See `EvictionPolicy.victims`. The order may have changed since a search: each begins anew."""
        return self._ranks.within(None)
