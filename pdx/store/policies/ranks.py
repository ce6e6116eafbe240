"""Chunks sorted by rank, for policies that recognize a chunk after it was held; and the policies that consist of such
an order.

QueueOrder: Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with
CachedAttention", ATC 2024, section 3.3.2 (scheduler-aware eviction). Idle time: its section 4.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Generic

from msgspec.structs import replace
from sortedcontainers import SortedKeyList

from pdx.store.deadlines import Deadlines
from pdx.store.policies.policy import E, EvictionPolicy, Rank

MAX_PAST = 4096  # per call: to move them takes 15 ms of the control loop


class Ranks(Generic[E]):
    """Evictable chunks sorted by `chunk.rank`; each call costs a search in a sorted list."""

    def __init__(self) -> None:
        self._sorted: SortedKeyList[E, Rank] = SortedKeyList(key=attrgetter("rank"))
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sorted)

    def new(self, before: E | None = None, first: int = 0) -> Rank:
        """A rank for a new chunk: after all ranks that begin with `first` or less, or just before that of `before` if
        it begins with `first`."""
        if before is not None and before.rank is not None and before.rank[0] == first:
            return first, before.rank[1], before.rank[2] - 1
        return first, next(self._numbers), 0

    def add(self, chunk: E) -> None:
        self._sorted.add(chunk)

    def discard(self, chunk: E) -> None:
        self._sorted.remove(chunk)

    def behind(self, rank: Rank | None) -> E | None:
        """The first chunk after this rank (of all by default)."""
        at = 0 if rank is None else self._sorted.bisect_key_right(rank)
        return self._sorted[at] if at < len(self._sorted) else None

    def between(self, above: Rank | None, most: Rank | None) -> Iterator[E]:
        """The chunks with a rank above `above` and up to `most`. Nothing may change meanwhile."""
        found: Iterator[E] = self._sorted.irange_key(above, most, inclusive=(False, True))
        return found

    def within(self, start: E | None) -> Iterator[E]:
        """All chunks, from `start` on if it has a rank. Nothing may change meanwhile."""
        least = start.rank if start is not None else None
        return iter(self._sorted) if least is None else self._sorted.irange_key(least)


class Ranked(EvictionPolicy[E]):
    """A policy whose order is that of the ranks given by its `insert`."""

    def __init__(self) -> None:
        self._ranks: Ranks[E] = Ranks()

    def hold(self, chunk: E) -> None:
        self._ranks.discard(chunk)

    def victims(self, start: E | None) -> Iterator[E]:
        return self._ranks.within(start)


class Expected(Ranked[E]):
    """Chunks of one priority that applications expect to want again (`Hints.reuse_s`): those expected last go first,
    the end of a prompt before its beginning.

    This is Belady's order, as far as applications know the future. Chunks whose time has passed move to another level
    (`pdx.store.eviction`).
    """

    def insert(self, chunk: E, before: E | None = None) -> None:
        first = _first(chunk.keep.expected_at)
        if chunk.rank is None or chunk.rank[0] != first:
            chunk.rank = self._ranks.new(before, first)
        self._ranks.add(chunk)

    def past(self, now: float) -> list[E]:
        """Chunks that were expected by now, up to `MAX_PAST`."""
        past = (chunk for chunk in self._ranks.between((_first(now), -1, 0), None) if chunk.keep.expected_at <= now)
        return list(itertools.islice(past, MAX_PAST))


def _first(at: float) -> int:
    """The first element of the rank of a chunk expected then: milliseconds, larger if sooner."""
    return -int(at * 1000)


class QueueOrder(Ranked[E]):
    """Chunks that queued requests want: those of the last request go first, from the end of its prompt."""

    def __init__(self, places: Mapping[bytes, Mapping[int, int]]) -> None:
        """`places`: key -> (number of a request that wants it -> its index in that prompt), in the queue's order."""
        self._places = places
        super().__init__()

    def insert(self, chunk: E, before: E | None = None) -> None:
        """See `EvictionPolicy.insert`. A chunk whose place changes is held and inserted again."""
        chunk.rank = self.rank(chunk.key)
        self._ranks.add(chunk)

    def rank(self, key: bytes) -> Rank:
        """The rank of chunks with this key, which must be wanted."""
        number, index = next(iter(self._places[key].items()))
        return -number, -index, 0


class Age(Ranked[E]):
    """A chunk expires `seconds` after it was sealed, even if there is room; for room the oldest goes first.

    A use does not extend its life, unless `is_idle`: then the time counts from the end of the last lease or pin, and
    for room the least recently used chunk goes first. A chunk that is leased when it expires is no longer found, and
    freed with its last lease; a pinned one expires when it is unpinned.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], *, is_idle: bool = False) -> None:
        super().__init__()
        self._is_idle = is_idle
        self._seconds = seconds
        self._clock = clock
        self._ends: Deadlines[E] = Deadlines()

    def insert(self, chunk: E, before: E | None = None) -> None:
        if chunk.rank is None:
            chunk.rank = self._ranks.new(before)
            if not chunk.keep.expires_at:
                chunk.keep = replace(chunk.keep, expires_at=self._clock() + self._seconds)
        self._ends.add((chunk,), chunk.keep.expires_at)
        self._ranks.add(chunk)

    def hold(self, chunk: E) -> None:
        super().hold(chunk)
        if self._is_idle:
            self.remove(chunk)
            chunk.keep = replace(chunk.keep, expires_at=0.0)

    def remove(self, chunk: E) -> None:
        self._ends.discard(chunk, chunk.keep.expires_at)
        super().remove(chunk)

    def overdue(self) -> list[E]:
        return [chunk for chunk in self._ends.take(self._clock()) if not chunk.keep.pins]
