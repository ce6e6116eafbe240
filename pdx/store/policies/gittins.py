"""The Gittins policy: evicts the chunk that is least worth its room, by the ages at which chunks are hit again.

Time is counted in bytes of chunks that came or were hit. For each age the policy estimates the share of chunks hit at
that age among those that reached it, in memory or as a recently evicted key. From that follows the worth of a chunk of
an age: the most hits per byte and time that keeping it can give, over all ages up to which it may be kept. That is an
index of Gittins, "Bandit Processes and Dynamic Allocation Indices", Journal of the Royal Statistical Society B 41,
1979. Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018, use a similar one.

Chunks that were hit before are a kind of their own, with separate ages and worths.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from pdx.store.policies.policy import E, EvictionPolicy, Rank
from pdx.store.policies.ranks import Ranks

NEW, FOUND = 0, 1  # kinds: the first element of a rank
FINEST = 1 / 32  # of the arena: the end of the first step of ages; each further step ends at √2 times the last
STEPS = 18  # of ages: up to eight times the arena, and everything older
LOOK = 1 / 8  # of the arena must come or be hit before the worths are computed anew …
FADES = 0.99  # … and earlier observations are multiplied by this
GHOSTS = 4  # times the arena: bytes of evicted chunks whose keys are remembered …
MAX_GHOSTS = 1 << 17  # … and the most keys: about 32 MB
PRIOR_SHARE = 0.03  # of the arena: bytes that count as observed at each age from the start, with …
PRIOR = {NEW: 0.15, FOUND: 0.3}  # … this rate of hits while the age grows e-fold: as with LRU, old ones less often


class Ages:
    """The ages at which chunks of one kind were hit, or forgotten. All counts are in bytes."""

    def __init__(self, total_bytes: int, prior: float) -> None:
        self._unit = total_bytes * FINEST
        self._edges = [0.0, *(self._unit * 2 ** (step / 2) for step in range(STEPS))]
        self._period = max(1, int(total_bytes * LOOK))
        self._prior_bytes = total_bytes * PRIOR_SHARE
        widths = [high - low for low, high in itertools.pairwise(self._edges)]
        self._widths = widths
        self._prior = [
            1 - math.exp(-prior * width / (low + width / 2)) for low, width in zip(self._edges, widths, strict=False)
        ]
        self._found = [0.0] * STEPS  # hit at this age
        self._over = [0.0] * STEPS  # hit or forgotten at this age
        self._alive: dict[int, int] = {}  # by the period in which they began; -1: all the oldest ones
        self.worths: list[float] = []
        self.look(0)

    def step(self, age: int) -> int:
        return 0 if age < self._unit else min(STEPS - 1, 1 + int(2 * math.log2(age / self._unit)))

    def begins(self, since: int, nbytes: int) -> None:
        """A chunk came, or was hit, at `since`: its age begins."""
        period = since // self._period
        self._alive[period] = self._alive.get(period, 0) + nbytes

    def ends(self, since: int, now: int, nbytes: int, *, is_found: bool) -> None:
        """A chunk's age ends: it was hit now, or is forgotten."""
        step = self.step(now - since)
        self._over[step] += nbytes
        self._found[step] += nbytes * is_found
        period = since // self._period
        period = period if period in self._alive else -1
        self._alive[period] -= nbytes
        if not self._alive[period]:
            del self._alive[period]

    def look(self, now: int) -> None:
        """Compute the worths anew; the cost does not depend on the number of chunks."""
        over = self._over.copy()
        oldest = now // self._period - int(self._edges[-2] / self._period) - 1
        for period, nbytes in list(self._alive.items()):
            over[STEPS - 1 if period < 0 else self.step(now - period * self._period)] += nbytes
            if 0 <= period < oldest:
                self._alive[-1] = self._alive.get(-1, 0) + self._alive.pop(period)
        older = 0.0
        shares = [0.0] * STEPS
        for step in reversed(range(STEPS)):
            seen = older + over[step] / 2  # chunks that ended in this step were in it for half of it
            older += over[step]
            known = self._prior_bytes
            shares[step] = min(1.0, (self._found[step] + known * self._prior[step]) / (seen + known))
        self.worths = worths(shares, self._widths)
        self._found = [each * FADES for each in self._found]
        self._over = [each * FADES for each in self._over]


