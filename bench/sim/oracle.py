"""Belady's policy: what is wanted again last goes first. It knows the trace, so that no node can have it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from pdx.bench.sim.requests import Request
from pdx.errors import ConfigError
from pdx.store.policies.policy import E
from pdx.store.policies.ranks import Ranked

NEVER = 1 << 60


class Future(Mapping[bytes, Mapping[int, int]]):
    """When each key is wanted again, and where in its prompt it is then, in the form of what a queue wants
    (`TierHost.wanted`). A request wants its keys until it is `over`: until it has had its turn."""

    def __init__(self, requests: Sequence[Request]) -> None:
        if any(request.content for request in requests):
            raise ConfigError("belady knows keys, and what is moved is wanted by what it holds: another policy")
        self._wanted: dict[bytes, deque[int]] = {}
        self._places: dict[bytes, int] = {}
        self._over: set[int] = set()
        self._arrived: dict[int, int] = {}  # requests, in the order in which they have
        for number, request in enumerate(requests):
            for place, key in enumerate(request.keys):
                self._wanted.setdefault(key, deque()).append(number)
                self._places[key] = place

    def arrives(self, number: int) -> None:
        """This request is in a queue now. Of a session it may come later than the trace has it."""
        self._arrived[number] = len(self._arrived)

    def over(self, number: int) -> None:
        """This request has had its turn."""
        self._over.add(number)

    def next(self, key: bytes) -> int:
        """At which turn it is wanted next, as far as that is known."""
        numbers = self._wanted.get(key, ())
        while numbers and numbers[0] in self._over:
            numbers.popleft()
        return self._arrived.get(numbers[0], max(numbers[0], len(self._arrived))) if numbers else NEVER

    def __contains__(self, key: object) -> bool:
        return True  # what is never wanted again goes first, and takes no other's place

    def __getitem__(self, key: bytes) -> Mapping[int, int]:
        return {self.next(key): self.place(key)}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

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
