"""The records of all chunks: by slot, by key, and by who may still write or wants to forget them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from msgspec.structs import replace

from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.lifecycle import FINDABLE, TRANSITIONS, WRITABLE, State, Step
from pdx.store.siblings import Siblings

Key = TypeVar("Key", bound=Hashable)
Member = TypeVar("Member", bound=Hashable)


class Groups(Generic[Key, Member]):
    """Members by what they have in common, in the order in which they came. A group is dropped with its last member.
    Each call costs what it changes or returns."""

    def __init__(self) -> None:
        self._groups: dict[Key, dict[Member, None]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, key: Key, members: Iterable[Member]) -> None:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = {}
        group.update(dict.fromkeys(members))

    def discard(self, key: Key, member: Member) -> None:
        """Idempotent."""
        group = self._groups.get(key)
        if group is not None:
            group.pop(member, None)
            if not group:
                del self._groups[key]

    def of(self, key: Key) -> list[Member]:
        return list(self._groups.get(key, ()))

    def count(self, key: Key) -> int:
        return len(self._groups.get(key, ()))

    def sizes(self) -> Iterator[tuple[Key, Member, int]]:
        """Of each group its first member, and how many it has."""
        for key, group in self._groups.items():
            yield key, next(iter(group)), len(group)


class Index:
    """Where a chunk's record is found, and how many there are of each state.

    A chunk moves on in its life by `step` alone, so that what leads to it follows `lifecycle` and nothing else.
    All attributes are for others to read only.
    """

    def __init__(self, arenas: int = 1) -> None:
        # key -> all its chunks, one per shard, all SEALED: a lookup sees that without a look at each …
        self.whole: dict[bytes, tuple[Chunk, ...]] = {}
        # … and of the other keys: FILLING or SEALED chunks, by shard; with several arenas one per shard and arena.
        self.partial: dict[bytes, tuple[Chunk, ...]] = {}
        self.slots: list[dict[int, Chunk]] = [{} for _ in range(arenas)]  # offset -> chunk in any state but FREE
        self.writers: Groups[int, Chunk] = Groups()  # session -> FILLING or QUARANTINED chunks that it writes
        self.owners: Groups[int, Chunk] = Groups()  # session -> FILLING chunks that it answers for
        self.transfers: Groups[str, Chunk] = Groups()  # transfer -> its FILLING chunks, and its SEALED tails
        self.deadlines: Deadlines[Chunk] = Deadlines()  # of FILLING chunks
        self.siblings = Siblings()  # SEALED chunks whose blocks have names
        self.chunks = dict.fromkeys(State, 0)  # how many, by state
        self.nbytes = dict.fromkeys(State, 0)  # their bytes, by state
        self.layouts: Counter[bytes] = Counter()  # chunks by the layout of their engine …
        self.layout_bytes: Counter[bytes] = Counter()  # … and their bytes
        # Keys that became whole, or were named, or are not whole any more, since somebody looked. With several arenas
        # chunks that were sealed, named or are not there any more. None: nobody looks.
        self.changed_keys: list[bytes] | None = None
        self.changed: list[Chunk] | None = None
        self.pins = 0  # of all chunks together
        self.pinned_bytes = 0  # of chunks with a pin …
        self.kept_bytes = 0  # … or with a tenant's lease
        self.on_lost_lease: Callable[[Chunk], None] = lambda _: None  # a chunk is gone that has such a lease

    def of(self, key: bytes, shards: int | None = None, arenas: Sequence[int] = ()) -> tuple[Chunk, ...]:
        """The chunks of `key`, filling or sealed, in the first `shards` shards (in all by default) that have one.

        `arenas`: of each shard, the arena whose chunk is meant; the node's first by default. Without `shards` those of
        all arenas.
        """
        chunks = self.whole.get(key) or self.partial.get(key, ())
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
        whole = self.whole if len(self.slots) == 1 else {}
        run: list[tuple[Chunk, ...]] = []
        for key in keys:
            chunks = whole.get(key, ())
            if len(chunks) != shards:
                chunks = self.of(key, shards, arenas)
                if len(chunks) != shards or any(chunk.state is not State.SEALED for chunk in chunks):
                    break
            run.append(chunks)
        return run

    def is_whole(self, key: bytes, shards: int, arenas: Sequence[int] = ()) -> bool:
        """Whether there is a chunk of this key in every shard, all sealed."""
        return bool(self.sealed([key], shards, arenas))

    def watch(self, *, is_on: bool) -> None:
        is_single = len(self.slots) == 1
        self.changed_keys = [] if is_on and is_single else None
        self.changed = [] if is_on and not is_single else None

    def named(self, chunk: Chunk) -> None:
        """Its blocks have names now."""
        self.siblings.add(chunk.parent, chunk.blocks, chunk.key)
        if self.changed is not None:
            self.changed.append(chunk)
        elif self.changed_keys is not None:
            self.changed_keys.append(chunk.key)

    def keys(self) -> list[bytes]:
        """Of all chunks that can be found, sealed or not: about 10 ns for each."""
        return [*self.whole, *self.partial]

    def add(self, chunks: Sequence[Chunk]) -> None:
        """New chunks of one reservation, to be filled; in its shard the key of each has no other."""
        if not chunks:
            return
        reservation, state = chunks[0].reservation, chunks[0].state
        of_writer: dict[int, list[Chunk]] = {}
        nbytes = 0
        for chunk in chunks:
            others = self.whole.pop(chunk.key, None)
            if others is None:
                others = self.partial.get(chunk.key)
            elif self.changed_keys is not None:
                self.changed_keys.append(chunk.key)
            if others is None:
                self.partial[chunk.key] = (chunk,)
            else:
                self.partial[chunk.key] = tuple(sorted((*others, chunk), key=lambda each: each.shard))
            self.slots[chunk.slot.arena][chunk.slot.offset] = chunk
            of_writer.setdefault(reservation.writers[chunk.shard], []).append(chunk)
            nbytes += chunk.slot.nbytes
        self.nbytes[state] += nbytes
        self.layouts[reservation.layout] += len(chunks)
        self.layout_bytes[reservation.layout] += nbytes
        for writer, written in of_writer.items():
            self.writers.add(writer, written)
        self.chunks[state] += len(chunks)
        self.owners.add(reservation.owner, chunks)
        self.deadlines.add(chunks, reservation.deadline)
        if reservation.transfer is not None:
            self.transfers.add(reservation.transfer, chunks)

    def step(self, chunks: Iterable[Chunk], step: Step) -> None:
        """Move chunks on in their lives. Once FREE they are forgotten altogether, and their slots are nobody's."""
        changed, changed_keys = self.changed, self.changed_keys
        for chunk in chunks:
            reservation, was = chunk.reservation, chunk.state
            state = chunk.state = TRANSITIONS[was, step]
            nbytes = chunk.slot.nbytes
            self.chunks[was] -= 1
            self.nbytes[was] -= nbytes
            if was is State.FILLING:
                self.owners.discard(reservation.owner, chunk)
                self.deadlines.discard(chunk, reservation.deadline)
            if was in WRITABLE and state not in WRITABLE:
                self.writers.discard(reservation.writers[chunk.shard], chunk)
            if chunk.blocks and state is State.SEALED:
                self.siblings.add(chunk.parent, chunk.blocks, chunk.key)
            elif chunk.blocks and was is State.SEALED:
                self.siblings.discard(chunk.key)
            if state is State.SEALED:
                if changed is not None:
                    changed.append(chunk)
                of_key = self.partial[chunk.key]
                if len(of_key) == len(reservation.writers) and (
                    len(of_key) == 1 or all(each.state is State.SEALED for each in of_key)
                ):
                    self.whole[chunk.key] = self.partial.pop(chunk.key)
                    if changed_keys is not None and not (chunk.tail and not chunk.blocks):
                        changed_keys.append(chunk.key)
            elif was in FINDABLE and state not in FINDABLE:
                if changed is not None and was is State.SEALED:
                    changed.append(chunk)
                self._hide(chunk)
                if chunk.keep.leased_until:
                    self.on_lost_lease(chunk)
            if reservation.transfer is not None and not (chunk.tail and state is State.SEALED):
                self.transfers.discard(reservation.transfer, chunk)
            if state is State.FREE:
                if chunk.keep.pins:
                    self.pin(chunk, -chunk.keep.pins)
                del self.slots[chunk.slot.arena][chunk.slot.offset]
                self._uncount(chunk)
            else:
                self.chunks[state] += 1
                self.nbytes[state] += nbytes

    def _uncount(self, chunk: Chunk) -> None:
        layout = chunk.reservation.layout
        self.layouts[layout] -= 1
        self.layout_bytes[layout] -= chunk.slot.nbytes
        if not self.layouts[layout]:
            del self.layouts[layout], self.layout_bytes[layout]

    def pin(self, chunk: Chunk, change: int) -> None:
        """Count so many pins more (or fewer) of a chunk; it never has fewer than none."""
        was, was_kept = chunk.keep.pins, chunk.is_kept
        chunk.keep = replace(chunk.keep, pins=max(0, was + change))
        self.kept_bytes += chunk.slot.nbytes * (chunk.is_kept - was_kept)
        self.pins += chunk.keep.pins - was
        self.pinned_bytes += chunk.slot.nbytes * (bool(chunk.keep.pins) - bool(was))

    def lease_for(self, chunk: Chunk, tenant: bytes, until: float) -> None:
        """A tenant has leased the chunk until then; 0: nobody has."""
        was_kept = chunk.is_kept
        chunk.keep = replace(chunk.keep, leased_until=until, lessee=tenant)
        self.kept_bytes += chunk.slot.nbytes * (chunk.is_kept - was_kept)

    def _hide(self, chunk: Chunk) -> None:
        """Its key does not lead to it any more."""
        chunks = self.whole.pop(chunk.key, None)
        if chunks is None:
            chunks = self.partial.pop(chunk.key)
        elif self.changed_keys is not None and not (chunk.tail and not chunk.blocks):
            self.changed_keys.append(chunk.key)
        if len(chunks) > 1:
            self.partial[chunk.key] = tuple(each for each in chunks if each is not chunk)

    # ---- what others ask ----------------------------------------------------------------------

    def known(self, key: bytes, shards: int, arenas: Sequence[int] = ()) -> list[Chunk] | None:
        """The chunk of every shard of `key`, sealed or being filled; None where one is missing."""
        chunks = self.of(key, shards, arenas)
        return list(chunks) if len(chunks) == shards else None

    def is_filling(self, key: bytes, shards: int, arenas: Sequence[int] = ()) -> bool:
        """Whether every shard of `key` is there or on its way, and at least one is on its way."""
        chunks = self.of(key, shards, arenas)
        return len(chunks) == shards and any(chunk.state is State.FILLING for chunk in chunks)

    def anywhere(
        self, key: bytes, shards: int, but: Sequence[int], *, is_filling: bool = False
    ) -> tuple[int, ...] | None:
        """The arenas, by shard, beside those in `but` where every shard of `key` is sealed, or (`is_filling`) may still
        be filled; None: one is missing.
        """
        found: dict[int, int] = {}
        for chunk in self.of(key):
            may_be_read = is_filling or chunk.state is State.SEALED
            if may_be_read and chunk.shard < shards and chunk.slot.arena != but[chunk.shard]:
                found.setdefault(chunk.shard, chunk.slot.arena)
        return tuple(found[shard] for shard in range(shards)) if len(found) == shards else None

    def offsets(self, arena: int) -> list[int]:
        """Where chunks lie in an arena, in any state: a list of these themselves takes ten times as long."""
        return list(self.slots[arena])

    def sealed_at(self, arena: int, offsets: Iterable[int]) -> list[bytes]:
        slots = self.slots[arena]
        found = (slots.get(offset) for offset in offsets)
        return [chunk.key for chunk in found if chunk is not None and chunk.state is State.SEALED]

    def by_layout(self) -> dict[bytes, tuple[int, int]]:
        """By KV layout, how many chunks there are, of one shard each and in any state, and their bytes."""
        return {layout: (count, self.layout_bytes[layout]) for layout, count in self.layouts.items()}

    def census(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Chunks by state, bytes by state, pins."""
        chunks = {str(state): count for state, count in self.chunks.items() if count}
        nbytes = {str(state): self.nbytes[state] for state, count in self.chunks.items() if count}
        return chunks, nbytes, self.pins
