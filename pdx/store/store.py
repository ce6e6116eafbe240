"""The chunk store of one arena: reserve, fill, seal, look up, lease, evict.

Owned by the node's control loop: one thread, no locks, no I/O, the clock is a parameter. It never moves a byte; it
says where bytes may go and which are there. Least recently used chunks go first, the end of a prompt before its
beginning, because a prefix is only worth what leads up to it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from pdx.errors import ArenaTooSmall, ChunkMissing, ProtocolError, StaleSlot
from pdx.lifecycle import State, Step
from pdx.memory import GRANULE_BYTES, Arena, round_up
from pdx.messages import Slot
from pdx.store.allocator import Allocator
from pdx.store.chunk import Chunk
from pdx.store.shelf import Shelf


class Lease(msgspec.Struct):
    """Chunks that stay as long as this lasts."""

    session: int
    chunks: list[Chunk]
    deadline: float


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a reservation asks for: `nbytes` and `layers` per chunk, one slot per shard and key."""

    keys: Sequence[bytes]
    nbytes: int
    layers: int
    owner: int  # session that answers for the reservation
    writers: Sequence[int]  # session that fills shard 0, 1, …
    tail_nbytes: int = 0  # not 0: the last key is a tail of so many bytes
    partial: bool = False
    transfer: str | None = None
    deadline: float = float("inf")

    def size(self, index: int) -> int:
        """Bytes of the slots of `keys[index]`."""
        is_tail = self.tail_nbytes and index == len(self.keys) - 1
        return self.tail_nbytes if is_tail else self.nbytes


