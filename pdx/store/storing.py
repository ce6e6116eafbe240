"""What is stored in the tiers beside and below the arenas, and when.

A chunk that is sealed in an arena of a GPU is copied to the node's first arena, and what is sealed there is stored in
the tiers below it, as long as each keeps up: at once, or when a second request has found it or computed it again, or
when it is among the next that will be evicted. No sockets, no threads, no I/O here.
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

BACKLOG_SHARE = 0.25  # of the arenas of chunks: so many of their bytes may be held because they wait for one tier
MAX_WAITING = 1 << 16  # chunks that may wait before that, held by nobody
MAX_LOOKS = 512  # at chunks of one arena that will be evicted next, each time


class Storing:
    """Gives the tiers of a node what they are to keep. Owned by the control loop."""

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
        """`spills`: whether the first arena is there for what is sealed in others. `choice`: `all` chunks are stored;
        below the arenas, those that a request has found, or that are sealed again after they left memory, as far as the
        store's history goes back (`twice-seen`); or (`write-back`) those that will be evicted next, so that `window` of
        each arena is always free or stored. A store that takes longer than `store_s` is given up.
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
        self._evicted = -1  # chunks, when the windows were last looked at
        self._again: OrderedDict[bytes, None] = OrderedDict()  # keys that a tier had, and are not stored there any more
        # (where to, shards, arenas) -> keys that are to be stored; it holds none of them
        self._sealed: OrderedDict[tuple[Tier, int, tuple[int, ...]], OrderedDict[bytes, None]] = OrderedDict()

    def changed(self, chunks: Iterable[Chunk]) -> None:
        """Slices of these chunks were filled, or they are whole, or never will be."""
        for chunk in chunks:
            if chunk.state is State.SEALED and not chunk.tail and self._choice != "write-back":
                self.give(chunk, self._next(chunk))

    def found_by_request(self, chunks: Iterable[Chunk]) -> dict[Chunk, Origin]:
        """A request has found these. Where those came from that it is the first for, or that are filled yet."""
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
        """A tier below has these no more: those that memory has are stored there again before they leave it.

        Of each once, until a request finds it: else a tier that is smaller than the window would be written to all the
        time, each chunk in place of the next.
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
        """Store this key there as soon as they take it."""
        for tier in where:
            chunk.is_stored = True
            name = tier, len(chunk.reservation.writers), tuple(chunk.reservation.arenas)
            self._sealed.setdefault(name, OrderedDict())[chunk.key] = None

    def _next(self, chunk: Chunk) -> Sequence[Tier]:
        """Where a sealed chunk is stored."""
        if self._choice == "twice-seen" and not any(chunk.reservation.arenas):  # that choice is for tiers below
            return self.below(chunk) if self._store.history.is_missed(chunk.key) else []
        return self.below(chunk)

    def below(self, chunk: Chunk) -> list[Tier]:
        """The tiers that this chunk may leave its arena for."""
        if any(chunk.reservation.arenas):
            return [self._tiers.arenas] if self._tiers.arenas is not None and self.spills else []
        tiers: list[Tier] = []
        for level in self._tiers.below:
            tier = level[chunk.key[-1] % len(level)]
            if not (tier.is_shared and chunk.is_named):
                tiers.append(tier)  # noqa: PERF401 - once for each chunk: a call fewer
        return tiers

    def turn(self) -> None:
        """Store what is to be stored, as far as the tiers keep up. To be called after each turn of the control loop."""
        if self._evicted != self._store.counters["evicted"]:
            self.look_ahead()
        full: set[Tier] = set()  # what waits for room there is not overtaken by others
        for name in list(self._sealed):
            keys, (tier, shards, arenas) = self._sealed[name], name
            if keys and tier.takes_stores and tier not in full:
                self._spill(tier, shards, arenas)
                if keys:
                    full.add(tier)
            while len(keys) > MAX_WAITING:
                self._drop(tier, keys.popitem(last=False)[0])

    def look_ahead(self) -> None:
        """Store what will be evicted next. To be called a few times a second; after evictions `turn` does."""
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
        """Those in the window of this arena that are not stored."""
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
        """Why what is gone from memory was never to be stored below; empty: it was, or nothing is known of it."""
        if gone is None or gone.is_stored or not self._tiers.below:
            return ""
        why = {
            "twice-seen": "no second request had found it (--store twice-seen)",
            "write-back": "its turn had not come (--store write-back)",
        }
        return f"not stored below, because {why.get(self._choice, 'it ended a prompt')}"

    def waits(self, tier: Tier, key: bytes) -> bool:
        """Whether this is still to be stored there, as soon as the tier takes more."""
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
            nbytes, is_sealed = 0, True  # else the last shard brings it here again
            for chunk in chunks or ():
                nbytes += chunk.slot.nbytes
                is_sealed = is_sealed and chunk.state is State.SEALED
            if chunks is None:  # it was evicted meanwhile
                self._drop(tier, key)
            elif held and held + nbytes > most:  # a chunk that is larger than that goes alone
                break
            elif is_sealed:
                wanted.append(key)
                self._tiers.name(chunks[0])
                held += nbytes
            del keys[key]
        if wanted:
            deadline = self._clock() + self._store_s
            self._copies.store(tier, wanted, shards, arenas=arenas, priority=Priority.STORE, deadline=deadline)
            self._sealed.move_to_end((tier, shards, arenas))  # the others come first next time

    def bring(self, keys: Sequence[bytes], shards: int, arenas: Sequence[int], transfer: str | None) -> None:
        """Copy these chunks to the first arena, where peers are written from, slice by slice while they are filled."""
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
