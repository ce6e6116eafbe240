"""The chunk store of one arena: reserve, fill, seal, look up, lease, evict.

Owned by the node's control loop: one thread, no locks, no I/O, the clock is a parameter. It never moves a byte; it
says where bytes may go and which are there. Least recently used chunks go first, the end of a prompt before its
beginning, because a prefix is only worth what leads up to it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from pdx.errors import ArenaTooSmall, ProtocolError, StaleSlot
from pdx.lifecycle import State, Step
from pdx.memory import Arena, round_up
from pdx.messages import Slot
from pdx.store.chunk import Chunk
from pdx.store.index import Index
from pdx.store.leases import Leases
from pdx.store.room import Room


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

    def is_tail(self, index: int) -> bool:
        """Whether `keys[index]` is a tail."""
        return bool(self.tail_nbytes) and index == len(self.keys) - 1

    def size(self, index: int) -> int:
        """Bytes of the slots of `keys[index]`."""
        return self.tail_nbytes if self.is_tail(index) else self.nbytes

    def chunk(self, index: int, shard: int, slot: Slot) -> Chunk:
        """The record of `keys[index]`, to be filled in `slot`."""
        chunk = Chunk(self.keys[index], shard, slot, self.layers)
        chunk.owner, chunk.writer = self.owner, self.writers[shard]
        chunk.transfer, chunk.deadline = self.transfer, self.deadline
        chunk.tail = self.is_tail(index)
        return chunk


class Store:
    """What becomes of chunks: who may write, find, read, keep and forget them, and until when.

    The index finds their records, the room grants and takes back their slots, the leases count who reads them.
    """

    def __init__(self, arena: Arena, clock: Callable[[], float] = time.monotonic, *, nbytes: int | None = None) -> None:
        """`nbytes`: how much of the arena, from its beginning, is for chunks; all of it by default."""
        self._clock = clock
        self.total_bytes = nbytes or arena.nbytes
        self.counters: Counter[str] = Counter()
        self._index = Index()
        self._slots: Mapping[int, Chunk] = self._index.slots  # offset -> chunk in any state but FREE
        self._room = Room(arena, self.total_bytes, self._index, self.counters)
        self._leases = Leases(self._room, self.counters)

    # ---- looking up and leasing -------------------------------------------------------------

    def find(self, keys: Iterable[bytes], shards: int) -> list[list[Chunk]]:
        """The leading run of keys that are sealed in every shard: one list of `shards` chunks per hit."""
        hits: list[list[Chunk]] = []
        for key in keys:
            chunks = self._index.of(key, shards)
            if len(chunks) != shards:
                break
            for chunk in chunks:
                if chunk.state is not State.SEALED:
                    return hits
            hits.append(chunks)
        return hits

    def known(self, key: bytes, shards: int) -> list[Chunk] | None:
        """The chunk of every shard of `key`, sealed or being filled; None where one is missing."""
        chunks = self._index.of(key, shards)
        return chunks if len(chunks) == shards else None

    def is_filling(self, key: bytes, shards: int) -> bool:
        """Whether every shard of `key` is there or on its way, and at least one is on its way."""
        return any(chunk.state is State.FILLING for chunk in self.known(key, shards) or ())

    def lease(self, chunks: Iterable[Chunk], session: int, seconds: float) -> int:
        """Keep these sealed chunks for `seconds`; returns the lease's number."""
        return self._leases.start(chunks, session, self._clock() + seconds)

    def renew(self, number: int, session: int, seconds: float) -> None:
        """:raises ChunkMissing: the lease has ended."""
        self._leases.renew(number, session, self._clock() + seconds)

    def release(self, number: int, session: int) -> None:
        """End a lease.

        :raises ChunkMissing: it has ended already.
        """
        self._leases.end(number, session)

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """Keep the memory of these chunks as it is, filled or still being filled, until `unhold`: a push reads it."""
        self._leases.hold(chunks)

    def unhold(self, chunks: Sequence[Chunk]) -> None:
        """One reader of each of these is done."""
        self._leases.unhold(chunks)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """Count as used just now."""
        for chunk in reversed(chunks):  # the end of the prompt becomes the older one
            self._room.shelf.touch(chunk)

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
        if total > self._room.available_bytes and not claim.partial:
            self.counters["reserve_full"] += 1
            return [], [], True
        granted: list[int] = []
        slots: list[Slot] = []
        for index, places in self._grant(claim, wanted, shards):
            granted.append(index)
            slots.extend(places)
        full = len(granted) < len(wanted)
        if full and not claim.partial:  # too fragmented, although the sum would fit
            self._room.free([self._slots[slot.offset] for slot in slots], Step.LET_GO)
            granted, slots = [], []
        for slot, before in zip(slots[shards:], slots, strict=False):
            self._slots[slot.offset].before = self._slots[before.offset]
        self.counters["reserve_full"] += full
        return granted, slots, full

    def _is_absent(self, key: bytes, shards: int) -> bool:
        """Whether `key` must be written. What is left of a chunk that lost a shard is dropped here."""
        present = self._index.of(key, shards)
        if not present:
            return True
        if len(present) == shards or any(chunk.state is State.FILLING for chunk in present):
            return False
        for chunk in present:
            self._room.drop(chunk)
        return True

    def _grant(self, claim: Claim, wanted: list[int], shards: int) -> Iterator[tuple[int, list[Slot]]]:
        """Slots, with chunks to be filled in them, for as many of the `wanted` keys as fit, in order."""
        for nbytes, group in itertools.groupby(wanted, key=claim.size):
            indices = list(group)
            granted = self._room.grant(nbytes, len(indices), shards)
            for index, slots in zip(indices, granted, strict=False):
                for shard, slot in enumerate(slots):
                    self._index.add(claim.chunk(index, shard, slot))
                yield index, slots
            if len(granted) < len(indices):
                return

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
            self._index.written(chunk)
            if chunk.is_evictable:
                self._room.shelf.put(chunk)
            self.counters["sealed"] += 1
        for chunk in once:
            if chunk.before not in once:  # what led up to it was sealed in earlier steps: it goes later all the same
                self._room.shelf.touch_before(chunk)

    def abort(self, chunks: Iterable[Chunk]) -> None:
        """Their reservation ends unsealed; the room stays the writer's until it lets go."""
        for chunk in chunks:
            if chunk.state is State.FILLING:
                chunk.step(Step.ABORT)
                self._index.hide(chunk)
                self.counters["aborted"] += 1

    def let_go(self, chunks: Iterable[Chunk]) -> None:
        """Their writer will not write them any more: the room is free again."""
        for chunk in chunks:
            if chunk.state in (State.FILLING, State.QUARANTINED):
                self.counters["aborted"] += chunk.state is State.FILLING
                self._let_go(chunk)

    def _let_go(self, chunk: Chunk) -> None:
        if chunk.leases:  # a push still reads it
            self._room.retire(chunk)
        else:
            self._room.free([chunk], Step.LET_GO)

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
        shelf = self._room.shelf
        count = 0
        for key in keys:
            for chunks in self.find([key], shards):
                count += 1
                for chunk in chunks:
                    chunk.pins = max(0, chunk.pins + (1 if pinned else -1))
                    (shelf.put if chunk.is_evictable else shelf.take)(chunk)
        return count

    def delete(self, keys: Iterable[bytes]) -> int:
        """Forget sealed chunks in every shard, pinned or not; leased ones are freed with their last lease."""
        count = 0
        for key in keys:
            sealed = [chunk for chunk in self._index.of(key) if chunk.state is State.SEALED]
            count += bool(sealed)
            for chunk in sealed:
                self._room.drop(chunk)
        return count

    def drop_tails(self, transfer: str) -> None:
        """Forget what was sealed for this transfer alone; what is being read is freed with its last lease."""
        for chunk in [chunk for chunk in self._slots.values() if chunk.tail and chunk.transfer == transfer]:
            if chunk.state is State.SEALED:
                self._room.drop(chunk)

    def unsealed(self, transfer: str) -> list[Chunk]:
        """The chunks of this transfer that are still being filled."""
        return [chunk for chunk in self._filling() if chunk.transfer == transfer]

    # ---- time and sessions ------------------------------------------------------------------

    def expire(self) -> list[Chunk]:
        """End leases and reservations whose deadline is over; returns the chunks that were aborted."""
        now = self._clock()
        self._leases.expire(now)
        late = [chunk for chunk in self._filling() if chunk.deadline <= now]
        self.abort(late)
        return late

    def end_session(self, session: int) -> list[Chunk]:
        """The process is gone for good: its leases end, what it wrote is free, what it owned is aborted."""
        self._leases.end_session(session)
        written = [chunk for chunk in self._index.writing.values() if chunk.writer == session]
        self.let_go(written)
        owned = [chunk for chunk in self._filling() if chunk.owner == session]
        self.abort(owned)
        return written + owned

    def _filling(self) -> Iterator[Chunk]:
        return (chunk for chunk in self._index.writing.values() if chunk.state is State.FILLING)

    # ---- numbers ----------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes that are nobody's."""
        return self._room.free_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that would be nobody's if everything were evicted that may be."""
        return self._room.available_bytes

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
