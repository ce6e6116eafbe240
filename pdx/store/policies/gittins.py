"""What is least worth its room goes first, by how long chunks took until they were found again.

Time is counted in bytes of chunks that came or were found. Of each age it is known how many chunks were found at that
age, of those that lived to it, in memory or as a key that was evicted not long ago. From that follows what a chunk of
an age is worth: the most hits per byte and time that keeping it can give, whichever age it is kept to. That is an index
of Gittins, "Bandit Processes and Dynamic Allocation Indices", Journal of the Royal Statistical Society B 41, 1979.
Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018, evict by a like one.

Chunks that were found before are a kind of their own, with ages and worths of their own.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from pdx.store.policies.policy import E, EvictionPolicy, Rank
from pdx.store.policies.ranks import Ranks

NEW, FOUND = 0, 1  # kinds: what a rank begins with
FINEST = 1 / 32  # of the arena: the least age that is told from 0; each further step of ages is √2 times as far away
STEPS = 18  # of ages: up to eight times the arena, and all that is older
LOOK = 1 / 8  # of the arena came or was found, and the worths are worked out anew …
FADES = 0.99  # … and what was seen until then counts so much
GHOSTS = 4  # times the arena: bytes of chunks whose keys are remembered when they are evicted …
MAX_GHOSTS = 1 << 17  # … and so many keys at most: about 32 MB
PRIOR_SHARE = 0.03  # of the arena: so many bytes count as seen at each age before any were …
PRIOR = {NEW: 0.15, FOUND: 0.3}  # … found in the time in which the age grows e-fold, as with LRU: old ones less often


class Ages:
    """Of one kind of chunks: at which ages they were found, or lost from sight. Bytes throughout."""

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
        self._found = [0.0] * STEPS  # at this age
        self._over = [0.0] * STEPS  # found at this age, or not looked at any more
        self._alive: dict[int, int] = {}  # by the period in which they began; all that are older than that are in -1
        self.worths: list[float] = []
        self.look(0)

    def step(self, age: int) -> int:
        return 0 if age < self._unit else min(STEPS - 1, 1 + int(2 * math.log2(age / self._unit)))

    def begins(self, since: int, nbytes: int) -> None:
        """A chunk is here, or was found, since then."""
        period = since // self._period
        self._alive[period] = self._alive.get(period, 0) + nbytes

    def ends(self, since: int, now: int, nbytes: int, *, is_found: bool) -> None:
        """It was found now, or is forgotten."""
        step = self.step(now - since)
        self._over[step] += nbytes
        self._found[step] += nbytes * is_found
        period = since // self._period
        period = period if period in self._alive else -1
        self._alive[period] -= nbytes
        if not self._alive[period]:
            del self._alive[period]

    def look(self, now: int) -> None:
        """Work out the worths anew; costs the same however many chunks there are."""
        over = self._over.copy()
        oldest = now // self._period - int(self._edges[-2] / self._period) - 1
        for period, nbytes in list(self._alive.items()):
            over[STEPS - 1 if period < 0 else self.step(now - period * self._period)] += nbytes
            if 0 <= period < oldest:
                self._alive[-1] = self._alive.get(-1, 0) + self._alive.pop(period)
        older = 0.0
        shares = [0.0] * STEPS
        for step in reversed(range(STEPS)):
            seen = older + over[step] / 2  # those that ended here were here for half of it
            older += over[step]
            known = self._prior_bytes
            shares[step] = min(1.0, (self._found[step] + known * self._prior[step]) / (seen + known))
        self.worths = worths(shares, self._widths)
        self._found = [each * FADES for each in self._found]
        self._over = [each * FADES for each in self._over]


def worths(shares: Sequence[float], widths: Sequence[float]) -> list[float]:
    """What a chunk at the beginning of each step is worth: the most of what may be found over the time until then.

    `shares`: of those that come to a step, how many are found in it, which takes as long as `widths` says.
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
    """See above. Of each kind the chunk that was used longest ago is looked at, and the one that is worth less goes."""

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
        """See `EvictionPolicy.insert`. What was found becomes the newest when its last reader is done."""
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
        """It is the newest of its kind, or as old as `before` and behind it."""
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
