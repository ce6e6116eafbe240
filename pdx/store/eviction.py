"""Which chunks of an arena, or files of a disk, may be evicted, and in which order: by level, then by a policy."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic

from sortedcontainers import SortedKeyList

from pdx.store.policies.policy import IN, ORDINARY, OUT, PARKED, E, EvictionPolicy
from pdx.store.policies.ranks import Expected, QueueOrder
from pdx.telemetry.env import Env

OVER = -2  # level of chunks over the quota of their cache salt
LEAST = -1  # level of the least valuable: ends of prompts that are not known to be shared, and passed chunks
WANTED = 20  # level of chunks that queued requests will use, above all priorities


class EvictionOrder(Generic[E]):
    """The sealed chunks of one arena that are neither leased nor pinned; or the unpinned files of one disk, for which
    there are no priorities, quotas and partial chunks.

    Lower levels go first. Each priority that an application can give (`Hints.priority`) has two levels: chunks that
    the application expects to want again stay longer than the rest, until that time (`Keep.expected_at`). Below all of
    them are chunks over the quota of their cache salt, ends of prompts, and chunks that prompts have passed; above them
    are chunks that queued requests will use. `insert`, `hold` and `remove` are idempotent. Owned by the control loop.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy[E]],
        wanted: Mapping[bytes, Mapping[int, int]],
        quota: Quota[E] | None,
        env: Env,
    ) -> None:
        """`make`: makes the policy of one level. `wanted`: see `QueueOrder`; the caller calls `refresh` for the chunks
        that a change of it concerns. `quota`: of each cache salt, if there is one."""
        self._make = make
        self._quota = quota
        self._wanted = wanted
        self._clock = env.clock
        # A policy with a time limit (`overdue`) knows only the chunks of its level: expected reuse does not move them.
        self._spare: EvictionPolicy[E] | None = make()  # for the first level that needs one
        self.weighs_reuse = type(self._spare).overdue is EvictionPolicy.overdue
        self._levels: dict[int, EvictionPolicy[E]] = {}
        self._sorted: list[int] = []
        self._heeds_uses = False  # whether a policy overrides `access`; else that call is spared
        self.nbytes = 0  # total room of the evictable chunks

    def __contains__(self, chunk: E | None) -> bool:
        return chunk is not None and chunk.standing == IN

    def insert(self, chunk: E, before: E | None = None, *, goes_first: bool = False) -> None:
        """Make the chunk evictable. `before`: one of its predecessors in the prompt, which should stay longer.

        `goes_first`: the chunk is the end of a prompt that no other prompt has been found to share.
        """
        if chunk.standing == IN:
            return
        over = None
        if self._quota is not None and chunk.standing != PARKED:  # parked: it was not used
            over = self._quota.use(chunk, before)
            chunk.is_over = False
            for each in over:
                each.is_over = True
        is_least = goes_first or chunk.is_passed
        level = LEAST if is_least else 2 * chunk.hints.priority
        if chunk.keep is not ORDINARY and chunk.keep.expected_at and not is_least and self.weighs_reuse:
            level += chunk.keep.expected_at > self._clock()
        if chunk.is_over:
            level = OVER
        if chunk.key in self._wanted:
            level = WANTED
        if level != chunk.level:
            self.hold(chunk)
            self._leave(chunk)
            chunk.level = level
        if chunk.standing != PARKED:
            policy = self._levels.get(level) or self._new_level(level)
            policy.insert(chunk, before if before is not None and before.level == level else None)
        chunk.standing = IN
        self.nbytes += chunk.room_bytes
        if over:
            self._go_first(over)

    def _go_first(self, chunks: Iterable[E]) -> None:
        """Move these chunks, which are over their quota from now on, to that level."""
        for chunk in chunks:
            if chunk.standing == IN and chunk.level not in (OVER, WANTED):
                self._levels[chunk.level].hold(chunk)
                self._leave(chunk)
                chunk.level = OVER
                (self._levels.get(OVER) or self._new_level(OVER)).insert(chunk, None)

    def hold(self, chunk: E, *, is_use: bool = False, keeps_place: bool = False) -> None:
        """Protect the chunk from eviction for now, because it is read or pinned. `is_use`: a request has hit it.

        `keeps_place`: if it is next inserted again, without another `hold`, its place is the same as before.
        """
        if chunk.standing == IN:
            chunk.standing = PARKED if keeps_place else OUT
            self.nbytes -= chunk.room_bytes
            if not keeps_place:
                self._levels[chunk.level].hold(chunk)
        elif chunk.standing == PARKED and not keeps_place:
            chunk.standing = OUT
            self._levels[chunk.level].hold(chunk)
        if is_use:
            chunk.is_passed = False
            if self._heeds_uses and chunk.level in self._levels:
                self._levels[chunk.level].access(chunk)

    def remove(self, chunk: E) -> None:
        self.hold(chunk)
        self._leave(chunk)
        if self._quota is not None:
            self._quota.remove(chunk)

    def _leave(self, chunk: E) -> None:
        if chunk.rank is not None:  # else its policy does not know it
            self._levels[chunk.level].remove(chunk)

    def access(self, chunk: E) -> None:
        """A request has hit the chunk; from now on it is on the level of its priority."""
        was_there = chunk.standing == IN
        self.hold(chunk, is_use=True)
        if was_there:
            self.insert(chunk)

    def refresh(self, chunk: E) -> None:
        """Insert the chunk anew: a request that found it still waits for others, or the queue wants other chunks."""
        if chunk.standing == IN:
            self.hold(chunk)
            self.insert(chunk)

    def victims(self, instead: bytes | None = None) -> Iterator[E]:
        """The chunks in order of eviction. `instead`: the key of a chunk that would take their place; if the queue
        wants that, too, chunks that are wanted sooner are left out.

        Nothing may be inserted, held or removed meanwhile.
        """
        found = itertools.chain.from_iterable(self.levels())
        wanted = self._levels.get(WANTED) if instead is not None and instead in self._wanted else None
        if not isinstance(wanted, QueueOrder) or instead is None:
            return found
        rank = wanted.rank(instead)
        return itertools.takewhile(lambda chunk: chunk.level != WANTED or (chunk.rank or rank) < rank, found)

    def levels(self, start: E | None = None) -> Iterator[Iterator[E]]:
        """The chunks in order of eviction, level by level, beginning at `start` if that is evictable."""
        if start is None or start not in self:
            found = (self._levels[level].victims(None) for level in self._sorted)
        else:
            found = (
                self._levels[level].victims(start if level == start.level else None)
                for level in self._sorted
                if level >= start.level
            )
        return ((chunk for chunk in of_level if chunk.standing == IN) for of_level in found)

    def peek(self) -> Iterator[E]:
        """The approximate order of eviction, including chunks held with their place kept; changes nothing.

        Nothing may be inserted, held or removed meanwhile.
        """
        return itertools.chain.from_iterable(self._levels[level].peek() for level in self._sorted)

    def tick(self) -> None:
        """End the precedence of chunks that were expected by now."""
        now = self._clock()
        for policy in list(self._levels.values()):
            for chunk in policy.past(now) if isinstance(policy, Expected) else ():
                was_there = chunk.standing == IN
                self.hold(chunk)
                if was_there:
                    self.insert(chunk)

    def overdue(self) -> list[E]:
        """Chunks, held or not, that should go even if there is room. Each is returned once."""
        return [chunk for policy in self._levels.values() for chunk in policy.overdue()]

    def _new_level(self, level: int) -> EvictionPolicy[E]:
        is_expected = 0 < level < WANTED and level % 2 == 1
        if level == WANTED:
            policy: EvictionPolicy[E] = QueueOrder(self._wanted)
        elif is_expected:
            policy = Expected()
        else:
            policy, self._spare = self._spare or self._make(), None
        self._levels[level] = policy
        self._sorted = sorted(self._levels)
        self._heeds_uses = self._heeds_uses or type(policy).access is not EvictionPolicy.access
        return policy