def worths(shares: Sequence[float], widths: Sequence[float]) -> list[float]:
    """The worth of a chunk at the beginning of each step: the largest ratio of expected hits to time kept.

    `shares`: of the chunks that reach a step, the share hit in it. `widths`: how long each step lasts.
    """
    found = []
    for first in range(len(shares)):
        most, hits, time, left = 0.0, 0.0, 0.0, 1.0
        for share, width in zip(shares[first:], widths[first:], strict=True):
            hits += left * share
            time += left * (1 - share / 2) * width
            left *= 1 - share
            most = max(most, hits / time)
        found.append(most)
    return found


class Gittins(EvictionPolicy[E]):
    """Compares the least recently used chunk of each kind, and evicts the one that is worth less."""

    def __init__(self, total_bytes: int) -> None:
        """`total_bytes`: of the arena."""
        self._queues: tuple[Ranks[E], Ranks[E]] = Ranks(), Ranks()
        self._ages = Ages(total_bytes, PRIOR[NEW]), Ages(total_bytes, PRIOR[FOUND])
        self._now = 0
        self._look_each = max(1, int(total_bytes * LOOK))
        self._look_at = self._look_each
        # key and shard -> kind, since when, bytes
        self._ghosts: OrderedDict[tuple[bytes, int], tuple[int, int, int]] = OrderedDict()
        self._ghost_bytes = 0
        self._most_ghost_bytes = total_bytes * GHOSTS

    def insert(self, chunk: E, before: E | None = None) -> None:
        """See `EvictionPolicy.insert`. A chunk that was hit becomes the newest when its last reader is done."""
        if chunk.rank is None:
            ghost = self._ghosts.pop((chunk.key, chunk.shard), None)
            if ghost is not None:
                kind, since, nbytes = ghost
                self._ghost_bytes -= nbytes
                self._ages[kind].ends(since, self._now, nbytes, is_found=True)
            self._place(chunk, NEW if ghost is None else FOUND, before)
        elif chunk.uses:
            self._found(chunk)
            self._place(chunk, FOUND, before)
        assert chunk.rank is not None
        self._queues[chunk.rank[0]].add(chunk)

    def hold(self, chunk: E) -> None:
        assert chunk.rank is not None
        self._queues[chunk.rank[0]].discard(chunk)

    def access(self, chunk: E) -> None:
        chunk.uses += 1

    def remove(self, chunk: E) -> None:
        if chunk.rank is not None:
            if chunk.uses:
                self._found(chunk)
                self._place(chunk, FOUND, None)
            kind, since, _ = chunk.rank
            self._ghosts[chunk.key, chunk.shard] = kind, since, chunk.room_bytes
            self._ghost_bytes += chunk.room_bytes
            while self._ghost_bytes > self._most_ghost_bytes or len(self._ghosts) > MAX_GHOSTS:
                kind, since, nbytes = self._ghosts.popitem(last=False)[1]
                self._ghost_bytes -= nbytes
                self._ages[kind].ends(since, self._now, nbytes, is_found=False)
        super().remove(chunk)

    def victims(self, start: E | None) -> Iterator[E]:
        reached: list[Rank | None] = [None, None]  # in each queue
        if start is not None and start.rank is not None:
            kind, since, depth = start.rank
            reached[kind] = kind, since, depth - 1
        heads = [queue.behind(rank) for queue, rank in zip(self._queues, reached, strict=True)]
        while found := [chunk for chunk in heads if chunk is not None]:
            chunk = min(found, key=self._worth)
            yield chunk
            assert chunk.rank is not None
            kind = chunk.rank[0]
            heads[kind] = self._queues[kind].behind(chunk.rank)

    def _worth(self, chunk: E) -> float:
        assert chunk.rank is not None
        ages = self._ages[chunk.rank[0]]
        return ages.worths[ages.step(self._now - chunk.rank[1])]

    def _found(self, chunk: E) -> None:
        assert chunk.rank is not None
        kind, since, _ = chunk.rank
        self._ages[kind].ends(since, self._now, chunk.room_bytes, is_found=True)

    def _place(self, chunk: E, kind: int, before: E | None) -> None:
        """Make the chunk the newest of its kind, or as old as `before` but evicted before that."""
        self._now += chunk.room_bytes
        if before is not None and before.rank is not None and before.rank[0] == kind:
            chunk.rank = kind, before.rank[1], before.rank[2] - 1
        else:
            chunk.rank = kind, self._now, 0
        chunk.uses = 0
        self._ages[kind].begins(chunk.rank[1], chunk.room_bytes)
        if self._now >= self._look_at:
            self._look_at = self._now + self._look_each
            for ages in self._ages:
                ages.look(self._now)