class Store:
    """Index, allocator, leases and eviction over one arena."""

    def __init__(self, arena: Arena, clock: Callable[[], float] = time.monotonic, *, nbytes: int | None = None) -> None:
        """`nbytes`: how much of the arena, from its beginning, is for chunks; all of it by default."""
        self._arena = arena
        self._clock = clock
        self.total_bytes = nbytes or arena.nbytes
        self._allocator = Allocator(self.total_bytes)
        self._shards: list[dict[bytes, Chunk]] = [{}]  # per shard: key -> FILLING or SEALED chunk
        self._slots: dict[int, Chunk] = {}  # offset -> chunk in any state but FREE
        self._shelf = Shelf()
        self._writing: defaultdict[int, dict[int, Chunk]] = defaultdict(
            dict
        )  # session -> offset -> chunk it may still write
        self._leases: dict[int, Lease] = {}
        self._lease_ids = itertools.count(1)
        self.counters: Counter[str] = Counter()

    # ---- looking up and leasing -------------------------------------------------------------

    def find(self, keys: Iterable[bytes], shards: int) -> list[list[Chunk]]:
        """The leading run of keys that are sealed in every shard: one list of `shards` chunks per hit."""
        indexes = self._indexes(shards)
        hits: list[list[Chunk]] = []
        for key in keys:
            chunks = [chunk for index in indexes if (chunk := index.get(key)) and chunk.state is State.SEALED]
            if len(chunks) != shards:
                break
            hits.append(chunks)
        return hits

    def known(self, key: bytes, shards: int) -> list[Chunk] | None:
        """The chunk of every shard of `key`, sealed or being filled; None where one is missing."""
        chunks = [chunk for index in self._indexes(shards) if (chunk := index.get(key))]
        return chunks if len(chunks) == shards else None

    def is_filling(self, key: bytes, shards: int) -> bool:
        """Whether every shard of `key` is there or on its way, and at least one is on its way."""
        found = [index.get(key) for index in self._indexes(shards)]
        return None not in found and any(chunk and chunk.state is State.FILLING for chunk in found)

    def lease(self, chunks: Iterable[Chunk], session: int, seconds: float) -> int:
        """Keep these sealed chunks for `seconds`; returns the lease's number."""
        held = list(chunks)
        for chunk in held:
            self._shelf.take(chunk)
            chunk.leases += 1
        number = next(self._lease_ids)
        self._leases[number] = Lease(session, held, self._clock() + seconds)
        return number

    def renew(self, number: int, session: int, seconds: float) -> None:
        """:raises ChunkMissing: the lease has ended."""
        self._lease_of(number, session).deadline = self._clock() + seconds

    def release(self, number: int, session: int) -> None:
        """End a lease.

        :raises ChunkMissing: it has ended already.
        """
        lease = self._lease_of(number, session)
        del self._leases[number]
        self.unhold(lease.chunks)

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """Keep the memory of these chunks as it is, filled or still being filled, until `unhold`: a push reads it."""
        for chunk in chunks:
            self._shelf.take(chunk)
            chunk.leases += 1

    def unhold(self, chunks: Sequence[Chunk]) -> None:
        """One reader of each of these is done."""
        for chunk in reversed(chunks):  # the end of the prompt becomes the older one
            chunk.leases -= 1
            if chunk.leases or chunk.state in (State.FILLING, State.QUARANTINED):
                continue
            if chunk.state is State.RETIRED:
                self._free([chunk], Step.UNLEASED)
            elif chunk.tail:  # it was for this one reader
                self._free([chunk], Step.EVICT)
            elif not chunk.pins:
                self._shelf.put(chunk)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """Count as used just now."""
        for chunk in reversed(chunks):  # as in release()
            self._shelf.touch(chunk)

    def _lease_of(self, number: int, session: int) -> Lease:
        lease = self._leases.get(number)
        if lease is None or lease.session != session:
            raise ChunkMissing(f"lease {number} has ended")
        return lease

    # ---- reserving and filling --------------------------------------------------------------

    def reserve(self, claim: Claim) -> tuple[list[int], list[Slot], bool]:
        """Room for the keys that are not there: (granted indices, their slots chunk-major, whether room ran out).

        Evicts what it must. Without `partial`, nothing is granted unless everything fits, and nothing is evicted
        unless there are bytes enough; where what stays lies so that the slots fit nowhere, it was evicted in vain.

        :raises ArenaTooSmall: it (one chunk of it, with `partial`) would not even fit into an empty arena.
        :raises ProtocolError: a key stands twice in the claim.
        """
        if len(set(claim.keys)) != len(claim.keys):
            raise ProtocolError("a key stands twice in one reservation")
        shards = len(claim.writers)
        wanted = [index for index, key in enumerate(claim.keys) if self._is_absent(key, shards)]
        sizes = [round_up(claim.size(index)) * shards for index in wanted]
        total = sum(sizes)
        least = max(sizes, default=0) if claim.partial else total
        if least > self.total_bytes:
            raise ArenaTooSmall(f"{least} bytes do not fit into an arena of {self.total_bytes} bytes")
        room = self._allocator.free_bytes + self._shelf.nbytes
        if total > room and not claim.partial:
            self.counters["reserve_full"] += 1
            return [], [], True
        granted: list[int] = []
        slots: list[Slot] = []
        for index, offsets in self._allocate(claim, wanted, shards):
            granted.append(index)
            slots.extend(self._place(claim, index, shard, offset) for shard, offset in enumerate(offsets))
        full = len(granted) < len(wanted)
        if full and not claim.partial:  # too fragmented, although the sum would fit
            self._undo(slots)
            granted, slots = [], []
        for slot, before in zip(slots[shards:], slots, strict=False):
            self._slots[slot.offset].before = self._slots[before.offset]
        self.counters["reserve_full"] += full
        return granted, slots, full

    def fill(self, slots: Iterable[Slot], first_layer: int, layers: int, session: int) -> list[Chunk]:
        """The writer has filled these slices; returns the chunks.

        :raises StaleSlot: a slot is no longer this writer's to fill.
        :raises ProtocolError: a layer is out of range.
        """
        chunks = [self._written(slot, session) for slot in slots]
        bits = ((1 << layers) - 1) << first_layer
        for chunk in chunks:
            if bits >> chunk.layers:
                raise ProtocolError(f"layers up to {first_layer + layers} filled of {chunk!r} with {chunk.layers}")
            chunk.filled |= bits
        return chunks

    def seal(self, chunks: Iterable[Chunk]) -> None:
        """These chunks are whole: from now on they never change and can be hit.

        :raises ProtocolError: one of them has slices that were not filled; none is sealed.
        """
        once = dict.fromkeys(chunks)
        for chunk in once:
            if chunk.state is State.FILLING and not chunk.is_complete:
                raise ProtocolError(f"{chunk!r} sealed with slices missing")
        for chunk in reversed(once):
            if chunk.state is State.QUARANTINED:  # aborted while the writer finished it: it lets go by sealing
                self._let_go(chunk)
                continue
            chunk.step(Step.SEAL)
            self._writing[chunk.writer].pop(chunk.slot.offset)
            if chunk.is_evictable:
                self._shelf.put(chunk)
            self.counters["sealed"] += 1
        for chunk in once:
            if chunk.before not in once:
                self._touch_before(chunk)

    def _touch_before(self, chunk: Chunk) -> None:
        """What led up to `chunk` was sealed in earlier steps, and goes after it all the same."""
        before = chunk.before
        while before is not None:
            self._shelf.touch(before)
            before = before.before

    def abort(self, chunks: Iterable[Chunk]) -> None:
        """Their reservation ends unsealed; the room stays the writer's until it lets go."""
        for chunk in chunks:
            if chunk.state is State.FILLING:
                chunk.step(Step.ABORT)
                del self._shards[chunk.shard][chunk.key]
                self.counters["aborted"] += 1

    def let_go(self, chunks: Iterable[Chunk]) -> None:
        """Their writer will not write them any more: the room is free again."""
        for chunk in chunks:
            if chunk.state in (State.FILLING, State.QUARANTINED):
                self.counters["aborted"] += chunk.state is State.FILLING
                self._let_go(chunk)

    def _let_go(self, chunk: Chunk) -> None:
        if not chunk.leases:
            self._free([chunk], Step.LET_GO)
            return
        if self._shards[chunk.shard].get(chunk.key) is chunk:
            del self._shards[chunk.shard][chunk.key]
        self._writing[chunk.writer].pop(chunk.slot.offset, None)
        chunk.step(Step.DELETE)  # a push still reads it; the last reader frees it

    def at(self, slot: Slot) -> Chunk:
        """The chunk in this slot.

        :raises StaleSlot: the slot belongs to somebody else now.
        """
        chunk = self._slots.get(slot.offset)
        if chunk is None or chunk.slot != slot:
            raise StaleSlot(f"{slot} is nobody's slot")
        return chunk

    def unfinished(self, slots: Iterable[Slot]) -> list[Chunk]:
        """The chunks in those of these slots that somebody may still write; the others are sealed or gone."""
        return [
            chunk
            for slot in slots
            if (chunk := self._slots.get(slot.offset)) is not None
            and chunk.slot == slot
            and chunk.state in (State.FILLING, State.QUARANTINED)
        ]

    def _written(self, slot: Slot, session: int) -> Chunk:
        chunk = self.at(slot)
        if chunk.writer != session or chunk.state not in (State.FILLING, State.QUARANTINED):
            raise StaleSlot(f"{chunk!r} is not this writer's to fill")
        return chunk

    # ---- pinning and deleting ---------------------------------------------------------------

    def pin(self, keys: Iterable[bytes], shards: int, *, pinned: bool) -> int:
        """Pin or unpin sealed chunks (counted); returns how many keys were there."""
        count = 0
        for key in keys:
            for chunks in self.find([key], shards):
                count += 1
                for chunk in chunks:
                    chunk.pins = max(0, chunk.pins + (1 if pinned else -1))
                    (self._shelf.put if chunk.is_evictable else self._shelf.take)(chunk)
        return count

    def delete(self, keys: Iterable[bytes]) -> int:
        """Forget sealed chunks in every shard, pinned or not; leased ones are freed with their last lease."""
        count = 0
        for key in keys:
            chunks = [index[key] for index in self._shards if key in index]
            sealed = [chunk for chunk in chunks if chunk.state is State.SEALED]
            count += bool(sealed)
            for chunk in sealed:
                self._drop(chunk)
        return count

    def drop_tails(self, transfer: str) -> None:
        """Forget what was sealed for this transfer alone and is not being read."""
        for chunk in [chunk for chunk in self._slots.values() if chunk.tail and chunk.transfer == transfer]:
            if chunk.state is State.SEALED:
                self._drop(chunk)

    def unsealed(self, transfer: str) -> list[Chunk]:
        """The chunks of this transfer that are still being filled."""
        return [chunk for chunk in self._all_writing() if chunk.transfer == transfer and chunk.state is State.FILLING]

    # ---- time and sessions ------------------------------------------------------------------

    def expire(self) -> list[Chunk]:
        """End leases and reservations whose deadline is over; returns the chunks that were aborted."""
        now = self._clock()
        for number, lease in list(self._leases.items()):
            if lease.deadline <= now:
                self.counters["leases_expired"] += 1
                self.release(number, lease.session)
        late = [chunk for chunk in self._all_writing() if chunk.state is State.FILLING and chunk.deadline <= now]
        self.abort(late)
        return late

    def end_session(self, session: int) -> list[Chunk]:
        """The process is gone for good: its leases end, what it wrote is free, what it owned is aborted."""
        for number in [number for number, lease in self._leases.items() if lease.session == session]:
            self.release(number, session)
        written = list(self._writing.pop(session, {}).values())
        self.let_go(written)
        owned = [chunk for chunk in self._all_writing() if chunk.owner == session and chunk.state is State.FILLING]
        self.abort(owned)
        return written + owned

    def _all_writing(self) -> Iterator[Chunk]:
        return itertools.chain.from_iterable(chunks.values() for chunks in self._writing.values())

    # ---- numbers ----------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes that are nobody's."""
        return self._allocator.free_bytes

    @property
    def num_leases(self) -> int:
        """Leases that run."""
        return len(self._leases)

    def census(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Chunks by state, bytes by state, pins."""
        chunks: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        pins = 0
        for chunk in self._slots.values():
            chunks[chunk.state] += 1
            nbytes[chunk.state] += chunk.slot.nbytes
            pins += chunk.pins
        return dict(chunks), dict(nbytes), pins

    # ---- room -------------------------------------------------------------------------------

    def _indexes(self, shards: int) -> list[dict[bytes, Chunk]]:
        while len(self._shards) < shards:
            self._shards.append({})
        return self._shards[:shards]

    def _is_absent(self, key: bytes, shards: int) -> bool:
        """Whether `key` must be written. What is left of a chunk that lost a shard is dropped here."""
        present = [index[key] for index in self._indexes(shards) if key in index]
        if not present:
            return True
        if len(present) == shards or any(chunk.state is State.FILLING for chunk in present):
            return False
        for chunk in present:
            self._drop(chunk)
        return True

    def _allocate(self, claim: Claim, wanted: list[int], shards: int) -> Iterator[tuple[int, list[int]]]:
        """Offsets for as many of the `wanted` keys as fit, in order."""
        for nbytes, group in itertools.groupby(wanted, key=claim.size):
            indices = list(group)
            offsets = self._take(nbytes, len(indices) * shards)
            whole, rest = divmod(len(offsets), shards)
            for offset in offsets[len(offsets) - rest :] if rest else ():
                self._allocator.free(offset)
            for number in range(whole):
                yield indices[number], offsets[number * shards : (number + 1) * shards]
            if whole < len(indices):
                return

    def _take(self, nbytes: int, count: int) -> list[int]:
        """Up to `count` equal slots, evicting the least recently used chunks as long as that helps."""
        offsets: list[int] = []
        while True:
            offsets += self._allocator.allocate_many(nbytes, count - len(offsets))
            missing = (count - len(offsets)) * round_up(nbytes)
            if not missing or not self._shelf:
                return offsets
            self._evict(missing)

    def _evict(self, nbytes: int) -> None:
        """Evict the least recently used chunks with their other shards, until `nbytes` are free or none is left."""
        evicted: list[Chunk] = []
        least = self._shelf.nbytes - nbytes
        while self._shelf and self._shelf.nbytes > least:
            key = self._shelf.oldest().key
            for index in self._shards:
                chunk = index.get(key)
                if chunk is not None and chunk.is_evictable:
                    self._shelf.take(chunk)
                    evicted.append(chunk)
        self.counters["evicted"] += len(evicted)
        self._free(evicted, Step.EVICT)

    def _place(self, claim: Claim, index: int, shard: int, offset: int) -> Slot:
        slot = Slot(offset, claim.size(index), self._next_generation(offset))
        chunk = Chunk(claim.keys[index], shard, slot, claim.layers)
        chunk.owner, chunk.writer = claim.owner, claim.writers[shard]
        chunk.transfer, chunk.deadline = claim.transfer, claim.deadline
        chunk.tail = bool(claim.tail_nbytes) and index == len(claim.keys) - 1
        self._shards[shard][chunk.key] = chunk
        self._slots[offset] = chunk
        self._writing[chunk.writer][offset] = chunk
        return slot

    def _undo(self, slots: Iterable[Slot]) -> None:
        self._free([self._slots[slot.offset] for slot in slots], Step.LET_GO)

    def _drop(self, chunk: Chunk) -> None:
        """Take a sealed chunk out of the index, and free it as soon as nobody reads it."""
        if chunk.leases:
            del self._shards[chunk.shard][chunk.key]
            chunk.step(Step.DELETE)
        else:
            self._shelf.take(chunk)
            self._free([chunk], Step.EVICT)

    def _free(self, chunks: Sequence[Chunk], step: Step) -> None:
        """These chunks are off the shelf: forget them, and give their room back."""
        for chunk in chunks:
            chunk.step(step)
            chunk.before = None
            index = self._shards[chunk.shard]
            if index.get(chunk.key) is chunk:
                del index[chunk.key]
            offset = chunk.slot.offset
            del self._slots[offset]
            if chunk.writer in self._writing:
                self._writing[chunk.writer].pop(offset, None)
            self._next_generation(offset)  # before anybody else can get the room: stale readers and writers see it
        self._allocator.free_many([chunk.slot.offset for chunk in chunks])

    def _next_generation(self, offset: int) -> int:
        granule = offset // GRANULE_BYTES
        generation = self._arena.generations[granule] + 1
        self._arena.generations[granule] = generation
        return generation
