"""Chunks in the order of their ranks, for policies that know a chunk again after it was held; and those policies that
are no more than such an order.

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

MAX_PAST = 4096  # at one time: to move them takes 15 ms of the control loop


class Ranks(Generic[E]):
    """Chunks that may be evicted now, by `chunk.rank`; each call costs a search in a sorted list."""

    def __init__(self) -> None:
        self._sorted: SortedKeyList[E, Rank] = SortedKeyList(key=attrgetter("rank"))
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sorted)

    def new(self, before: E | None = None, first: int = 0) -> Rank:
        """The rank of who comes now: behind all others whose rank begins with `first` or less, but just before `before`
        where that has such a rank."""
        if before is not None and before.rank is not None and before.rank[0] == first:
            return first, before.rank[1], before.rank[2] - 1
        return first, next(self._numbers), 0

    def add(self, chunk: E) -> None:
        self._sorted.add(chunk)

    def discard(self, chunk: E) -> None:
        self._sorted.remove(chunk)

    def behind(self, rank: Rank | None) -> E | None:
        """The first one behind this rank (of all by default)."""
        at = 0 if rank is None else self._sorted.bisect_key_right(rank)
        return self._sorted[at] if at < len(self._sorted) else None

    def between(self, above: Rank | None, most: Rank | None) -> Iterator[E]:
        """All of them with a rank above the one and not above the other. Nothing may change meanwhile."""
        found: Iterator[E] = self._sorted.irange_key(above, most, inclusive=(False, True))
        return found

    def within(self, start: E | None) -> Iterator[E]:
        """All of them, from `start` on where it has a rank. Nothing may change meanwhile."""
        least = start.rank if start is not None else None
        return iter(self._sorted) if least is None else self._sorted.irange_key(least)


class Ranked(EvictionPolicy[E]):
    """A policy whose order is that of the ranks which its `insert` gives."""

    def __init__(self) -> None:
        self._ranks: Ranks[E] = Ranks()

    def hold(self, chunk: E) -> None:
        self._ranks.discard(chunk)

    def victims(self, start: E | None) -> Iterator[E]:
        return self._ranks.within(start)


class Expected(Ranked[E]):
    """What applications expect to be wanted again (`Hints.reuse_s`): chunks of one priority, the last expected first,
    the end of a prompt before its beginning.

    It is Belady's order, as far as applications know the future. Whose time has passed is on another level
    (`pdx.store.eviction`).
    """

    def insert(self, chunk: E, before: E | None = None) -> None:
        first = _first(chunk.keep.expected_at)
        if chunk.rank is None or chunk.rank[0] != first:
            chunk.rank = self._ranks.new(before, first)
        self._ranks.add(chunk)

    def past(self, now: float) -> list[E]:
        """Those that were expected by now, or some of them."""
        past = (chunk for chunk in self._ranks.between((_first(now), -1, 0), None) if chunk.keep.expected_at <= now)
        return list(itertools.islice(past, MAX_PAST))


def _first(at: float) -> int:
    """What the rank begins with of what is expected then: milliseconds, the sooner the more."""
    return -int(at * 1000)


class QueueOrder(Ranked[E]):
    """Chunks that the queue wants; first goes what the last request wants, from the end of its prompt."""

    def __init__(self, places: Mapping[bytes, Mapping[int, int]]) -> None:
        """`places`: by key, where in its prompt each request that wants it has it, the first in the queue first."""
        self._places = places
        super().__init__()

    def insert(self, chunk: E, before: E | None = None) -> None:
        """See `EvictionPolicy.insert`. A chunk whose place changes is held and inserted again."""
        chunk.rank = self.rank(chunk.key)
        self._ranks.add(chunk)

    def rank(self, key: bytes) -> Rank:
        """That of each chunk with this key, which is wanted."""
        number, index = next(iter(self._places[key].items()))
        return -number, -index, 0


class Age(Ranked[E]):
    """A chunk goes `seconds` after it was sealed, whether there is room or not; for room the oldest goes first.

    Use does not lengthen its life, unless it `is_idle`: then the time counts from the end of the last lease or pin, and
    for room the one that was used longest ago goes first. What is leased then is not found any more and goes with its
    last lease; what is pinned goes when it is unpinned.
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
