"""The memory of one arena: slots for chunks that come, taken from chunks that may go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdx.lifecycle import Step
from pdx.memory import GRANULE_BYTES, Arena, round_up
from pdx.messages import Slot
from pdx.store.allocator import Allocator
from pdx.store.chunk import Chunk
from pdx.store.index import Index
from pdx.store.shelf import Shelf


class Room:
    """Grants slots, evicts chunks for them, and takes slots back. It alone changes generations.

    What may be evicted is on `shelf`; who makes a chunk evictable, or not, puts it there and takes it off.
    """

    def __init__(self, arena: Arena, nbytes: int, index: Index, counters: Counter[str]) -> None:
        self._generations = arena.generations
        self._allocator = Allocator(nbytes)
        self._index = index
        self._counters = counters
        self.shelf = Shelf()

    @property
    def free_bytes(self) -> int:
        """Bytes that are nobody's."""
        return self._allocator.free_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that would be nobody's if everything were evicted that may be."""
        return self._allocator.free_bytes + self.shelf.nbytes

    def grant(self, nbytes: int, count: int, shards: int) -> list[list[Slot]]:
        """New slots of `nbytes` for as many of `count` keys as fit, one per shard. Evicts what it must."""
        offsets = self._take(nbytes, count * shards)
        whole = len(offsets) // shards * shards
        self._allocator.free_many(offsets[whole:])
        slots = [Slot(offset, nbytes, self._next_generation(offset)) for offset in offsets[:whole]]
        return [slots[first : first + shards] for first in range(0, whole, shards)]

    def _take(self, nbytes: int, count: int) -> list[int]:
        """Up to `count` equal slots, evicting the least recently used chunks as long as that helps."""
        offsets: list[int] = []
        while True:
            offsets += self._allocator.allocate_many(nbytes, count - len(offsets))
            missing = (count - len(offsets)) * round_up(nbytes)
            if not missing or not self.shelf:
                return offsets
            self._evict(missing)

    def _evict(self, nbytes: int) -> None:
        """Evict the least recently used chunks with their other shards, until `nbytes` are free or none is left."""
        evicted: list[Chunk] = []
        least = self.shelf.nbytes - nbytes
        while self.shelf and self.shelf.nbytes > least:
            for chunk in self._index.of(self.shelf.oldest().key):
                if chunk.is_evictable:
                    self.shelf.take(chunk)
                    evicted.append(chunk)
        self._counters["evicted"] += len(evicted)
        self.free(evicted, Step.EVICT)

    def drop(self, chunk: Chunk) -> None:
        """Have a sealed chunk forgotten now, and its room free as soon as nobody reads it."""
        if chunk.leases:
            self.retire(chunk)
        else:
            self.shelf.take(chunk)
            self.free([chunk], Step.EVICT)

    def retire(self, chunk: Chunk) -> None:
        """Nobody may find or write it any more; the last of those who read it frees it."""
        self._index.hide(chunk)
        self._index.written(chunk)
        chunk.step(Step.DELETE)

    def free(self, chunks: Sequence[Chunk], step: Step) -> None:
        """These chunks are off the shelf, and nobody reads or writes them: forget them, and give their room back."""
        for chunk in chunks:
            chunk.step(step)
            chunk.before = None
            self._index.remove(chunk)
            # Before anybody else can get the room: stale readers and writers see it.
            self._next_generation(chunk.slot.offset)
        self._allocator.free_many([chunk.slot.offset for chunk in chunks])

    def _next_generation(self, offset: int) -> int:
        granule = offset // GRANULE_BYTES
        generation = self._generations[granule] + 1
        self._generations[granule] = generation
        return generation
