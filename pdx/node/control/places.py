"""The tiers of a node by the names that controllers give them, and the chunks in each.

"host" is the node's arena in host memory, "gpu" all its arenas on GPUs together, because the shards of one chunk may be
on several of them. Its disks and its remote store have the names that `pdx node --status` shows. Owned by the control
loop; nothing here blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import NodeError, TierUnknown
from pdx.memory.keys import is_named
from pdx.store.chunk import NODE, Chunk
from pdx.store.history import Cause
from pdx.store.lifecycle import State
from pdx.store.tier import Held, Tier
from pdx.wire.verbs import Kept

if TYPE_CHECKING:
    from pdx.node.service import Service

HOST, GPU = "host", "gpu"
SOME = 64  # keys per look-up in a tier
ASKED = 256  # keys per question to a tier that must ask its store


class Place(msgspec.Struct, frozen=True):
    """One tier of this node: some of its arenas, or a `tier` below them."""

    name: str
    arenas: frozenset[int] = frozenset()
    tier: Tier | None = None

    @property
    def is_shared(self) -> bool:
        return self.tier is not None and self.tier.is_shared

    @property
    def may_have_more(self) -> bool:
        """Whether it may have chunks that are not known here, and answers."""
        status = self.tier.status() if self.tier is not None and self.tier.is_shared else None
        return status is not None and status.is_up

    def why_not(self, key: bytes) -> str:
        """See `Tier.why_not`; empty for arenas."""
        return self.tier.why_not(key) if self.tier is not None else ""


class Places:
    def __init__(self, service: Service) -> None:
        self._store = service.store
        self._tiers = service.tiers
        self._sessions = service.sessions
        gpus = service.gpus
        host = frozenset(number for number, gpu in enumerate(gpus) if not gpu)
        self._memory = [
            Place(name, arenas) for name, arenas in ((HOST, host), (GPU, frozenset(range(len(gpus))) - host)) if arenas
        ]

    @property
    def first(self) -> Place:
        """The place of the arena from which tiers below are filled, and that peers read and write."""
        return next(place for place in self._memory if 0 in place.arenas)

    @property
    def all(self) -> list[Place]:
        """All places, the fastest first."""
        below = [Place(tier.name, tier=tier) for level in self._tiers.below for tier in level]
        return [*reversed(self._memory), *below]

    def at(self, name: str) -> Place:
        """The tier of that name; empty: the first arena's.

        :raises TierUnknown: there is no such tier.
        """
        found = next((place for place in self.all if place.name == name), None) if name else self.first
        if found is None:
            known = ", ".join(repr(place.name) for place in self.all)
            raise TierUnknown(f"this node has no tier {name!r:.80}; it has {known}")
        return found

    def homes(self, shards: int) -> tuple[int, ...]:
        """The GPU arenas of a chunk's shards: those of an attached engine, or the only one; empty: unknown."""
        for session in self._sessions:
            homes = self._sessions.arenas(session, shards) if session.hello.kind == "scheduler" else ()
            if homes and all(homes):
                return homes
        gpu = next((place for place in self._memory if place.name == GPU), None)
        return tuple(gpu.arenas) * shards if gpu is not None and len(gpu.arenas) == 1 else ()

    def check_homes(self, place: Place, shards: int) -> None:
        """:raises NodeError: chunks of so many shards have no arenas there."""
        if place.name == GPU and place != self.first and not self.homes(shards):
            raise NodeError(f"no engine with {shards} shards is attached that has its chunks on GPUs of this node")

    def check_unnamed(self, keys: Sequence[bytes]) -> None:
        """Names are not content: another node may have other bytes under the same name.

        :raises NodeError: a client has named one of these chunks.
        """
        if any(is_named(key) or any(chunk.is_named for chunk in self._store.index.of(key)) for key in keys):
            raise NodeError("chunks that a client has named are not moved to where other nodes find them")

    # ---- contents ---------------------------------------------------------------------------

    def chunks(self, place: Place, key: bytes, shards: int) -> tuple[Chunk, ...]:
        """The sealed chunks of every shard of `key` in a place in memory; empty: it lacks a shard, or has more shards.

        All shards must be named, because a move of fewer would drop the others without a copy.
        """
        lying = [
            chunk
            for chunk in self._store.index.of(key)
            if chunk.reservation.shards == shards and chunk.state is State.SEALED and chunk.slot.arena in place.arenas
        ]
        if len(lying) > shards:  # a shard may be on several GPUs
            lying = list({chunk.shard: chunk for chunk in lying}.values())
        if len(lying) < shards or (shards > 1 and any(chunk.shard != at for at, chunk in enumerate(lying))):
            return ()
        return tuple(lying)

    def found(self, place: Place, keys: Sequence[bytes], shards: int) -> dict[bytes, Held]:
        """The keys that are there in every shard, as far as is known without asking."""
        found: dict[bytes, Held] = {}
        if place.tier is None:
            for key in keys:
                if chunks := self.chunks(place, key, shards):
                    found[key] = Held(chunks[0].slot.nbytes, chunks[0].reservation.layers)
            return found
        at = 0
        while at < len(keys):  # a tier finds leading keys: after one that it lacks, look up the rest anew
            some = keys[at : at + SOME]
            leading = place.tier.find(some, shards)
            found.update(zip(some, leading, strict=False))
            at += len(leading) + (len(leading) < len(some))
        return found

    def is_pinned(self, place: Place, key: bytes, shards: int) -> bool:
        """Whether the chunk `key` is pinned there."""
        if place.tier is not None:
            return place.tier.is_pinned(key)
        return bool(self._store.index.pinned_bytes) and any(c.keep.pins for c in self.chunks(place, key, shards))

    def leading(self, place: Place, keys: Sequence[bytes], shards: int) -> int:
        """How many leading keys are there in every shard."""
        if place.tier is not None:
            return len(place.tier.find(keys, shards))
        return sum(1 for _ in itertools.takewhile(lambda key: self.chunks(place, key, shards), keys))

    def seeks(self, place: Place, keys: Sequence[bytes], shards: int) -> bool:
        """Whether the tier is being asked for unknown keys after the leading known ones; asks if it was not."""
        known = self.leading(place, keys, shards) if place.is_shared else len(keys)
        return known < len(keys) and place.tier is not None and place.tier.seeks(keys[known:], shards)

    def seeks_any(self, place: Place, keys: Sequence[bytes], shards: int) -> bool:
        """As `seeks`, also for keys after those that the tier lacks."""
        if place.tier is None or not place.tier.is_shared:
            return False
        found, tier = self.found(place, keys, shards), place.tier
        return any(tier.seeks(keys[at : at + ASKED], shards) for at, key in enumerate(keys) if key not in found)

    # ---- dropping ---------------------------------------------------------------------------

    def kept(self, place: Place, keys: Sequence[bytes], shards: int) -> Kept:
        """The chunks that `drop` would remove."""
        if place.tier is not None:
            held = self.found(place, keys, shards).values()
            return Kept(place.name, len(held) * shards, sum(each.nbytes for each in held) * shards)
        chunks = [chunk for key in keys for chunk in self._store.index.of(key) if chunk.slot.arena in place.arenas]
        return Kept(place.name, len(chunks), sum(chunk.slot.nbytes for chunk in chunks))

    def drop(self, place: Place, keys: Sequence[bytes], shards: int = 0, *, why: Cause = Cause.DELETED) -> Kept:
        """Remove these chunks from a place, and from memory only those with so many `shards` (0: any); return what was
        removed.

        Memory that is being read is freed with its last lease.
        """
        if place.tier is not None:
            nbytes = self.kept(place, keys, max(1, shards)).nbytes
            return Kept(place.name, place.tier.evict(keys, shards) * max(1, shards), nbytes)
        count = nbytes = 0
        for key in keys:
            lying = [
                chunk
                for chunk in self._store.index.of(key)
                if chunk.slot.arena in place.arenas and chunk.reservation.shards == (shards or chunk.reservation.shards)
            ]
            self._store.abort([chunk for chunk in lying if chunk.writer == NODE])  # else it would be found afterwards
            for chunk in lying:
                if chunk.state is State.SEALED:
                    count, nbytes = count + 1, nbytes + chunk.slot.nbytes
                    self._store.pools[chunk.slot.arena].drop(chunk, why)
        return Kept(place.name, count, nbytes)
