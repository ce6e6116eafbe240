"""Belady's policy: evict first what is wanted again last. It needs the whole trace, so no real node can use it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from pdx.bench.sim.requests import Request
from pdx.errors import ConfigError
from pdx.store.policies.policy import E
from pdx.store.policies.ranks import Ranked

NEVER = 1 << 60


class Future(Mapping[bytes, Mapping[int, int]]):
    """The turn at which each key is wanted next, and its index in that prompt, in the form of `TierHost.wanted`. A
    request wants its keys until it has had its turn (`mark_turn`)."""

    def __init__(self, requests: Sequence[Request]) -> None:
        if any(request.content for request in requests):
            raise ConfigError("belady knows keys, and what is moved is wanted by what it holds: another policy")
        self._wanted: dict[bytes, deque[int]] = {}
        self._positions: dict[bytes, int] = {}
        self._had_turn: set[int] = set()
        self._arrived: dict[int, int] = {}  # request -> its place in the order of arrival
        for number, request in enumerate(requests):
            for place, key in enumerate(request.keys):
                self._wanted.setdefault(key, deque()).append(number)
                self._positions[key] = place

    def mark_arrived(self, number: int) -> None:
        """The request is queued now. A session's request may arrive later than in the trace."""
        self._arrived[number] = len(self._arrived)

    def mark_turn(self, number: int) -> None:
        """The request has had its turn."""
        self._had_turn.add(number)

    def next_use(self, key: bytes) -> int:
        """The turn at which the key is wanted next, as far as it is known."""
        numbers = self._wanted.get(key, ())
        while numbers and numbers[0] in self._had_turn:
            numbers.popleft()
        return self._arrived.get(numbers[0], max(numbers[0], len(self._arrived))) if numbers else NEVER

    def __contains__(self, key: object) -> bool:
        return True  # a key that is never wanted again goes first, and displaces no other

    def __getitem__(self, key: bytes) -> Mapping[int, int]:
        return {self.next_use(key): self.position(key)}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def position(self, key: bytes) -> int:
        """The key's index in its prompts."""
        return self._positions.get(key, NEVER)


class Belady(Ranked[E]):
    """Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.

    The caller that replays a trace has the store refresh each request's chunks once the request is over: another
    request may want them next.
    """

    def __init__(self, future: Future) -> None:
        self._future = future
        super().__init__()
        self._numbers = 0

    def insert(self, chunk: E, before: E | None = None) -> None:
        self._numbers += 1
        chunk.rank = -self._future.next_use(chunk.key), -self._future.position(chunk.key), self._numbers
        self._ranks.add(chunk)

    def victims(self, start: E | None) -> Iterator[E]:
        """See `EvictionPolicy.victims`. Ignores `start`: the order may have changed since the last search."""
        return self._ranks.within(None)
