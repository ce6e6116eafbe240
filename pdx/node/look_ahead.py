"""Requests that wait in engines' queues: their chunks are loaded ahead of their turn, and evicted last.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention", ATC 2024,
section 3.3: of the queue as many requests are looked at as there is room for.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from pdx.node.sessions import Session
from pdx.store.copy import Copy
from pdx.store.store import Store
from pdx.store.tiers import Tiers
from pdx.wire.messages import Expect

SHARE = 0.5  # of the first arena, for what the queue wants
MAX_REQUESTS = 4096  # of all queues together
MAX_KEYS = 1 << 17
SPARE = 64  # numbers of requests that are gone are tolerated up to so many, and as many again as there are


class Expected(msgspec.Struct, eq=False):
    """One request in a queue."""

    request: str
    number: int  # its place in the order in which they came
    keys: Sequence[bytes]
    shards: int
    arenas: Sequence[int]
    is_named: bool  # the keys are a client's names
    nbytes: int = 0  # of its chunks that were here, or were being loaded, when that was looked up
    copies: list[Copy] = []


class LookAhead:
    """All requests that engines have told of and that have not asked yet. Owned by the control loop.

    A call costs what it names; `turn` looks each request up once, and again when a remote store has answered.
    """

    def __init__(self, store: Store, tiers: Tiers, counters: Counter[str]) -> None:
        self._store = store
        self._tiers = tiers
        self._counters = counters
        self._expected: dict[tuple[int, str], Expected] = {}
        self._by_number: dict[int, Expected] = {}
        self._of_session: dict[int, dict[str, None]] = {}
        self._numbers = 0
        self._keys = 0
        self._due: list[int] = []  # a heap: numbers of those to look up, and of some that are gone
        self._nbytes = 0  # of all that were looked up

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, session: Session, ask: Expect, arenas: Sequence[int]) -> bool:
        """A request of this session waits for its turn, or, without keys, does so no more; whether it is heeded."""
        if not ask.keys:
            return self._end(session.number, ask.request, is_over=True)
        name = session.number, ask.request
        full = len(self._expected) >= MAX_REQUESTS or self._keys + len(ask.keys) > MAX_KEYS
        if full or name in self._expected:
            self._counters["expected_too_many"] += full
            return False
        self._numbers += 1
        expected = self._expected[name] = Expected(
            ask.request, self._numbers, ask.keys, ask.shards, arenas, session.hello.kind == "client"
        )
        self._by_number[self._numbers] = expected
        self._of_session.setdefault(session.number, {})[ask.request] = None
        self._keys += len(ask.keys)
        self._store.want(expected.keys, expected.number)
        heapq.heappush(self._due, expected.number)
        return True

    def asks(self, session: Session, request: str) -> None:
        """Its turn has come: what is being loaded for it is its own from now on."""
        self._end(session.number, request, is_over=False)

    def end_session(self, session: Session) -> None:
        """Nobody waits there any more."""
        for request in list(self._of_session.get(session.number, ())):
            self._end(session.number, request, is_over=True)

    def _end(self, session: int, request: str, *, is_over: bool) -> bool:
        expected = self._expected.pop((session, request), None)
        if expected is None:
            return False
        del self._by_number[expected.number]
        of_session = self._of_session[session]
        del of_session[request]
        if not of_session:
            del self._of_session[session]
        self._keys -= len(expected.keys)
        self._store.want_no_more(expected.keys, expected.number)
        if is_over:
            self._counters["prefetches_cancelled"] += self._tiers.give_up(expected.copies)
        self._nbytes -= expected.nbytes
        if len(self._due) > 2 * len(self._by_number) + SPARE:
            self._due = sorted(number for number in set(self._due) if number in self._by_number)
        return True

    def answered(self, keys: Iterable[bytes]) -> None:
        """A remote store has said whether it has these."""
        for number in {number for key in keys for number in self._store.wanted.get(key, ())}:
            heapq.heappush(self._due, number)

    def turn(self) -> None:
        """Load what the first requests of the queue want, as many as there is room for."""
        most = int(self._store.pools[0].total_bytes * SHARE)
        while self._due and self._nbytes < most:
            expected = self._by_number.get(heapq.heappop(self._due))
            if expected is not None:
                self._nbytes -= expected.nbytes
                self._look_up(expected, most - self._nbytes)
                self._nbytes += expected.nbytes

    def _look_up(self, expected: Expected, room_bytes: int) -> None:
        hits = self._store.find(expected.keys, expected.shards, expected.arenas)
        expected.nbytes = sum(chunk.room_bytes for chunks in hits for chunk in chunks)
        if any(expected.arenas) or len(hits) == len(expected.keys):
            return
        copies = self._tiers.prefetch(
            expected.keys[len(hits) :],
            expected.shards,
            room_bytes - expected.nbytes,
            is_named=expected.is_named,
            who=f"request {expected.request}, ahead of its turn",
        )
        expected.copies += copies
        expected.nbytes += sum(copy.held_bytes for copy in copies)
        self._counters["prefetched_chunks"] += sum(len(copy.keys) for copy in copies)
