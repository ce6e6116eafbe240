"""Requests that wait in engines' queues or are on their way: their chunks are loaded ahead, and evicted last.

A proxy announces a request before its engine has read it and knows only its session, so the request is expected to
begin with the chunks that the session's last request used.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention", ATC 2024,
section 3.3: the look-ahead takes as many requests from the queue as there is room for.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from pdx.node.sessions import Session
from pdx.store.cache_groups import goals, restorable, whole
from pdx.store.chunk import NODE, Chunk, Wanted
from pdx.store.copy import Copy
from pdx.store.deadlines import Deadlines
from pdx.store.index import Groups
from pdx.store.lifecycle import State
from pdx.wire.messages import Admit, Expect

if TYPE_CHECKING:
    from pdx.node.service import Service

SHARE = 0.5  # of the first arena, for chunks that queues want
MAX_REQUESTS = 4096  # of all queues together
MAX_KEYS = 1 << 17
SESSIONS_SHARE = 0.5  # of each of these three, the most for announced requests; queues have the rest
MAX_SESSIONS = 4096  # whose last request is remembered
MAX_LOOKS = 8192  # at chunks, for one list of sessions
ARRIVAL_S = 30.0  # until a request that the proxy announced is given up
SPARE = 64  # stale numbers tolerated in the heap, beyond as many as there are requests


Of = tuple[bytes, str]  # a session of requests: its tenant (`Hints.salt`) and its name
Name = str | Of  # of an expected request: an engine's, or the next one of a session


class Expected(msgspec.Struct, eq=False):
    request: Name
    number: int  # in order of arrival
    wanted: Wanted
    until: float  # when it is given up
    lifts: bool = False  # whether its chunks go on to the arenas wanted, by way of the first one
    nbytes: int = 0  # of its chunks that were here or being loaded at the last look-up
    copies: list[Copy] = []
    is_loaded: bool = False  # whether its loads were begun, which happens once
    coming: set[Chunk] = set()  # being loaded; lifted when all of them are here or will never be


class LookAhead:
    """All announced requests that have not asked yet. Owned by the control loop.

    A call costs as much as the keys it names; `turn` looks up each request once, and again when a remote store answers.
    """

    def __init__(self, service: Service) -> None:
        self._store = service.store
        self._tiers = service.tiers
        self._copies = service.copies
        self._counters = service.counters
        self._expected: dict[tuple[int, Name], Expected] = {}
        self._by_number: dict[int, Expected] = {}
        self._of_session: Groups[int, Name] = Groups()
        self._numbers = 0
        self._keys = 0
        self._due: list[int] = []  # a heap: numbers of requests to look up, and some stale ones
        self._nbytes = 0  # of all requests that were looked up
        self._num_lifting = 0  # requests that lift chunks loaded for them
        self._clock = service.env.clock
        self._last: OrderedDict[Of, Wanted] = OrderedDict()  # last requests of sessions, the newest at the end
        self._last_keys = 0  # of all of them
        self._users: dict[bytes, Counter[bytes]] = {}  # by tenant, how often they use a key
        self._arrivals: Deadlines[Name] = Deadlines()  # sessions from which a request is to come

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, session: Session, ask: Expect, arenas: Sequence[int]) -> bool:
        """Note that a request of this session waits for its turn or, without keys, no longer does. False: ignored."""
        if not ask.keys:
            return self._end(session.number, ask.request, is_over=True)
        return self._add(session.number, ask.request, _wanted(session, ask, arenas))

    def kept(self, session: str) -> tuple[dict[str, tuple[int, int]], int]:
        """For sessions whose name contains `session`, the newest first: how many chunks of the last request are in
        memory, and their bytes; and the number of sessions left out because looking at them would take too long."""
        found: dict[str, tuple[int, int]] = {}
        looks = left_out = 0
        for (_, name), wanted in reversed(self._last.items()):
            if session not in name:
                continue
            if looks >= MAX_LOOKS:
                left_out += 1
                continue
            looks += len(wanted.keys)
            chunks = [chunk for key in wanted.keys for chunk in self._store.index.of(key)]
            found[name] = len(chunks), sum(chunk.slot.nbytes for chunk in chunks)
        return found, left_out

    def last(self, session: Of) -> Wanted | None:
        """The chunks that a session's last request asked for; None: no request is remembered."""
        return self._last.get(session)

    def unshared(self, keys: Sequence[bytes], session: Of) -> list[bytes]:
        """The keys that no other session of the same tenant used in its last request: those after shared prefixes."""
        last = self._last.get(session)
        own = Counter(last.keys) if last is not None else Counter[bytes]()
        users = self._users.get(session[0], own)
        return [key for key in keys if users[key] <= own[key]]

    def arriving(self, session: Of) -> None:
        """The proxy announces a request of this session."""
        last = self._last.get(session)
        if last is not None and self._await(session, last):
            self._counters["arrivals"] += 1

    def prefetch(self, session: Of, wanted: Wanted) -> bool:
        """Load these chunks as if a request of the session were on its way. False: there are too many requests."""
        known = self._expected.get((NODE, session))
        if known is not None and (known.wanted.keys, known.wanted.arenas) != (wanted.keys, wanted.arenas):
            self._end(NODE, session, is_over=False)
            known = None
        heeded = known is not None or self._await(session, wanted, lifts=any(wanted.arenas))
        self.turn()
        return heeded

    def _await(self, session: Of, wanted: Wanted, *, lifts: bool = False) -> bool:
        until = self._clock() + ARRIVAL_S
        heeded = self._add(NODE, session, wanted, until, lifts=lifts)
        if heeded:
            self._arrivals.add((session,), until)
        return heeded

    def came(self, session: Session, ask: Admit, arenas: Sequence[int]) -> None:
        """A request of a session (`ask.hints`) asks for its chunks, which the next request will need, too."""
        name = ask.hints.salt, ask.hints.session
        self._end(NODE, name, is_over=False)
        if name in self._last:
            self._forget(name)
        if len(ask.keys) > MAX_KEYS:
            return
        self._last[name] = _wanted(session, ask, arenas)
        self._last_keys += len(ask.keys)
        self._users.setdefault(name[0], Counter()).update(ask.keys)
        while len(self._last) > MAX_SESSIONS or self._last_keys > MAX_KEYS:
            self._forget(next(iter(self._last)))

    def _forget(self, name: Of) -> None:
        keys = self._last.pop(name).keys
        self._last_keys -= len(keys)
        users = self._users[name[0]]
        for key in keys:
            users[key] -= 1
            if not users[key]:
                del users[key]
        if not users:
            del self._users[name[0]]

    def tick(self) -> None:
        """Give up announced requests that have not come in time."""
        for session in self._arrivals.take(self._clock()):
            self._end(NODE, session, is_over=True)

    def _add(
        self, session: int, request: Name, wanted: Wanted, until: float = math.inf, *, lifts: bool = False
    ) -> bool:
        name = session, request
        share = SESSIONS_SHARE if session == NODE else 1.0  # waiting requests are certain, announced ones are not
        full = len(self._expected) >= share * MAX_REQUESTS or self._keys + len(wanted.keys) > share * MAX_KEYS
        full = full or (session == NODE and self._nbytes >= share * self._most_bytes)
        if full or name in self._expected:
            self._counters["expected_too_many"] += full
            return False
        self._numbers += 1
        expected = self._expected[name] = Expected(request, self._numbers, wanted, until, lifts)
        self._by_number[self._numbers] = expected
        self._num_lifting += lifts
        self._of_session.add(session, [request])
        self._keys += len(wanted.keys)
        self._tiers.want(wanted.keys, expected.number)
        heapq.heappush(self._due, expected.number)
        return True

    def asks(self, session: Session, request: str) -> None:
        """A request's turn has come: it takes over the chunks that are being loaded for it."""
        self._end(session.number, request, is_over=False)

    def end_session(self, session: Session) -> None:
        for request in self._of_session.of(session.number):
            self._end(session.number, request, is_over=True)

    def _end(self, session: int, request: Name, *, is_over: bool) -> bool:
        expected = self._expected.pop((session, request), None)
        if expected is None:
            return False
        del self._by_number[expected.number]
        self._of_session.discard(session, request)
        self._arrivals.discard(request, expected.until)
        self._keys -= len(expected.wanted.keys)
        self._tiers.want_no_more(expected.wanted.keys, expected.number)
        if is_over:
            self._counters["prefetches_cancelled"] += self._copies.give_up(expected.copies)
        self._nbytes -= expected.nbytes
        self._num_lifting -= expected.lifts
        if len(self._due) > 2 * len(self._by_number) + SPARE:
            self._due = sorted(number for number in set(self._due) if number in self._by_number)
        return True

    def answered(self, news: Iterable[Hashable]) -> None:
        """Look up requests again whose keys are in `news` (see `Env`): a remote store has said whether it has them."""
        keys = [each for each in news if isinstance(each, bytes)]
        for number in {number for key in keys for number in self._store.wanted.get(key, ())}:
            heapq.heappush(self._due, number)

    def landed(self, chunks: Iterable[Chunk]) -> None:
        """Note that these chunks were loaded, or never will be."""
        for chunk in chunks if self._num_lifting else ():
            for number in self._store.wanted.get(chunk.key, ()):
                expected = self._by_number[number]
                if chunk in expected.coming:
                    expected.coming.discard(chunk)
                    if not expected.coming:
                        heapq.heappush(self._due, number)

    def turn(self) -> None:
        """Load the chunks of the first requests in the queue, as many as there is room for."""
        while self._due and self._nbytes < self._most_bytes:
            expected = self._by_number.get(heapq.heappop(self._due))
            if expected is not None:
                self._nbytes -= expected.nbytes
                self._look_up(expected, self._most_bytes - self._nbytes)
                self._nbytes += expected.nbytes

    @property
    def _most_bytes(self) -> int:
        """The limit for `_nbytes`."""
        return int(self._store.pools[0].total_bytes * SHARE)

    def _look_up(self, expected: Expected, room_bytes: int) -> None:
        wanted = replace(expected.wanted, who=_who(expected.request))
        if expected.lifts:
            self._lift(expected, whole(wanted), room_bytes)
            return
        if wanted.rules:
            hits, found = restorable(self._store, wanted)
        else:
            found = self._store.find(wanted.keys, wanted.shards, wanted.arenas)
        expected.nbytes = sum(chunk.room_bytes for chunks in found for chunk in chunks)
        if any(wanted.arenas) or len(found) == len(wanted.keys):
            return
        ways = [(wanted, len(found))]
        if wanted.rules:  # the longest part of the prompt that can be loaded
            every = goals(self._store, wanted, hits, partial(self._tiers.is_near, wanted))
            ways = [(replace(wanted, keys=goal.keys, rules=(), is_whole=True), goal.hits) for goal in every]
        for flat, count in ways:
            copies = self._tiers.prefetch(flat, count, room_bytes - expected.nbytes)
            if copies:
                break
        else:
            return
        expected.copies += copies
        expected.nbytes += sum(copy.held_bytes for copy in copies)
        self._counters["prefetched_chunks"] += sum(len(copy.keys) for copy in copies)

    def _lift(self, expected: Expected, wanted: Wanted, room_bytes: int) -> None:
        """Copy the chunks on from the first arena, into which they are loaded first; costs as much as its keys."""
        shards, arenas = wanted.shards, wanted.arenas
        here = [chunks for key in wanted.keys for chunks in self._store.find([key], shards, arenas)]
        expected.nbytes = sum(chunk.room_bytes for chunks in here for chunk in chunks)
        there = {chunks[0].key for chunks in here}
        missing = [key for key in wanted.keys if key not in there]
        low = [key for key in missing if not self._store.find([key], shards)]
        room_bytes = min(room_bytes, int(min(self._store.pools[arena].total_bytes for arena in arenas) * SHARE))
        copies = self._tiers.copy_to_arenas(replace(wanted, keys=missing), room_bytes - expected.nbytes)
        expected.nbytes += sum(copy.held_bytes for copy in copies)
        if low and not expected.is_loaded:
            loads = self._tiers.prefetch(replace(wanted, keys=low, arenas=()), 0, room_bytes - expected.nbytes)
            known = (chunk for key in low for chunk in self._store.index.known(key, shards) or ())
            # Including chunks that are being loaded for other requests.
            expected.coming = {chunk for chunk in known if chunk.state is State.FILLING and chunk.writer == NODE}
            expected.is_loaded = bool(expected.coming)
            expected.nbytes += sum(copy.held_bytes for copy in loads)
            copies += loads
        expected.copies += copies
        self._counters["prefetched_chunks"] += sum(len(copy.keys) for copy in copies)


def _who(name: Name) -> str:
    return f"request {name}, ahead of its turn" if isinstance(name, str) else f"the next request of session {name[1]}"


def _wanted(session: Session, ask: Admit | Expect, arenas: Sequence[int]) -> Wanted:
    has_tail = isinstance(ask, Admit) and bool(ask.groups) and ask.has_tail
    return Wanted(ask.keys, ask.shards, arenas, session.is_client, rules=ask.groups, has_tail=has_tail)
