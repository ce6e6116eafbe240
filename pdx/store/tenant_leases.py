"""Tenants' leases: they keep chunks from eviction until a deadline, within a budget per tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.index import Index
from pdx.store.slot_pool import SlotPool


class TenantLeases:
    """The leases of all tenants. Owned by the control loop; calls are linear in their chunks.

    A tenant is the digest of a cache salt; all requests without one are the same tenant. The leases of one tenant keep
    at most `share` of each arena, those of all tenants at most `kept_share`, and together with pins at most that share
    of all arenas. A chunk counts from the moment it is leased, filled or not, until its lease ends or it is gone. A
    lease ends at its deadline or by `end`, whatever becomes of the process that asked for it.
    """

    def __init__(self, pools: Sequence[SlotPool], index: Index, *, share: float, kept_share: float) -> None:
        self._pools = pools
        self._index = index
        self._most = [int(pool.total_bytes * min(share, kept_share)) for pool in pools]
        self._most_of_all = [int(pool.total_bytes * kept_share) for pool in pools]
        self._most_kept = int(sum(pool.total_bytes for pool in pools) * kept_share)
        self._of_tenant: Counter[tuple[bytes, int]] = Counter()  # (tenant, arena) -> bytes
        self._of_all = [0 for _ in pools]
        self._ends: Deadlines[Chunk] = Deadlines()
        index.on_lost_lease = self._forget

    def nbytes(self, tenant: bytes, arena: int = 0) -> int:
        """Bytes of an arena that a tenant's leases keep."""
        return self._of_tenant.get((tenant, arena), 0)

    def total_bytes(self, arena: int = 0) -> int:
        """Bytes of an arena that all tenants' leases keep."""
        return self._of_all[arena]

    def lease(self, tenant: bytes, runs: Sequence[Sequence[Chunk]], until: float) -> int:
        """Lease these chunks, filled or being filled, at least until then. Each of `runs` has all shards of one key;
        the first one that exceeds a budget or is leased by another tenant ends it. Return how many are leased."""
        for count, chunks in enumerate(runs):
            if not self._fits([chunk for chunk in chunks if not chunk.keep.leased_until], tenant):
                return count
            if any(chunk.keep.leased_until and chunk.keep.lessee != tenant for chunk in chunks):
                return count
            for chunk in chunks:
                self._keep(chunk, tenant, until)
        return len(runs)

    def _fits(self, chunks: Sequence[Chunk], tenant: bytes) -> bool:
        more: Counter[int] = Counter()
        for chunk in chunks:
            more[chunk.slot.arena] += chunk.room_bytes
        unpinned = sum(chunk.slot.nbytes for chunk in chunks if not chunk.keep.pins)
        return not more or (
            self._index.kept_bytes + unpinned <= self._most_kept
            and all(
                self.nbytes(tenant, arena) + nbytes <= self._most[arena]
                and self._of_all[arena] + nbytes <= self._most_of_all[arena]
                for arena, nbytes in more.items()
            )
        )

    def _keep(self, chunk: Chunk, tenant: bytes, until: float) -> None:
        if chunk.keep.leased_until:
            if until <= chunk.keep.leased_until:
                return
            self._ends.discard(chunk, chunk.keep.leased_until)
        else:
            self._of_tenant[tenant, chunk.slot.arena] += chunk.room_bytes
            self._of_all[chunk.slot.arena] += chunk.room_bytes
            self._pools[chunk.slot.arena].order.hold(chunk)
        self._index.lease_for(chunk, tenant, until)
        self._ends.add((chunk,), until)

    def end(self, tenant: bytes, chunks: Iterable[Chunk]) -> int:
        """End the tenant's leases of these chunks; return how many it had."""
        return self._end([chunk for chunk in chunks if chunk.keep.leased_until and chunk.keep.lessee == tenant])

    def expire(self, now: float) -> int:
        """End leases whose deadline has passed; return how many."""
        return self._end([chunk for chunk in self._ends.take(now) if chunk.keep.leased_until])

    def _end(self, chunks: Sequence[Chunk]) -> int:
        for chunk in reversed(chunks):  # the end of the prompt counts as older
            self._forget(chunk)
            if chunk.is_evictable:
                self._pools[chunk.slot.arena].order.insert(chunk)
        return len(chunks)

    def _forget(self, chunk: Chunk) -> None:
        """Remove the lease on a chunk; the chunk itself may be gone, too."""
        arena, tenant = chunk.slot.arena, chunk.keep.lessee
        self._ends.discard(chunk, chunk.keep.leased_until)
        self._of_tenant[tenant, arena] -= chunk.room_bytes
        if not self._of_tenant[tenant, arena]:
            del self._of_tenant[tenant, arena]
        self._of_all[arena] -= chunk.room_bytes
        self._index.lease_for(chunk, b"", 0.0)
