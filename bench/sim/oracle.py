"""Belady's policy: what is wanted again last goes first. It knows the trace, so that no node can have it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from pdx.bench.sim.requests import Request
from pdx.store.policies.policy import E
from pdx.store.policies.ranks import Ranked

NEVER = 1 << 60


class Future:
    """When each key is wanted again, and where in its prompt it is then. A request wants its keys until its turn."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._wanted: dict[bytes, deque[int]] = {}
        self._places: dict[bytes, int] = {}
        self._turn = -1
        for number, request in enumerate(requests):
            for place, key in enumerate(request.keys):
                self._wanted.setdefault(key, deque()).append(number)
                self._places[key] = place

    def turn(self, number: int) -> None:
        """This request has its turn; those before it had theirs."""
        self._turn = number

    def next(self, key: bytes) -> int:
        """At which turn it is wanted next."""
        numbers = self._wanted.get(key, ())
        while numbers and numbers[0] <= self._turn:
            numbers.popleft()
        return numbers[0] if numbers else NEVER

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
