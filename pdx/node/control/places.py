"""The tiers of a node by the names that controllers give them, and what is in each.

"host" is the node's arena in host memory, "gpu" its arenas on GPUs together, because the shards of one chunk may lie on
several of them. Below are its disks and its remote store, by the names that `pdx node --status` shows. Owned by the
control loop; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdx.errors import TierUnknown
from pdx.store.chunk import NODE, Chunk
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.tier import Held, Tier
from pdx.store.tiers import Tiers
from pdx.wire.messages import Kept

HOST, GPU = "host", "gpu"


class Place(msgspec.Struct, frozen=True):
    """One tier of this node: some of its arenas, or a `tier` below them."""

    name: str
    arenas: frozenset[int] = frozenset()
    tier: Tier | None = None


class Places:
    """See the module."""

    def __init__(self, store: Store, tiers: Tiers, gpus: Sequence[str]) -> None:
        """`gpus`: of each arena the UUID of its GPU; empty: it is in host memory."""
        self._store = store
        self._tiers = tiers
        host = frozenset(number for number, gpu in enumerate(gpus) if not gpu)
        self._memory = [
            Place(name, arenas) for name, arenas in ((HOST, host), (GPU, frozenset(range(len(gpus))) - host)) if arenas
        ]

    @property
    def first(self) -> Place:
        """The place of the arena that tiers below are stored from, and that peers read and write."""
        return next(place for place in self._memory if 0 in place.arenas)

    @property
    def all(self) -> list[Place]:
        """The fastest first."""
        below = [Place(tier.name, tier=tier) for level in self._tiers.below for tier in level]
        return [*reversed(self._memory), *below]

    def at(self, name: str) -> Place:
        """The tier of that name.

        :raises TierUnknown: there is none.
        """
        found = next((place for place in self.all if place.name == name), None)
        if found is None:
            known = ", ".join(repr(place.name) for place in self.all)
            raise TierUnknown(f"this node has no tier {name!r:.80}; it has {known}")
        return found

    # ---- what is there ----------------------------------------------------------------------

    def chunks(self, place: Place, key: bytes, shards: int) -> tuple[Chunk, ...]:
        """The sealed chunks of every shard of `key` in a place in memory; empty: one is missing."""
        found = {
            chunk.shard: chunk
            for chunk in self._store.of(key)
            if chunk.slot.arena in place.arenas and chunk.state is State.SEALED
        }
        return tuple(found[shard] for shard in range(shards)) if set(range(shards)) <= found.keys() else ()

    def held(self, place: Place, key: bytes, shards: int) -> Held | None:
        """What is there of `key` in every shard, as far as is known without asking; None: not all of it."""
        if place.tier is not None:
            return next(iter(place.tier.find([key], shards)), None)
        chunks = self.chunks(place, key, shards)
        return Held(chunks[0].slot.nbytes, chunks[0].layers) if chunks else None

    def having(self, place: Place, keys: Sequence[bytes], shards: int) -> list[bytes]:
        """Those of the keys that are there in every shard."""
        return [key for key in keys if self.held(place, key, shards) is not None]

    def leading(self, place: Place, keys: Sequence[bytes], shards: int) -> int:
        """How many leading ones of the keys are there in every shard."""
        if place.tier is not None:
            return len(place.tier.find(keys, shards))
        if len(self._memory) == 1:
            return len(self._store.find(keys, shards))
        for at, key in enumerate(keys):
            if not self.chunks(place, key, shards):
                return at
        return len(keys)

    def seeks(self, place: Place, keys: Sequence[bytes], shards: int) -> bool:
        """Whether the tier is being asked, from now on at the latest, for keys of which nothing is known."""
        if place.tier is None or not place.tier.is_shared:
            return False
        known = len(place.tier.find(keys, shards))
        return known < len(keys) and place.tier.seeks(keys[known:], shards)

    # ---- dropping ---------------------------------------------------------------------------

    def drop(self, place: Place, keys: Sequence[bytes], shards: int = 0, *, why: str = "deleted") -> Kept:
        """Have a place forget these chunks, in all shards (or, in memory, in the first so many); how many were there.

        What somebody reads in memory is free with its last lease.
        """
        if place.tier is not None:
            nbytes = sum(held.nbytes * max(1, shards) for key in keys for held in place.tier.find([key], shards or 1))
            return Kept(place.name, place.tier.evict(keys) * max(1, shards), nbytes)
        count = nbytes = 0
        for key in keys:
            lying = [chunk for chunk in self._store.of(key) if chunk.slot.arena in place.arenas]
            self._store.abort([chunk for chunk in lying if chunk.writer == NODE])  # it would be found again afterwards
            for chunk in lying:
                if chunk.state is State.SEALED:
                    count, nbytes = count + 1, nbytes + chunk.slot.nbytes
                    self._store.pools[chunk.slot.arena].drop(chunk, why)
        return Kept(place.name, count, nbytes)
