"""What lies below each arena of a node: tiers that get what is sealed in the arena, and have what it does not have.

This is the policy of a node's own tiers: every chunk that is sealed in an arena is stored in the first tier below it,
as long as that tier keeps up, and is loaded from the first tier that has it. No sockets, no threads, no I/O here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from pdx.store.chunk import Chunk
from pdx.store.copies import Copies
from pdx.store.copy import Priority
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.tier import Tier

BACKLOG_SHARE = 0.25  # of an arena that may be held because it waits to be stored below


class Tiers:
    """The tiers below the arenas of a node. Owned by the control loop."""

    def __init__(
        self,
        stores: Sequence[Store],
        copies: Copies,
        below: Sequence[Sequence[Tier]],
        *,
        store_s: float,
        load_s: float,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`below`: by arena, the tiers below it, the fastest first. A store or load that takes longer than `store_s` or
        `load_s` is given up.
        """
        self.below = below
        self._stores = stores
        self._copies = copies
        self._store_s = store_s
        self._load_s = load_s
        self._counters = counters
        self._clock = clock
        self._sealed: list[dict[bytes, int]] = [{} for _ in stores]  # by arena: key -> shards, since the last `turn`

    def changed(self, chunks: Iterable[Chunk]) -> None:
        """Slices of these chunks were filled, or they are whole, or never will be."""
        for chunk in chunks:
            arena = chunk.slot.arena
            if chunk.state is State.SEALED and not chunk.tail and self.below[arena]:
                self._sealed[arena][chunk.key] = chunk.shards

    def turn(self) -> None:
        """Store what was sealed since the last call. To be called after each turn of the control loop."""
        for arena, sealed in enumerate(self._sealed):
            if not sealed:
                continue
            self._sealed[arena] = {}
            store = self._stores[arena]
            whole: dict[int, list[bytes]] = {}
            for key, shards in sealed.items():
                if store.find([key], shards):  # else another shard is still being filled, or it is gone already
                    whole.setdefault(shards, []).append(key)
            for shards, keys in whole.items():
                self._store(arena, keys, shards)

    def _store(self, arena: int, keys: list[bytes], shards: int) -> None:
        tier, store = self.below[arena][0], self._stores[arena]
        left = int(store.total_bytes * BACKLOG_SHARE) - self._copies.stored_bytes(tier.name)
        fitting = 0
        for chunks in store.find(keys, shards):
            left -= sum(chunk.slot.nbytes for chunk in chunks)
            if left < 0:
                break
            fitting += 1
        self._counters["stores_dropped"] += len(keys) - fitting
        if fitting:
            deadline = self._clock() + self._store_s
            self._copies.store(tier, arena, keys[:fitting], shards, priority=Priority.STORE, deadline=deadline)

    def may_come(self, arena: int, keys: Sequence[bytes], hits: int, shards: int) -> bool:
        """Whether what is missing behind the first `hits` keys is on its way from a tier below, or is from now on.

        The chunks that are hit stay where they are while room is found for the others. A tier that was too slow is left
        alone for a while: who waits for its chunks computes them sooner.
        """
        if self._copies.is_loading(arena, keys[hits], shards):
            return True
        store = self._stores[arena]
        hit = [chunk for chunks in store.find(keys[:hits], shards) for chunk in chunks]
        now = self._clock()
        for tier in self.below[arena]:
            if now - self._copies.late_at.get(tier.name, -math.inf) < self._load_s:
                self._counters["loads_from_slow_tiers"] += 1
                continue
            if not tier.find(keys[hits : hits + 1], shards):
                continue
            store.hold(hit)
            try:
                deadline = now + self._load_s
                if self._copies.load(tier, arena, keys[hits:], shards, priority=Priority.AWAITED, deadline=deadline):
                    return True
            finally:
                store.unhold(hit)
        return False

    def close(self) -> None:
        """End all jobs of all tiers. Idempotent."""
        for tiers in self.below:
            for tier in tiers:
                tier.close()