class Quota(Generic[E]):
    """Tracks, per cache salt, its most recently used chunks up to `most_bytes` in all.

    The salt's other chunks are over the quota: they are evicted first (`pdx.store.eviction`), but only when room is
    needed. Chunks without a salt are not counted. A call takes searches in sorted lists, for what it returns. Owned by
    the control loop.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._numbers = itertools.count(1)
        self._ranks: dict[E, tuple[int, int]] = {}  # of chunks within the quota; lower ranks exceed it first
        self._within: dict[bytes, SortedKeyList[E, tuple[int, int]]] = {}  # by salt
        self._nbytes: Counter[bytes] = Counter()

    @classmethod
    def of(cls, total_bytes: int, share: float) -> Quota[E] | None:
        """A quota of this share of the total; None if that is all of it, so that nothing need be counted."""
        return cls(int(total_bytes * share)) if share < 1.0 else None

    def use(self, chunk: E, before: E | None) -> list[E]:
        """Count the chunk as just used, or new; return the chunks of its salt that are over the quota from now on.

        `before`: a predecessor in the prompt that was used with it, and exceeds the quota later.
        """
        salt = chunk.hints.salt
        if not salt:
            return []
        self.remove(chunk)
        if before is not None and before.is_over:  # useless without its predecessor
            return [chunk]
        number, depth = self._ranks[before] if before in self._ranks else (next(self._numbers), 1)
        self._ranks[chunk] = number, depth - 1
        if salt not in self._within:
            self._within[salt] = SortedKeyList(key=self._ranks.__getitem__)
        within = self._within[salt]
        within.add(chunk)
        self._nbytes[salt] += chunk.room_bytes
        over: list[E] = []
        while self._nbytes[salt] > self._most_bytes:
            over.append(within[0])
            self.remove(over[-1])
        return over

    def remove(self, chunk: E) -> None:
        """Stop counting a chunk that is gone, or over the quota. Idempotent."""
        if chunk not in self._ranks:
            return
        salt = chunk.hints.salt
        within = self._within[salt]
        within.remove(chunk)
        del self._ranks[chunk]
        self._nbytes[salt] -= chunk.room_bytes
        if not within:
            del self._within[salt], self._nbytes[salt]
