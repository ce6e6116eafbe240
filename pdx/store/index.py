"""The records of all chunks: by slot, key, writer, owner, transfer and deadline."""

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
    """Members grouped by key, in order of insertion. A group is dropped with its last member. The cost of a call is
    proportional to what it changes or returns."""

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
        """The key, first member and size of each group."""
        for key, group in self._groups.items():
            yield key, next(iter(group)), len(group)


class Index:
    """Finds chunks' records, and counts them by state.

    A chunk changes state only by `step`, so that all ways to find it follow `lifecycle`.
    All attributes are read-only for others.
    """

    def __init__(self, arenas: int = 1) -> None:
        # key -> its chunks, one per shard, all SEALED, so that a lookup need not check each …
        self.whole: dict[bytes, tuple[Chunk, ...]] = {}
        # … other keys -> FILLING or SEALED chunks, by shard; with several arenas one per shard and arena.
        self.partial: dict[bytes, tuple[Chunk, ...]] = {}
        self.slots: list[dict[int, Chunk]] = [{} for _ in range(arenas)]  # offset -> chunk in any state but FREE
        self.writers: Groups[int, Chunk] = Groups()  # session -> FILLING or QUARANTINED chunks that it writes
        self.owners: Groups[int, Chunk] = Groups()  # session -> FILLING chunks that it has reserved
        self.transfers: Groups[str, Chunk] = Groups()  # transfer -> its FILLING chunks, and its SEALED tails
        self.deadlines: Deadlines[Chunk] = Deadlines()  # of FILLING chunks
        self.siblings = Siblings()  # SEALED chunks whose blocks have names
        self.chunks = dict.fromkeys(State, 0)  # number of chunks by state …
        self.nbytes = dict.fromkeys(State, 0)  # … and their bytes
        self.layouts: Counter[bytes] = Counter()  # chunks by the layout of their engine …
        self.layout_bytes: Counter[bytes] = Counter()  # … and their bytes
        # Since the event log last took them: keys that became whole, were named, or are no longer whole; with several
        # arenas instead the chunks that were sealed, named or removed. None: no log is kept.
        self.changed_keys: list[bytes] | None = None
        self.changed: list[Chunk] | None = None
        self.pins = 0  # of all chunks
        self.pinned_bytes = 0  # of chunks with a pin …
        self.kept_bytes = 0  # … or with a tenant's lease
        self.on_lost_lease: Callable[[Chunk], None] = lambda _: None  # a chunk with a tenant's lease is gone

    def of(self, key: bytes, shards: int | None = None, arenas: Sequence[int] = ()) -> tuple[Chunk, ...]:
        """The chunks of `key`, filling or sealed, in the first `shards` shards (all by default), as far as they exist.

        `arenas`: per shard, the arena in which to look; the node's first by default. Without `shards`, look in all
        arenas.
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
        """The chunks of the leading keys that are sealed in every shard: `shards` chunks for each."""
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
        """Whether the key is sealed in every shard."""
        return bool(self.sealed([key], shards, arenas))

    def watch(self, *, is_on: bool) -> None:
        is_single = len(self.slots) == 1
        self.changed_keys = [] if is_on and is_single else None
        self.changed = [] if is_on and not is_single else None

    def named(self, chunk: Chunk) -> None:
        """A chunk's blocks were given names."""
        self.siblings.add(chunk.parent, chunk.blocks, chunk.key)
        if self.changed is not None:
            self.changed.append(chunk)
        elif self.changed_keys is not None:
            self.changed_keys.append(chunk.key)

    def keys(self) -> list[bytes]:
        """The keys of all chunks that can be found, sealed or not; takes about 10 ns for each."""
        return [*self.whole, *self.partial]

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Add new chunks of one reservation, to be filled. In its shard (and arena) each must be its key's only one."""
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
        """Move chunks to their next state. The records of FREE ones are removed, and their slots may be reused."""
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
        """Change a chunk's number of pins, to no less than 0."""
        was, was_kept = chunk.keep.pins, chunk.is_kept
        chunk.keep = replace(chunk.keep, pins=max(0, was + change))
        self.kept_bytes += chunk.slot.nbytes * (chunk.is_kept - was_kept)
        self.pins += chunk.keep.pins - was
        self.pinned_bytes += chunk.slot.nbytes * (bool(chunk.keep.pins) - bool(was))

    def lease_for(self, chunk: Chunk, tenant: bytes, until: float) -> None:
        """Record that a tenant has leased the chunk until then; 0: no tenant has."""
        was_kept = chunk.is_kept
        chunk.keep = replace(chunk.keep, leased_until=until, lessee=tenant)
        self.kept_bytes += chunk.slot.nbytes * (chunk.is_kept - was_kept)

    def _hide(self, chunk: Chunk) -> None:
        """Make a chunk unfindable by its key."""
        chunks = self.whole.pop(chunk.key, None)
        if chunks is None:
            chunks = self.partial.pop(chunk.key)
        elif self.changed_keys is not None and not (chunk.tail and not chunk.blocks):
            self.changed_keys.append(chunk.key)
        if len(chunks) > 1:
            self.partial[chunk.key] = tuple(each for each in chunks if each is not chunk)

    # ---- queries ------------------------------------------------------------------------------

    def known(self, key: bytes, shards: int, arenas: Sequence[int] = ()) -> list[Chunk] | None:
        """The chunks of all shards of `key`, sealed or being filled; None if one is missing."""
        chunks = self.of(key, shards, arenas)
        return list(chunks) if len(chunks) == shards else None

    def is_filling(self, key: bytes, shards: int, arenas: Sequence[int] = ()) -> bool:
        """Whether every shard of `key` is sealed or being filled, and at least one is being filled."""
        chunks = self.of(key, shards, arenas)
        return len(chunks) == shards and any(chunk.state is State.FILLING for chunk in chunks)

    def anywhere(
        self, key: bytes, shards: int, but: Sequence[int], *, is_filling: bool = False
    ) -> tuple[int, ...] | None:
        """An arena per shard, other than that in `but`, where the shard of `key` is sealed or (with `is_filling`) being
        filled; None if one is missing.
        """
        found: dict[int, int] = {}
        for chunk in self.of(key):
            may_be_read = is_filling or chunk.state is State.SEALED
            if may_be_read and chunk.shard < shards and chunk.slot.arena != but[chunk.shard]:
                found.setdefault(chunk.shard, chunk.slot.arena)
        return tuple(found[shard] for shard in range(shards)) if len(found) == shards else None

    def offsets(self, arena: int) -> list[int]:
        """The offsets of an arena's chunks, in any state; a list of the chunks would take ten times as long."""
        return list(self.slots[arena])

    def sealed_at(self, arena: int, offsets: Iterable[int]) -> list[bytes]:
        slots = self.slots[arena]
        found = (slots.get(offset) for offset in offsets)
        return [chunk.key for chunk in found if chunk is not None and chunk.state is State.SEALED]

    def by_layout(self) -> dict[bytes, tuple[int, int]]:
        """KV layout -> number of its chunks, in any state, one per shard, and their bytes."""
        return {layout: (count, self.layout_bytes[layout]) for layout, count in self.layouts.items()}

    def census(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Number of chunks by state, their bytes by state, and the number of pins."""
        chunks = {str(state): count for state, count in self.chunks.items() if count}
        nbytes = {str(state): self.nbytes[state] for state, count in self.chunks.items() if count}
        return chunks, nbytes, self.pins
