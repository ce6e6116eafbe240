"""The chunk store of a node's arenas: reserve, fill, seal, look up, lease, evict.

Owned by the node's control loop: one thread, no locks, no I/O; the clock is a parameter. The store never moves bytes;
it says where bytes may be written and which are there. The policy chooses which chunks are evicted first
(`pdx.store.eviction`), but the end of a prompt goes before its beginning: a chunk is useless without its prefix.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from pdx.errors import ArenaTooSmall, ChunkMissing, ProtocolError, StaleSlot
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.memory.slot import Slot
from pdx.store.chunk import NODE, Chunk, Claim
from pdx.store.deadlines import Deadlines
from pdx.store.eviction import EvictionOrder, Quota
from pdx.store.history import Cause, History
from pdx.store.index import Index
from pdx.store.lifecycle import WRITABLE, State, Step
from pdx.store.policies.by_name import Maker, find
from pdx.store.slot_pool import SlotPool
from pdx.store.tenant_leases import TenantLeases
from pdx.telemetry.env import Env

LRU = find("lru")


class Lease(msgspec.Struct):
    """A session's promise that these chunks stay until it is released or expires."""

    session: int
    chunks: list[Chunk]
    deadline: float

    @property
    def room_bytes(self) -> int:
        return sum([chunk.room_bytes for chunk in self.chunks])


