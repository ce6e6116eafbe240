"""Applications' hints that outlast their requests: chunks to demote to the tier below as soon as they have no reader,
and chunks with a time to live in all tiers."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import msgspec

from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.history import Cause
from pdx.store.store import Store
from pdx.store.tier import Tier
from pdx.store.tiers import Tiers
from pdx.telemetry.env import Env

MAX_DEMOTED = 1 << 16  # pending keys
MAX_LOOKS = 512  # keys per tick
MAX_ENDS = 1 << 17  # keys with an end
MAX_TAKEN = 2048  # keys per call: to delete them takes 25 ms of the control loop


class _Demoted(msgspec.Struct):
    """A key to demote: where its shards lie, and until when the tier below may take to get it."""

    shards: int
    arenas: Sequence[int]
    until: float
    is_given: bool = False  # given to the tiers below


class Demotions:
    """Pending demotions: each key is stored in the tier below, and then dropped from memory. Owned by the control loop.

    A key stays in memory if another request uses it meanwhile, as long as a queued request wants it, and if the tier
    below does not get it in time.
    """

    def __init__(self, store: Store, tiers: Tiers, env: Env, *, within_s: float) -> None:
        """`within_s`: how long the tier below may take per chunk."""
        self._store = store
        self._tiers = tiers
        self._within_s = within_s
        self._counters = env.counters
        self._clock = env.clock
        self.keys: OrderedDict[bytes, _Demoted] = OrderedDict()  # read-only for others

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: Iterable[bytes], shards: int, arenas: Sequence[int]) -> int:
        """Demote these keys, except tails, which are not stored below; return how many were accepted."""
        count = 0
        for key in keys:
            chunks = self._store.index.known(key, shards, arenas)
            if not chunks or chunks[0].tail or not self._tiers.storing.below(chunks[0]):
                continue
            if key not in self.keys and len(self.keys) >= MAX_DEMOTED:
                break
            self.keys[key] = _Demoted(shards, arenas, self._clock() + self._within_s)
            count += 1
        return count

    def use(self, keys: Iterable[bytes]) -> None:
        """Another request uses these keys: do not demote them."""
        for key in keys:
            self.keys.pop(key, None)

    def tick(self) -> None:
        """Look at the next keys. To be called a few times a second."""
        for _ in range(min(len(self.keys), MAX_LOOKS)):
            key, demoted = self.keys.popitem(last=False)
            if self._is_over(key, demoted):
                continue
            if self._clock() >= demoted.until:
                self._counters["demotions_given_up"] += 1
                continue
            self.keys[key] = demoted

    def _is_over(self, key: bytes, demoted: _Demoted) -> bool:
        chunks = self._store.index.known(key, demoted.shards, demoted.arenas)
        if chunks is None:
            return True  # evicted or deleted
        if any(chunk.is_kept for chunk in chunks):
            return False
        is_wanted = key in self._store.wanted
        if is_wanted or not all(chunk.is_evictable for chunk in chunks):  # this time does not count
            demoted.until = self._clock() + self._within_s
            return False
        below = self._tiers.storing.below(chunks[0])
        if any(self._has(tier, key, chunks) for tier in below):
            for chunk in chunks:
                self._store.pools[chunk.slot.arena].drop(chunk, Cause.DEMOTED)
            self._counters["demoted_chunks"] += len(chunks)
            return True
        is_asking = any([tier.seeks([key], demoted.shards) for tier in below])
        if not (demoted.is_given or is_asking):
            demoted.is_given = True
            self._tiers.storing.give(chunks[0], below)
        return False

    def _has(self, tier: Tier, key: bytes, chunks: Sequence[Chunk]) -> bool:
        if tier is self._tiers.arenas:
            return bool(self._store.find([key], len(chunks)))
        return bool(tier.find([key], len(chunks)))


class Ends:
    """Keys whose chunks have a time to live (`Hints.ttl_s`). Owned by the control loop; calls are linear in their keys.

    Of several requests that use a chunk, the longest time counts: a request without an end removes the end, and a
    chunk used without an end does not get one later. Ends do not survive the node.
    """

    def __init__(self) -> None:
        self.until: dict[bytes, float] = {}  # key -> its end; read-only for others
        self._deadlines: Deadlines[bytes] = Deadlines()
        self._over: deque[bytes] = deque()  # keys to be taken, whose time is over unless they were used since

    def __len__(self) -> int:
        return len(self.until)

    def set(self, new: Iterable[bytes], known: Iterable[bytes], until: float) -> tuple[int, int, int]:
        """A request with this end uses these keys: `new` ones are its own, `known` ones may be used without an end.

        :returns: how many have an end now, how many have none because others use them, and how many because the table
            is full.
        """
        ended = others = excess = 0
        for keys, are_new in ((new, True), (known, False)):
            for key in keys:
                was = self.until.get(key)
                if was is None and not are_new:
                    others += 1
                    continue
                if was is None and len(self.until) >= MAX_ENDS:
                    excess += 1
                    continue
                ended += 1
                if was is None or until > was:
                    self._move(key, was, until)
        return ended, others, excess

    def _move(self, key: bytes, was: float | None, until: float) -> None:
        if was is not None:
            self._deadlines.discard(key, was)
        self.until[key] = until
        self._deadlines.add((key,), until)

    def use(self, keys: Iterable[bytes]) -> None:
        """A request without an end uses these keys: they have none any more."""
        for key in keys:
            was = self.until.pop(key, None)
            if was is not None:
                self._deadlines.discard(key, was)

    def postpone(self, keys: Iterable[bytes], until: float) -> None:
        """Move the end of these keys, which cannot be deleted yet."""
        for key in keys:
            self._move(key, self.until.get(key), until)

    def take(self, now: float) -> list[bytes]:
        """Remove and return keys whose time is over, up to `MAX_TAKEN`."""
        self._over += self._deadlines.take(now)
        keys: list[bytes] = []
        while self._over and len(keys) < MAX_TAKEN:
            key = self._over.popleft()
            if self.until.get(key, math.inf) <= now:
                del self.until[key]
                keys.append(key)
        return keys
