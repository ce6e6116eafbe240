"""Requests that wait in engines' queues: their chunks are loaded ahead of their turn, and evicted last.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention", ATC 2024,
section 3.3: of the queue as many requests are looked at as there is room for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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


class Expected(msgspec.Struct, eq=False):
    """One request in a queue."""

    number: int  # its place in the order in which they came
    keys: Sequence[bytes]
    shards: int
    arenas: Sequence[int]
    is_named: bool  # the keys are a client's names
    nbytes: int = 0  # of its chunks that are here, or are being loaded …
    is_looked_up: bool = False  # … once that was looked up
    copies: list[Copy] = []


class LookAhead:
    """All requests that engines have told of and that have not asked yet. Owned by the control loop.

    A call costs what it names; `turn` looks at each request once, and again when a remote store has answered.
    """

    def __init__(self, store: Store, tiers: Tiers, counters: Counter[str]) -> None:
        self._store = store
        self._tiers = tiers
        self._counters = counters
        self._expected: OrderedDict[tuple[int, str], Expected] = OrderedDict()
        self._by_number: dict[int, Expected] = {}
        self._of_session: dict[int, dict[str, None]] = {}
        self._numbers = 0
        self._keys = 0
        self._is_due = False

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
            self._numbers, ask.keys, ask.shards, arenas, session.hello.kind == "client"
        )
        self._by_number[self._numbers] = expected
        self._of_session.setdefault(session.number, {})[ask.request] = None
        self._keys += len(ask.keys)
        self._store.want(expected.keys, expected.number)
        self._is_due = True
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
        self._is_due = True
        return True

    def answered(self, keys: Iterable[bytes]) -> None:
        """A remote store has said whether it has these."""
        for number in {number for key in keys for number in self._store.wanted.get(key, ())}:
            self._by_number[number].is_looked_up = False
            self._is_due = True

    def turn(self) -> None:
        """Load what the first requests of the queue want, as many as there is room for."""
        if not self._is_due:
            return
        self._is_due = False
        left = int(self._store.pools[0].total_bytes * SHARE)
        for (_, request), expected in self._expected.items():
            if not expected.is_looked_up:
                self._look_up(request, expected, left)
            left -= expected.nbytes
            if left <= 0:
                return

    def _look_up(self, request: str, expected: Expected, room_bytes: int) -> None:
        hits = self._store.find(expected.keys, expected.shards, expected.arenas)
        expected.nbytes = sum(chunk.room_bytes for chunks in hits for chunk in chunks)
        expected.is_looked_up = True
        if any(expected.arenas) or len(hits) == len(expected.keys):
            return
        room_bytes -= expected.nbytes
        missing, who = expected.keys[len(hits) :], f"request {request}, ahead of its turn"
        copies = self._tiers.prefetch(missing, expected.shards, room_bytes, is_named=expected.is_named, who=who)
        expected.copies += copies
        expected.nbytes += sum(copy.held_bytes for copy in copies)
        self._counters["prefetched_chunks"] += sum(len(copy.keys) for copy in copies)
