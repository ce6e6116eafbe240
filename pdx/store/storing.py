"""Which chunks are stored in the tiers beside and below the arenas, and when.

A chunk sealed in a GPU's arena is copied to the node's first arena, and a chunk sealed there is stored in the tiers
below, as long as each keeps up: at once, or when a second request has found it or computed it again, or when it is
about to be evicted. No sockets, no threads, no I/O here.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pdx.config import StoreChoice
from pdx.store.chunk import Chunk, Origin
from pdx.store.copies import Copies
from pdx.store.copy import Priority
from pdx.store.history import Cause, Gone
from pdx.store.lifecycle import State
from pdx.store.slot_pool import SlotPool
from pdx.store.store import Store
from pdx.store.tier import Tier
from pdx.telemetry.env import Env

if TYPE_CHECKING:
    from pdx.store.tiers import Tiers

BACKLOG_SHARE = 0.25  # of the bytes of the chunks' arenas, that may be held by chunks waiting for one tier
MAX_WAITING = 1 << 16  # keys that may wait before that without being held
MAX_LOOKS = 512  # chunks per arena and call that are checked in order of eviction


class Storing:
    """Gives the tiers of a node their chunks to store. Owned by the control loop."""

    def __init__(
        self,
        tiers: Tiers,
        store: Store,
        copies: Copies,
        env: Env,
        *,
        spills: bool,
        choice: StoreChoice,
        window: float,
        store_s: float,
    ) -> None:
        """`spills`: whether the first arena takes chunks sealed in others. `choice`: `all` chunks are stored;
        `twice-seen`: below the arenas only those that a request has found, or that are sealed again after they left
        memory, as far as the store's history goes back; `write-back`: those that will be evicted next, so that `window`
        of each arena is always free or stored. `store_s`: the time limit of a store.
        """
        self._tiers = tiers
        self.spills = spills
        self._choice = choice
        self._window = window
        self._store = store
        self._copies = copies
        self._store_s = store_s
        self._counters = env.counters
        self._clock = env.clock
        self._evicted = -1  # the counter of evictions at the last `look_ahead`
        self._again: OrderedDict[bytes, None] = OrderedDict()  # keys in memory that a tier below has removed
        # (tier, shards, arenas) -> keys that wait to be stored; their chunks are not held
        self._sealed: OrderedDict[tuple[Tier, int, tuple[int, ...]], OrderedDict[bytes, None]] = OrderedDict()

    def changed(self, chunks: Iterable[Chunk]) -> None:
        """These chunks have changed: slices were filled, or they were sealed or aborted."""
        for chunk in chunks:
            if chunk.state is State.SEALED and not chunk.tail and self._choice != "write-back":
                self.give(chunk, self._next(chunk))

    def found_by_request(self, chunks: Iterable[Chunk]) -> dict[Chunk, Origin]:
        """A request has hit these chunks; return the origins of those hit for the first time, or still being filled."""
        new: dict[Chunk, Origin] = {}
        for chunk in chunks:
            if chunk.state is not State.SEALED:
                if not chunk.shard:
                    new[chunk] = self._tiers.origin(chunk)
                continue
            if chunk.is_stored_again:
                chunk.is_stored_again = False
                if not chunk.is_stored:
                    self._again[chunk.key] = None
            if not chunk.is_found:
                chunk.is_found = True
                if not chunk.shard:
                    new[chunk] = origin = self._tiers.origin(chunk)
                    self._tiers.hit(chunk, origin)
                if self._choice == "twice-seen" and not chunk.tail and not any(chunk.reservation.arenas):
                    self.give(chunk, self.below(chunk))
        return new

    def removed(self, keys: Iterable[bytes]) -> None:
        """A tier below no longer has these keys: store those in memory there again before they are evicted.

        Each only once, until a request finds it: otherwise a tier smaller than the window would be rewritten all the
        time, each chunk in place of another.
        """
        for key in keys:
            for chunk in self._store.index.of(key):
                if chunk.is_stored and not any(chunk.reservation.arenas):
                    chunk.is_stored = False
                    if not chunk.is_stored_again:
                        self._again[key] = None
        while len(self._again) > MAX_WAITING:
            self._again.popitem(last=False)

    def give(self, chunk: Chunk, where: Iterable[Tier]) -> None:
        """Enqueue a chunk for these tiers, to be stored as soon as they take it."""
        for tier in where:
            chunk.is_stored = True
            name = tier, len(chunk.reservation.writers), tuple(chunk.reservation.arenas)
            self._sealed.setdefault(name, OrderedDict())[chunk.key] = None

    def _next(self, chunk: Chunk) -> Sequence[Tier]:
        """The tiers in which a chunk just sealed is stored."""
        if self._choice == "twice-seen" and not any(chunk.reservation.arenas):  # that choice concerns tiers below only
            return self.below(chunk) if self._store.history.is_missed(chunk.key) else []
        return self.below(chunk)

    def below(self, chunk: Chunk) -> list[Tier]:
        """The tiers that may store this chunk when it leaves its arena."""
        if any(chunk.reservation.arenas):
            return [self._tiers.arenas] if self._tiers.arenas is not None and self.spills else []
        tiers: list[Tier] = []
        for level in self._tiers.below:
            tier = level[chunk.key[-1] % len(level)]
            if not (tier.is_shared and chunk.is_named):
                tiers.append(tier)  # noqa: PERF401 - called for each chunk: saves a call
        return tiers

    def turn(self) -> None:
        """Start pending stores as far as the tiers keep up. To be called after each turn of the control loop."""
        if self._evicted != self._store.counters["evicted"]:
            self.look_ahead()
        full: set[Tier] = set()  # tiers with keys that wait for room, not to be overtaken
        for name in list(self._sealed):
            keys, (tier, shards, arenas) = self._sealed[name], name
            if keys and tier.takes_stores and tier not in full:
                self._spill(tier, shards, arenas)
                if keys:
                    full.add(tier)
            while len(keys) > MAX_WAITING:
                self._drop(tier, keys.popitem(last=False)[0])

    def look_ahead(self) -> None:
        """Store chunks that will be evicted next. To be called a few times a second; `turn` does so after evictions."""
        self._evicted = self._store.counters["evicted"]
        while self._again and not self._store.index.of(key := next(iter(self._again))):
            del self._again[key]
        if self._choice == "write-back" or self._again:
            for pool in self._store.pools:
                for chunk in self._next_victims(pool):
                    if self._again.pop(chunk.key, chunk) is None:
                        chunk.is_stored_again = True
                        self.give(chunk, self.below(chunk))
                    elif self._choice == "write-back":
                        self.give(chunk, self._next(chunk))

    def _next_victims(self, pool: SlotPool) -> list[Chunk]:
        """The chunks in this arena's window that are not stored."""
        found = []
        left = self._window * pool.total_bytes - pool.free_bytes
        for chunk in itertools.islice(pool.order.peek(), MAX_LOOKS):
            if left <= 0:
                break
            left -= chunk.room_bytes
            if not (chunk.is_stored or chunk.is_stored_again or chunk.tail):
                found.append(chunk)
        return found

    def why_not(self, gone: Gone | None) -> str:
        """Why a chunk gone from memory was never given to the tiers below; empty if it was, or nothing is known."""
        if gone is None or gone.is_stored or not self._tiers.below:
            return ""
        why = {
            "twice-seen": "no second request had found it (--store twice-seen)",
            "write-back": "its turn had not come (--store write-back)",
        }
        return f"not stored below, because {why.get(self._choice, 'it ended a prompt')}"

    def waits(self, tier: Tier, key: bytes) -> bool:
        """Whether the key still waits to be stored in the tier."""
        for (where, _, _), keys in self._sealed.items():  # noqa: SIM110 - asked for each chunk that a request lacks
            if where is tier and key in keys:
                return True
        return False

    def _drop(self, tier: Tier, key: bytes) -> None:
        tier.history.note([key], Cause.OVERRUN, self._clock())
        self._counters["stores_dropped"] += 1
        self._counters[f"{tier.kind}_dropped"] += 1
        tier.tally.dropped += 1

    def _spill(self, tier: Tier, shards: int, arenas: tuple[int, ...]) -> None:
        keys = self._sealed[tier, shards, arenas]
        share = BACKLOG_SHARE if any(arenas) else BACKLOG_SHARE / len(self._tiers.below)
        most = int(sum(self._store.pools[arena].total_bytes for arena in set(arenas) or {0}) * share)
        held = self._copies.queue(tier).stored_bytes
        wanted: list[bytes] = []
        while keys and held < most:
            key = next(iter(keys))
            chunks = self._store.index.known(key, shards, arenas)
            nbytes, is_sealed = 0, True  # not sealed: its last shard will enqueue it again
            for chunk in chunks or ():
                nbytes += chunk.slot.nbytes
                is_sealed = is_sealed and chunk.state is State.SEALED
            if chunks is None:  # evicted meanwhile
                self._drop(tier, key)
            elif held and held + nbytes > most:  # a chunk larger than the limit goes alone
                break
            elif is_sealed:
                wanted.append(key)
                self._tiers.name(chunks[0])
                held += nbytes
            del keys[key]
        if wanted:
            deadline = self._clock() + self._store_s
            self._copies.store(tier, wanted, shards, arenas=arenas, priority=Priority.STORE, deadline=deadline)
            self._sealed.move_to_end((tier, shards, arenas))  # the others go first next time

    def bring(self, keys: Sequence[bytes], shards: int, arenas: Sequence[int], transfer: str | None) -> None:
        """Copy these chunks to the first arena, from which peers are written, slice by slice while they are filled."""
        if arenas and self._tiers.arenas is not None:
            deadline = self._clock() + self._store_s
            self._copies.store(
                self._tiers.arenas,
                keys,
                shards,
                arenas=arenas,
                priority=Priority.HANDOFF,
                deadline=deadline,
                transfer=transfer,
            )
