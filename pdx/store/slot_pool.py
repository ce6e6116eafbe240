"""The slots of one arena: for chunks that come, taken from chunks that may go."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pdx.memory.arena import GRANULE_BYTES, LAST_GENERATION, NEVER, Arena, round_up
from pdx.memory.slot import Slot
from pdx.store.allocator import Allocator
from pdx.store.chunk import Chunk
from pdx.store.clearing import Clearing
from pdx.store.eviction import EvictionOrder
from pdx.store.history import Cause, History
from pdx.store.index import Index
from pdx.store.lifecycle import Step
from pdx.telemetry.env import Env


class SlotPool:
    """Grants slots, evicts chunks for them, and takes slots back. It alone changes the arena's tables.

    What may be evicted is in `order`; who makes a chunk evictable, or not, inserts it there and holds it.
    """

    def __init__(
        self,
        number: int,
        arena: Arena,
        nbytes: int,
        index: Index,
        order: EvictionOrder,
        history: History,
        env: Env,
    ) -> None:
        """`number`: of the arena in its node; `nbytes`: how much of it, from its beginning, is for chunks."""
        self.total_bytes = nbytes
        self._number = number
        self._generations = arena.generations
        self._filled = arena.filled
        self._allocator = Allocator(nbytes)
        self._index = index
        self._history = history
        self._counters = env.counters
        self._clock = env.clock
        self._stopped_at: dict[int, Chunk] = {}  # size that was not found -> where the next search for it goes on
        self.order = order

    @property
    def free_bytes(self) -> int:
        """Bytes that are nobody's."""
        return self._allocator.free_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that would be nobody's if everything were evicted that may be."""
        return self._allocator.free_bytes + self.order.nbytes

    def grant(self, sizes: Sequence[int], shards: int, *, partial: bool, who: str) -> list[Slot]:
        """New slots for chunks of these sizes, in order: for each one per shard.

        For all of them or for none; with `partial` for as many leading ones as fit. Evicts what it must, and without
        `partial` nothing unless everything fits then. `who` wants them.
        """
        runs = [(nbytes, len(list(run)) * shards) for nbytes, run in itertools.groupby(sizes)]
        taken = [self._allocator.allocate_many(nbytes, count) for nbytes, count in runs]
        short = [at for at, (_, count) in enumerate(runs) if len(taken[at]) < count]
        if short:
            missing = len(sizes) * shards - sum(map(len, taken))
            for at in short:  # the slots may fit elsewhere once there is more room
                self._allocator.free_many(taken[at])
            self._make_room(max(runs[at][0] for at in short), missing, partial=partial, who=who)
            for at in short:
                taken[at] = self._allocator.allocate_many(*runs[at])
        leading: list[int] = []
        for (_, count), got in zip(runs, taken, strict=True):
            leading += got
            if len(got) < count:
                break
        whole = len(leading) // shards if partial or len(leading) == len(sizes) * shards else 0
        self._allocator.free_many([offset for got in taken for offset in got][whole * shards :])
        return [
            Slot(offset, sizes[at // shards], self._next_generation(offset), self._number)
            for at, offset in enumerate(leading[: whole * shards])
        ]

    def _make_room(self, nbytes: int, count: int, *, partial: bool, who: str) -> None:
        """Evict, so that `count` slots of `nbytes` more fit, with `partial` some of them; nothing if they would not."""
        size = round_up(nbytes)
        clearing = Clearing(self._allocator, self._index, self._number, size, count)
        clearing.search(self.order.levels(self._stopped_at.get(size)))
        self._stopped_at = {size: clearing.stopped_at} if clearing.stopped_at is not None else {}
        victims = list(clearing.victims) if partial or clearing.is_enough else []
        self._counters["evicted"] += len(victims)
        unstored = sum(not (chunk.is_stored or chunk.tail) for chunk in victims)
        if unstored:
            self._counters["evicted_unstored"] += unstored
        self._note(victims, who)
        self.free(victims, Step.EVICT)

    def _note(self, victims: Sequence[Chunk], who: str) -> None:
        """These are evicted for somebody."""
        alike: dict[tuple[bool, bool], list[bytes]] = {}
        for chunk in victims:
            alike.setdefault((chunk.is_over, chunk.is_stored), []).append(chunk.key)
        for (is_over, is_stored), keys in alike.items():
            why = Cause.OVER_QUOTA if is_over else Cause.EVICTED
            self._history.note(keys, why, self._clock(), detail=who, is_stored=is_stored)

    def drop(self, chunk: Chunk, why: Cause) -> None:
        """Have a sealed chunk forgotten now, and its room free as soon as nobody reads it."""
        self._history.note((chunk.key,), why, self._clock())
        if chunk.leases:  # the last of those who read it frees it
            self._index.step([chunk], Step.DELETE)
        else:
            self.free([chunk], Step.EVICT)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """These slots were granted and are not used: they never held a chunk."""
        self._allocator.free_many([slot.offset for slot in slots])

    def free(self, chunks: Sequence[Chunk], step: Step) -> None:
        """Forget these chunks, which nobody reads or writes, and give their room back."""
        self._index.step(chunks, step)
        for chunk in chunks:
            self.order.remove(chunk)
            chunk.before = None
            # Before anybody else can get the room: stale readers and writers see it.
            self._next_generation(chunk.slot.offset)
        self._allocator.free_many([chunk.slot.offset for chunk in chunks])

    def tell_filled(self, chunk: Chunk) -> None:
        """More of its slices are filled: readers see how many leading ones."""
        self._filled[chunk.slot.offset // GRANULE_BYTES] = (~chunk.filled & (chunk.filled + 1)).bit_length() - 1

    def tell_never(self, chunk: Chunk) -> None:
        """It will never be whole: who copies what is filled need not wait for the rest."""
        self._filled[chunk.slot.offset // GRANULE_BYTES] = NEVER

    def _next_generation(self, offset: int) -> int:
        granule = offset // GRANULE_BYTES
        self._filled[granule] = 0
        generation = (self._generations[granule] + 1) & LAST_GENERATION
        self._generations[granule] = generation
        return generation