class Store:
    """The life of chunks: who may write, find, read, keep and delete them, and until when.

    The index finds their records; a pool per arena grants slots and takes them back. Processes read under leases, which
    have a deadline, and copies under holds, which have none; both are counted in the chunk.
    A chunk of one key and shard may lie in several arenas. Each of these has its own record, and `arenas` says which
    one is meant, per shard.
    """

    def __init__(
        self,
        arena: Arena,
        env: Env,
        *,
        nbytes: int | None = None,
        more: Sequence[Arena] = (),
        policy: Maker = LRU,
        quota: float = 1.0,
        lease_share: float = 0.0,
        kept_share: float = 1.0,
    ) -> None:
        """`arena` has number 0, those in `more` follow. `nbytes`: how much of the first, from its beginning, is for
        chunks; all of it by default. `policy`: makes the eviction policy of an arena of a given size. `quota`: the
        share of each arena that chunks of one cache salt may keep. `lease_share`, `kept_share`: see `TenantLeases`.
        """
        self._clock = env.clock
        self.counters = env.counters
        self.history = History()
        # key -> (number of a queued request that wants it -> its index in that prompt), in the queue's order
        self.wanted: dict[bytes, dict[int, int]] = {}
        self.index = Index(1 + len(more))  # read-only for others
        sizes = [nbytes or arena.nbytes, *(each.nbytes for each in more)]
        self.pools = [
            SlotPool(
                number,
                each,
                size,
                self.index,
                EvictionOrder(partial(policy, size), self.wanted, Quota.of(size, quota), env),
                self.history,
                env,
            )
            for number, (each, size) in enumerate(zip([arena, *more], sizes, strict=True))
        ]
        self.tenant_leases = TenantLeases(self.pools, self.index, share=lease_share, kept_share=kept_share)
        self._leases: dict[int, Lease] = {}
        self._leased_bytes: Counter[int] = Counter()  # by session
        self._leases_of: dict[int, dict[int, None]] = {}  # session -> numbers of its leases
        self._lease_ends: Deadlines[int] = Deadlines()
        self._numbers = itertools.count(1)

    # ---- looking up and leasing -------------------------------------------------------------

    def find(self, keys: Iterable[bytes], shards: int, arenas: Sequence[int] = ()) -> list[tuple[Chunk, ...]]:
        """The chunks of the leading keys that are sealed in every shard: `shards` chunks per hit."""
        return self.index.sealed(keys, shards, arenas)

    def part(
        self, parent: bytes, blocks: bytes, shards: int, arenas: Sequence[int] = ()
    ) -> tuple[tuple[Chunk, ...], int] | None:
        """The chunk after `parent`, sealed in every shard, that shares the most leading blocks with `blocks`, and their
        number; None if none shares a block."""
        for key, count in self.index.siblings.like(parent, blocks):
            for chunks in self.find([key], shards, arenas):
                for chunk in chunks:
                    chunk.is_shared = True
                return chunks, count
        return None

    def name(self, chunks: Iterable[Chunk], parent: bytes, blocks: bytes, block_tokens: int = 0) -> None:
        """Set the blocks of one key's sealed chunks, which are not known for chunks from elsewhere. `block_tokens`
        applies to all chunks of their reservation; 0: leave as it is."""
        for chunk in chunks:
            if chunk.state is State.SEALED and not chunk.blocks:
                chunk.reservation.block_tokens = block_tokens or chunk.reservation.block_tokens
                chunk.parent, chunk.blocks = parent, blocks
                self.index.named(chunk)

    def lease(self, chunks: Iterable[Chunk], session: int, seconds: float) -> int:
        """Lease these chunks, sealed or being filled, for `seconds`; return the lease's number."""
        lease = Lease(session, list(chunks), self._clock() + seconds)
        for chunk in lease.chunks:
            self.pools[chunk.slot.arena].order.hold(chunk, is_use=chunk.state is State.SEALED)
            chunk.leases += 1
        number = next(self._numbers)
        self._leases[number] = lease
        self._leased_bytes[session] += lease.room_bytes
        self._leases_of.setdefault(session, {})[number] = None
        self._lease_ends.add((number,), lease.deadline)
        return number

    def renew(self, number: int, session: int, seconds: float) -> None:
        """:raises ChunkMissing: the lease has ended."""
        lease = self._lease(number, session)
        self._lease_ends.discard(number, lease.deadline)
        lease.deadline = self._clock() + seconds
        self._lease_ends.add((number,), lease.deadline)

    def release(self, number: int, session: int) -> None:
        """End a lease.

        :raises ChunkMissing: it has ended already.
        """
        self._lease_ends.discard(number, self._lease(number, session).deadline)
        self._end_lease(number)

    def _lease(self, number: int, session: int) -> Lease:
        lease = self._leases.get(number)
        if lease is None or lease.session != session:
            raise ChunkMissing(f"lease {number} has ended")
        return lease

    def _end_lease(self, number: int) -> None:
        lease = self._leases.pop(number)
        self._leased_bytes[lease.session] -= lease.room_bytes
        numbers = self._leases_of[lease.session]
        del numbers[number]
        if not numbers:
            del self._leases_of[lease.session], self._leased_bytes[lease.session]
        self.unhold(lease.chunks)

    def hold(self, chunks: Iterable[Chunk], *, is_use: bool = True) -> None:
        """Keep these chunks, filled or being filled, in memory until `unhold`, because a copy reads them.

        `is_use`: a request waits for the copy; else the order of eviction does not change.
        """
        for chunk in chunks:
            self.pools[chunk.slot.arena].order.hold(chunk, keeps_place=not is_use)
            chunk.leases += 1

    def unhold(self, chunks: Sequence[Chunk]) -> None:
        """One reader of each of these chunks is done."""
        freed: defaultdict[tuple[int, Step], list[Chunk]] = defaultdict(list)  # by arena
        for chunk in reversed(chunks):  # the end of the prompt counts as older
            chunk.leases -= 1
            if chunk.leases or chunk.state in WRITABLE:
                continue
            if chunk.state is State.RETIRED:
                freed[chunk.slot.arena, Step.UNLEASED].append(chunk)
            elif chunk.is_for_one:
                freed[chunk.slot.arena, Step.EVICT].append(chunk)
            elif not chunk.is_kept:
                is_read_once = chunk.tail and chunk.reservation.transfer is not None and not chunk.is_shared
                self.pools[chunk.slot.arena].order.insert(chunk, goes_first=is_read_once)
        for (arena, step), of_arena in freed.items():
            self.pools[arena].free(of_arena, step)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """A request has hit these chunks."""
        for chunk in reversed(chunks):  # the end of the prompt counts as older
            self.pools[chunk.slot.arena].order.access(chunk)

    def refresh(self, chunks: Sequence[Chunk]) -> None:
        """Postpone the eviction of these chunks: a request that found them waits for others, or will ask for them."""
        for chunk in reversed(chunks):
            chunk.is_passed = False
            self.pools[chunk.slot.arena].order.refresh(chunk)

    def want(self, keys: Sequence[bytes], number: int) -> None:
        """A queued request will use these keys, if they are here by then. `number` grows from request to request."""
        for index, key in enumerate(keys):
            self.wanted.setdefault(key, {})[number] = index
        self._refresh_keys(keys)

    def want_no_more(self, keys: Sequence[bytes], number: int) -> None:
        """The request is no longer queued."""
        for key in dict.fromkeys(keys):
            places = self.wanted[key]
            del places[number]
            if not places:
                del self.wanted[key]
        self._refresh_keys(keys)

    def _refresh_keys(self, keys: Sequence[bytes]) -> None:
        self.refresh([chunk for key in keys for chunk in self.index.of(key)])

    # ---- reserving and filling --------------------------------------------------------------

    def reserve(self, claim: Claim) -> tuple[list[int], list[Slot], bool]:
        """Reserve room for the missing keys: (granted indices, their slots chunk-major, whether room ran out).

        Evicts as needed. Without `partial`, nothing is granted or evicted unless everything fits then.

        :raises ArenaTooSmall: the claim (with `partial`: one of its chunks) would not even fit into an empty arena.
        :raises ProtocolError: the claim has a key twice.
        """
        wanted = self.missing(claim)
        slots = self.room(claim, claim.sizes(wanted))
        granted = wanted[: len(slots) // len(claim.writers)]
        self.index.add(claim.chunks(granted, slots))
        return granted, slots, len(granted) < len(wanted)

    def missing(self, claim: Claim) -> list[int]:
        """The indices of the claim's missing keys. :raises ProtocolError: the claim has a key twice."""
        if len(set(claim.keys)) != len(claim.keys):
            raise ProtocolError("a key stands twice in one reservation")
        shards = len(claim.writers)
        known = self.index.whole, self.index.partial
        return [
            index
            for index, key in enumerate(claim.keys)
            if (key not in known[0] and key not in known[1]) or self._is_absent(key, shards, claim.arenas)
        ]

    def room(self, claim: Claim, sizes: Sequence[int]) -> list[Slot]:
        """Grant slots for chunks of these sizes, chunk-major, or for as many leading ones as there is room for; see
        `reserve`. The caller turns them into chunks, or gives them back."""
        shards = len(claim.writers)
        homes = claim.arenas or (0,) * shards
        of_pool: dict[int, int] = Counter(homes)  # arena -> number of shards in it
        room_sizes = [-(-nbytes // GRANULE_BYTES) * GRANULE_BYTES for nbytes in sizes]
        for arena, count in of_pool.items():
            pool, total = self.pools[arena], sum(room_sizes) * count
            least = max(room_sizes, default=0) * count if claim.partial else total
            if least > pool.total_bytes:
                raise ArenaTooSmall(f"{least} bytes do not fit into an arena of {pool.total_bytes} bytes")
            if total > pool.available_bytes and not claim.partial:
                self.counters["reserve_full"] += 1
                return []
        granted, slots_of, who = len(sizes), {}, claim.who or "others"
        for arena, count in of_pool.items():
            slots_of[arena] = self.pools[arena].grant(sizes[:granted], count, partial=claim.partial, who=who)
            granted = len(slots_of[arena]) // count
        slots = slots_of[homes[0]]
        if len(of_pool) > 1:  # a chunk whose shards do not all have room is useless
            for arena, count in of_pool.items():
                self.pools[arena].give_back(slots_of[arena][granted * count :])
            left = {arena: iter(got) for arena, got in slots_of.items()}
            slots = [next(left[arena]) for _ in range(granted) for arena in homes]
        self.counters["reserve_full"] += granted < len(sizes)
        return slots

    def _is_absent(self, key: bytes, shards: int, arenas: Sequence[int]) -> bool:
        """Whether `key` must be written. If some of its shards are gone, the others are dropped here."""
        present = self.index.of(key, shards, arenas)
        if not present:
            return True
        if len(present) == shards or any(chunk.state is State.FILLING for chunk in present):
            return False
        for chunk in present:
            self.pools[chunk.slot.arena].drop(chunk, Cause.SHARD_MISSING)
        return True

    def fill(self, slots: Iterable[Slot], first_layer: int, layers: int, session: int) -> list[Chunk]:
        """Record that the writer has filled these slices; return the chunks.

        :raises StaleSlot: this writer may not fill a slot (any more).
        :raises ProtocolError: a layer is out of range.
        """
        chunks = [self._written(slot, session) for slot in slots]
        bits = ((1 << layers) - 1) << first_layer
        for chunk in chunks:
            if bits >> chunk.reservation.layers:
                raise ProtocolError(
                    f"layers up to {first_layer + layers} filled of {chunk!r} with {chunk.reservation.layers}"
                )
            chunk.filled |= bits
            if chunk.state is State.FILLING:  # else it was aborted, and its readers know
                self.pools[chunk.slot.arena].tell_filled(chunk)
        return chunks

    def seal(self, chunks: Iterable[Chunk]) -> None:
        """Seal these chunks, which are whole: from now on they never change and can be hit.

        :raises ProtocolError: a chunk has unfilled slices; none is sealed.
        """
        once = dict.fromkeys(chunks)
        for chunk in once:
            if chunk.state is State.FILLING and not chunk.is_complete:
                raise ProtocolError(f"{chunk!r} sealed with slices missing")
        sealed = [chunk for chunk in once if chunk.state is not State.QUARANTINED]
        self.let_go([chunk for chunk in once if chunk.state is State.QUARANTINED])  # aborted while it was being filled
        self.index.step(sealed, Step.SEAL)
        self.counters["sealed"] += len(sealed)
        now = self._clock()
        for chunk in sealed:
            chunk.reservation.origin.sealed_at = now
        self._make_evictable(sealed)
        for chunk in sealed:
            if chunk.blocks:
                self._drop_beginnings(chunk)

    def _drop_beginnings(self, sealed: Chunk) -> None:
        """Drop ends of prompts that this chunk contains."""
        for key in self.index.siblings.beginnings(sealed.parent, sealed.blocks, sealed.key):
            chunks = self.index.of(key)
            if all(chunk.is_evictable and chunk.slot.arena == sealed.slot.arena for chunk in chunks):
                for chunk in chunks:
                    self.pools[chunk.slot.arena].drop(chunk, Cause.LONGER)

    def _make_evictable(self, sealed: Sequence[Chunk]) -> None:
        """Make chunks evictable that were just sealed, each before its predecessors."""
        evictable = {chunk: None for chunk in sealed if chunk.is_evictable}
        for chunk in reversed(evictable):  # of chunks sealed together the end counts as older
            order = self.pools[chunk.slot.arena].order
            if chunk.before not in evictable and chunk.before not in order:
                order.insert(chunk, goes_first=chunk.is_spare)
        for chunk in evictable:
            self.pools[chunk.slot.arena].order.insert(chunk, chunk.before, goes_first=chunk.is_spare)
        for chunk in sealed:
            chunk.before = None

    def abort(self, chunks: Iterable[Chunk], why: Cause = Cause.GIVEN_UP) -> None:
        """End their reservation unsealed; the writer keeps the room until it lets go. `why`: for the history."""
        filling = [chunk for chunk in dict.fromkeys(chunks) if chunk.state is State.FILLING]
        self.history.note((chunk.key for chunk in filling), why, self._clock())
        for chunk in filling:
            self.pools[chunk.slot.arena].tell_never(chunk)
        self.index.step(filling, Step.ABORT)
        self.counters["aborted"] += len(filling)

    def let_go(self, chunks: Iterable[Chunk], why: Cause = Cause.GIVEN_UP, detail: str = "") -> None:
        """The writer will not write these chunks any more: free their room, once copies no longer read it."""
        given = [chunk for chunk in dict.fromkeys(chunks) if chunk.state in WRITABLE]
        filling = [chunk.key for chunk in given if chunk.state is State.FILLING]
        self.history.note(filling, why, self._clock(), detail=detail)
        self.counters["aborted"] += len(filling)
        for chunk in given:
            self.pools[chunk.slot.arena].tell_never(chunk)
        self.index.step([chunk for chunk in given if chunk.leases], Step.DELETE)  # a copy still reads them
        for number, pool in enumerate(self.pools):
            left = [chunk for chunk in given if chunk.slot.arena == number and chunk.state in WRITABLE]
            if left:
                pool.free(left, Step.LET_GO)

    def at(self, slot: Slot) -> Chunk:
        """The chunk in this slot.

        :raises StaleSlot: no chunk has this slot (any more).
        """
        chunk = self._get(slot)
        if chunk is None:
            raise StaleSlot(f"{slot} is nobody's slot")
        return chunk

    def _get(self, slot: Slot) -> Chunk | None:
        slots = self.index.slots
        chunk = slots[slot.arena].get(slot.offset) if slot.arena < len(slots) else None
        return chunk if chunk is not None and chunk.slot == slot else None

    def unfinished(self, slots: Iterable[Slot]) -> list[Chunk]:
        """The chunks in these slots that may still be written; the others are sealed or gone."""
        return [chunk for slot in slots if (chunk := self._get(slot)) is not None and chunk.state in WRITABLE]

    def _written(self, slot: Slot, session: int) -> Chunk:
        chunk = self._get(slot) or self.at(slot)  # `at` raises the error
        if chunk.reservation.writers[chunk.shard] != session or chunk.state not in WRITABLE:
            raise StaleSlot(f"{chunk!r} is not this writer's to fill")
        return chunk

    # ---- pinning and deleting ---------------------------------------------------------------

    def pin(self, keys: Iterable[bytes], shards: int, *, pinned: bool, arenas: Sequence[int] = ()) -> int:
        """Pin or unpin sealed chunks (counted); return how many keys were there."""
        count = 0
        for key in keys:
            for chunks in self.find([key], shards, arenas):
                count += 1
                self.pin_chunks(chunks, pinned=pinned)
        return count

    def pin_chunks(self, chunks: Iterable[Chunk], *, pinned: bool) -> None:
        """Pin or unpin these sealed chunks (counted)."""
        for chunk in chunks:
            self.index.pin(chunk, 1 if pinned else -1)
            order = self.pools[chunk.slot.arena].order
            (order.insert if chunk.is_evictable else order.hold)(chunk)

    def delete(self, keys: Iterable[bytes], why: Cause = Cause.DELETED) -> int:
        """Delete sealed chunks in every shard, pinned or not; leased ones are freed with their last lease. Return how
        many keys had one. Loads of these keys are aborted, or the chunks would reappear.
        """
        count = 0
        for key in keys:
            chunks = self.index.of(key)
            self.abort([chunk for chunk in chunks if chunk.writer == NODE])
            sealed = [chunk for chunk in chunks if chunk.state is State.SEALED]
            count += bool(sealed)
            for chunk in sealed:
                self.pools[chunk.slot.arena].drop(chunk, why)
        return count

    def drop_tails(self, transfer: str) -> None:
        """Drop tails that were sealed for this transfer alone; those being read are freed with their last lease."""
        for chunk in self.index.transfers.of(transfer):
            if chunk.state is State.SEALED:
                if chunk.is_for_one:
                    self.pools[chunk.slot.arena].drop(chunk, Cause.TRANSFER_OVER)
                else:
                    self.index.transfers.discard(transfer, chunk)

    # ---- time and sessions ------------------------------------------------------------------

    def expire(self) -> list[Chunk]:
        """Drop expired chunks; end leases and reservations whose deadline has passed; return the aborted chunks."""
        now = self._clock()
        for pool in self.pools:
            pool.order.tick()
            for chunk in pool.order.overdue():
                if chunk.state is not State.SEALED:  # deleted, but still being read
                    continue
                self.counters["chunks_expired"] += 1
                pool.drop(chunk, Cause.EXPIRED)
        if ended := self.tenant_leases.expire(now):
            self.counters["tenant_leases_expired"] += ended
        for number in self._lease_ends.take(now):
            self.counters["leases_expired"] += 1
            self._end_lease(number)
        late = self.index.deadlines.take(now)
        self.abort(late, Cause.LATE)
        return late

    def end_session(self, session: int) -> list[Chunk]:
        """A process is gone for good: end its leases, free what it was writing, abort what it owned."""
        for number in list(self._leases_of.get(session, ())):
            self.release(number, session)
        written = self.index.writers.of(session)
        self.let_go(written, Cause.DIED)
        owned = self.index.owners.of(session)
        self.abort(owned, Cause.DIED)
        return written + owned

    # ---- numbers ----------------------------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self.pools)

    @property
    def free_bytes(self) -> int:
        return sum(pool.free_bytes for pool in self.pools)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def holders(self) -> tuple[Counter[int], Counter[str]]:
        """Approximate bytes kept from eviction: leased bytes by session, and bytes being filled by origin or transfer.
        A chunk with two leases counts twice. The cost depends on the number of sessions, owners and transfers, not of
        leases and chunks."""
        filled: Counter[str] = Counter()
        for _, first, count in self.index.owners.sizes():
            filled[first.reservation.origin.name] += count * first.room_bytes
        for name, first, count in self.index.transfers.sizes():
            if first.state is State.FILLING:
                filled[first.reservation.origin.name] -= count * first.room_bytes
                filled[f"transfer {name}"] += count * first.room_bytes
        return Counter(self._leased_bytes), filled
