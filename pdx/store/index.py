"""The records of all chunks: by slot, by key, and by who may still write or wants to forget them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from pdx.lifecycle import FINDABLE, WRITABLE, State, Step
from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines

Key = TypeVar("Key", bound=Hashable)


class Groups(Generic[Key]):
    """Chunks that have something in common. Each call costs what it changes or returns."""

    def __init__(self) -> None:
        self._groups: dict[Key, dict[Chunk, None]] = {}

    def add(self, key: Key, chunk: Chunk) -> None:
        """`chunk` is in the group `key`."""
        self._groups.setdefault(key, {})[chunk] = None

    def discard(self, key: Key, chunk: Chunk) -> None:
        """It is not. Idempotent."""
        group = self._groups.get(key)
        if group is not None:
            group.pop(chunk, None)
            if not group:
                del self._groups[key]

    def of(self, key: Key) -> list[Chunk]:
        """The chunks of a group, in the order in which they came."""
        return list(self._groups.get(key, ()))


class Index:
    """Where a chunk's record is found, and how many there are of each state.

    A chunk moves on in its life by `step` alone, so that what leads to it follows `pdx.lifecycle` and nothing else.
    All attributes are for others to read only.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[Chunk, ...]] = {}  # key -> FILLING or SEALED chunks, one per shard, by shard
        self.slots: dict[int, Chunk] = {}  # offset -> chunk in any state but FREE
        self.writers: Groups[int] = Groups()  # session -> FILLING or QUARANTINED chunks that it writes
        self.owners: Groups[int] = Groups()  # session -> FILLING chunks that it answers for
        self.transfers: Groups[str] = Groups()  # transfer -> its FILLING chunks, and its SEALED tails
        self.deadlines: Deadlines[Chunk] = Deadlines()  # of FILLING chunks
        self.chunks: Counter[State] = Counter()  # how many, by state
        self.nbytes: Counter[State] = Counter()  # their bytes, by state
        self.pins = 0  # of all chunks together
        self.pinned_bytes = 0  # of chunks with a pin

    def of(self, key: bytes, shards: int | None = None) -> list[Chunk]:
        """The chunks of `key`, filling or sealed, in the first `shards` shards (in all by default) that have one."""
        chunks = self._keys.get(key, ())
        if shards is None or not chunks or chunks[-1].shard < shards:
            return list(chunks)
        return [chunk for chunk in chunks if chunk.shard < shards]

    def add(self, chunk: Chunk) -> None:
        """A new chunk, to be filled; in its shard its key has no other."""
        others = self._keys.get(chunk.key, ())
        is_last = not others or others[-1].shard < chunk.shard
        chunks = (*others, chunk)
        self._keys[chunk.key] = chunks if is_last else tuple(sorted(chunks, key=lambda each: each.shard))
        self.slots[chunk.slot.offset] = chunk
        self.writers.add(chunk.writer, chunk)
        self.owners.add(chunk.owner, chunk)
        self.deadlines.add(chunk, chunk.deadline)
        if chunk.transfer is not None:
            self.transfers.add(chunk.transfer, chunk)
        self._count(chunk, 1)

    def step(self, chunk: Chunk, step: Step) -> None:
        """Move a chunk on in its life. Once FREE it is forgotten altogether, and its slot is nobody's."""
        was = chunk.state
        self._count(chunk, -1)
        chunk.step(step)
        state = chunk.state
        if was is State.FILLING:
            self.owners.discard(chunk.owner, chunk)
            self.deadlines.discard(chunk, chunk.deadline)
        if was in WRITABLE and state not in WRITABLE:
            self.writers.discard(chunk.writer, chunk)
        if was in FINDABLE and state not in FINDABLE:
            self._hide(chunk)
        if chunk.transfer is not None and not (chunk.tail and state is State.SEALED):
            self.transfers.discard(chunk.transfer, chunk)
        if state is State.FREE:
            self.pin(chunk, -chunk.pins)
            del self.slots[chunk.slot.offset]
        else:
            self._count(chunk, 1)

    def pin(self, chunk: Chunk, change: int) -> None:
        """Count so many pins more (or fewer) of a chunk; it never has fewer than none."""
        was = chunk.pins
        chunk.pins = max(0, was + change)
        self.pins += chunk.pins - was
        self.pinned_bytes += chunk.slot.nbytes * (bool(chunk.pins) - bool(was))

    def _hide(self, chunk: Chunk) -> None:
        """Its key does not lead to it any more."""
        left = tuple(each for each in self._keys[chunk.key] if each is not chunk)
        if left:
            self._keys[chunk.key] = left
        else:
            del self._keys[chunk.key]

    def _count(self, chunk: Chunk, change: int) -> None:
        self.chunks[chunk.state] += change
        self.nbytes[chunk.state] += change * chunk.slot.nbytes
