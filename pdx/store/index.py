"""The records of all chunks: by slot, by key, and by who may still write or wants to forget them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.lifecycle import FINDABLE, WRITABLE, State, Step, advance
from pdx.store.siblings import Siblings

Key = TypeVar("Key", bound=Hashable)


class Groups(Generic[Key]):
    """Chunks that have something in common. Each call costs what it changes or returns."""

    def __init__(self) -> None:
        self._groups: dict[Key, dict[Chunk, None]] = {}

    def add(self, key: Key, chunks: Iterable[Chunk]) -> None:
        """These are in the group `key`."""
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = {}
        group.update(dict.fromkeys(chunks))

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

    def count(self, key: Key) -> int:
        """How many chunks a group has."""
        return len(self._groups.get(key, ()))

    def sizes(self) -> Iterator[tuple[Key, Chunk, int]]:
        """Of each group its first chunk, and how many it has."""
        for key, group in self._groups.items():
            yield key, next(iter(group)), len(group)


class Index:
    """Where a chunk's record is found, and how many there are of each state.

    A chunk moves on in its life by `step` alone, so that what leads to it follows `lifecycle` and nothing else.
    All attributes are for others to read only.
    """

    def __init__(self, arenas: int = 1) -> None:
        # key -> all its chunks, one per shard, all SEALED: a lookup sees that without a look at each …
        self._whole: dict[bytes, tuple[Chunk, ...]] = {}
        # … and of the other keys: FILLING or SEALED chunks, by shard; with several arenas one per shard and arena.
        self._partial: dict[bytes, tuple[Chunk, ...]] = {}
        self.slots: list[dict[int, Chunk]] = [{} for _ in range(arenas)]  # offset -> chunk in any state but FREE
        self.writers: Groups[int] = Groups()  # session -> FILLING or QUARANTINED chunks that it writes
        self.owners: Groups[int] = Groups()  # session -> FILLING chunks that it answers for
        self.transfers: Groups[str] = Groups()  # transfer -> its FILLING chunks, and its SEALED tails
        self.deadlines: Deadlines[Chunk] = Deadlines()  # of FILLING chunks
        self.siblings = Siblings()  # SEALED chunks whose blocks have names
        self.chunks = dict.fromkeys(State, 0)  # how many, by state
        self.nbytes = dict.fromkeys(State, 0)  # their bytes, by state
        self.layouts: Counter[bytes] = Counter()  # chunks by the layout of their engine …
        self.layout_bytes: Counter[bytes] = Counter()  # … and their bytes
        self.pins = 0  # of all chunks together
        self.pinned_bytes = 0  # of chunks with a pin …
        self.kept_bytes = 0  # … or with a tenant's lease
        self.on_lost_lease: Callable[[Chunk], None] = lambda _: None  # a chunk is gone that has such a lease

    def of(self, key: bytes, shards: int | None = None, arenas: Sequence[int] = ()) -> tuple[Chunk, ...]:
        """The chunks of `key`, filling or sealed, in the first `shards` shards (in all by default) that have one.

        `arenas`: of each shard, the arena whose chunk is meant; the node's first by default. Without `shards` those of
        all arenas.
        """
        chunks = self._whole.get(key) or self._partial.get(key, ())
        if shards is None or not chunks:
            return chunks
        if len(self.slots) == 1:
            return chunks if chunks[-1].shard < shards else tuple(chunk for chunk in chunks if chunk.shard < shards)
        return tuple(
            chunk
            for chunk in chunks
            if chunk.shard < shards and chunk.slot.arena == (arenas[chunk.shard] if arenas else 0)
        )

    def sealed(self, keys: Iterable[bytes], shards: int, arenas: Sequence[int] = ()) -> list[tuple[Chunk, ...]]:
        """The leading run of keys that have a chunk in every shard, all sealed: `shards` chunks for each."""
        whole = self._whole if len(self.slots) == 1 else {}
        run: list[tuple[Chunk, ...]] = []
        for key in keys:
            chunks = whole.get(key, ())
            if len(chunks) != shards:
                chunks = self.of(key, shards, arenas)
                if len(chunks) != shards or any(chunk.state is not State.SEALED for chunk in chunks):
                    break
            run.append(chunks)
        return run

    def add(self, chunks: Sequence[Chunk]) -> None:
        """New chunks of one reservation, to be filled; in its shard the key of each has no other."""
        if not chunks:
            return
        of_writer: dict[int, list[Chunk]] = {}
        nbytes = 0
        for chunk in chunks:
            others = self._whole.pop(chunk.key, None) or self._partial.get(chunk.key)
            if others is None:
                self._partial[chunk.key] = (chunk,)
            else:
                self._partial[chunk.key] = tuple(sorted((*others, chunk), key=lambda each: each.shard))
            self.slots[chunk.slot.arena][chunk.slot.offset] = chunk
            of_writer.setdefault(chunk.writer, []).append(chunk)
            nbytes += chunk.slot.nbytes
        self.nbytes[chunk.state] += nbytes
        self.layouts[chunk.layout] += len(chunks)
        self.layout_bytes[chunk.layout] += nbytes
        for writer, written in of_writer.items():
            self.writers.add(writer, written)
        self.chunks[chunk.state] += len(chunks)
        self.owners.add(chunk.owner, chunks)
        self.deadlines.add(chunks, chunk.deadline)
        if chunk.transfer is not None:
            self.transfers.add(chunk.transfer, chunks)

    def step(self, chunks: Iterable[Chunk], step: Step) -> None:
        """Move chunks on in their lives. Once FREE they are forgotten altogether, and their slots are nobody's."""
        for chunk in chunks:
            was = chunk.state
            state = chunk.state = advance(was, step)
            nbytes = chunk.slot.nbytes
            self.chunks[was] -= 1
            self.nbytes[was] -= nbytes
            if was is State.FILLING:
                self.owners.discard(chunk.owner, chunk)
                self.deadlines.discard(chunk, chunk.deadline)
            if was in WRITABLE and state not in WRITABLE:
                self.writers.discard(chunk.writer, chunk)
            if chunk.blocks and state is State.SEALED:
                self.siblings.add(chunk.parent, chunk.blocks, chunk.key)
            elif chunk.blocks and was is State.SEALED:
                self.siblings.discard(chunk.key)
            if state is State.SEALED:
                of_key = self._partial[chunk.key]
                if len(of_key) == chunk.shards and all(each.state is State.SEALED for each in of_key):
                    self._whole[chunk.key] = self._partial.pop(chunk.key)
            elif was in FINDABLE and state not in FINDABLE:
                self._hide(chunk)
                if chunk.leased_until:
                    self.on_lost_lease(chunk)
            if chunk.transfer is not None and not (chunk.tail and state is State.SEALED):
                self.transfers.discard(chunk.transfer, chunk)
            if state is State.FREE:
                if chunk.pins:
                    self.pin(chunk, -chunk.pins)
                del self.slots[chunk.slot.arena][chunk.slot.offset]
                self._uncount(chunk)
            else:
                self.chunks[state] += 1
                self.nbytes[state] += nbytes

    def _uncount(self, chunk: Chunk) -> None:
        layout = chunk.layout
        self.layouts[layout] -= 1
        self.layout_bytes[layout] -= chunk.slot.nbytes
        if not self.layouts[layout]:
            del self.layouts[layout], self.layout_bytes[layout]

    def pin(self, chunk: Chunk, change: int) -> None:
        """Count so many pins more (or fewer) of a chunk; it never has fewer than none."""
        was, was_kept = chunk.pins, chunk.is_kept
        chunk.pins = max(0, was + change)
        self.kept_bytes += chunk.slot.nbytes * (chunk.is_kept - was_kept)
        self.pins += chunk.pins - was
        self.pinned_bytes += chunk.slot.nbytes * (bool(chunk.pins) - bool(was))

    def lease_for(self, chunk: Chunk, tenant: bytes, until: float) -> None:
        """A tenant has leased the chunk until then; 0: nobody has."""
        was_kept = chunk.is_kept
        chunk.leased_until, chunk.lessee = until, tenant
        self.kept_bytes += chunk.slot.nbytes * (chunk.is_kept - was_kept)

    def _hide(self, chunk: Chunk) -> None:
        """Its key does not lead to it any more."""
        chunks = self._whole.pop(chunk.key, None) or self._partial.pop(chunk.key)
        if len(chunks) > 1:
            self._partial[chunk.key] = tuple(each for each in chunks if each is not chunk)
