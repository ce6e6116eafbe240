"""A tier that moves no bytes: each job ends after the time that a device of given speeds would take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import msgspec

from pdx.bench.sim.clock import Clock
from pdx.errors import PdxError, TransferAborted
from pdx.memory.arena import GRANULE_BYTES
from pdx.store.copy import Copy
from pdx.store.eviction import EvictionOrder
from pdx.store.policies.by_name import Maker
from pdx.store.policies.policy import Evictable
from pdx.store.store import LRU, Store
from pdx.store.tier import Grant, Held, Job, Tier
from pdx.telemetry.env import Env
from pdx.wire.status import TierStatus

INFLIGHT_CHUNKS = 32


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device that holds chunks, and its speeds."""

    name: str
    kind: str  # "disk", "remote" or "peers": the prefix of its counters
    room_bytes: int
    load_bytes_s: float
    store_bytes_s: float
    latency_s: float  # per job; those of several jobs overlap


class Pipe:
    """Carries jobs one after the other; their latencies overlap."""

    def __init__(self, bytes_s: float, latency_s: float) -> None:
        self.busy_s = 0.0  # time for all bytes accepted so far, moved or not
        self._bytes_s = bytes_s
        self._latency_s = latency_s
        self._free_at = 0.0

    def carry(self, nbytes: float, now: float) -> tuple[float, float]:
        """Accept bytes now; return when their movement starts and when it ends, latency included."""
        start, taken_s = max(now, self._free_at), nbytes / self._bytes_s
        self._free_at = start + taken_s
        self.busy_s += taken_s
        return start, self._free_at + self._latency_s

    def busy_by(self, now: float) -> float:
        """How long it has been moving bytes by now."""
        return self.busy_s - max(0.0, self._free_at - now)


class Entry(Evictable, eq=False, gc=False):
    """A chunk in a modelled tier."""

    held: Held


class ModelledTier(Tier):
    """See `Tier`. It evicts like `DiskTier` (`EvictionOrder`), but keeps only the key, size and layers of each chunk.

    Sizes are those of the arena's slots; each of their bytes stands for `scale` real ones.
    """

    is_whole = True

    def __init__(
        self,
        device: Device,
        clock: Clock,
        on_done: Callable[[Tier, Job, PdxError | None], None],
        *,
        scale: float,
        chunk_bytes: int,
        on_removed: Callable[[Sequence[bytes]], None] = lambda keys: None,
        is_used: Callable[[bytes], bool] = lambda key: False,
        wanted: Mapping[bytes, Mapping[int, int]] = MappingProxyType({}),
        policy: Maker = LRU,
    ) -> None:
        """`on_done`: `Copies.done`; `on_removed`: `Storing.removed`; `is_used`: see `TierHost`; `wanted`, `policy`: see
        `EvictionOrder`. `chunk_bytes`: of a slot."""
        self.name, self.kind = device.name, device.kind
        self.max_job_bytes = chunk_bytes
        self.max_inflight_bytes = INFLIGHT_CHUNKS * chunk_bytes
        self.loads = Pipe(device.load_bytes_s / scale, device.latency_s)
        self.stores = Pipe(device.store_bytes_s / scale, device.latency_s)
        self.removed = 0  # chunks evicted to make room
        self.most_bytes = 0  # the most it has held at a time
        self._room_bytes = int(device.room_bytes / scale)
        self._clock = clock
        self._on_done = on_done
        self._on_removed = on_removed
        self._is_used = is_used
        self._held: dict[bytes, Entry] = {}
        self._order: EvictionOrder[Entry] = EvictionOrder(partial(policy, self._room_bytes), wanted, None, Env(clock))
        self._nbytes = 0
        self._cancelled: set[int] = set()  # copies

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def status(self) -> TierStatus:
        return TierStatus(self.name, "", len(self._held), self._nbytes, self._room_bytes, "modelled")

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        found: list[Held] = []
        for key in keys:
            entry = self._held.get(key)
            if entry is None:
                break
            found.append(entry.held)
        return found

    def use(self, keys: Sequence[bytes]) -> None:
        self._for_each(keys, self._order.access)

    def refresh(self, keys: Sequence[bytes]) -> None:
        self._for_each(keys, self._order.refresh)

    def _for_each(self, keys: Sequence[bytes], call: Callable[[Entry], None]) -> None:
        for key in reversed(keys):  # so that the end of a prompt counts as older than its beginning
            if (entry := self._held.get(key)) is not None:
                call(entry)

    def admit(self, copy: Copy) -> Grant:
        fits = copy.chunks[0].slot.nbytes <= self._room_bytes
        return Grant([index for index, key in enumerate(copy.keys) if fits and key not in self._held])

    def store(self, job: Job) -> None:
        self._carry(job, self.stores, self._stored)

    def load(self, job: Job) -> None:
        self._carry(job, self.loads, lambda job: None)

    def _carry(self, job: Job, pipe: Pipe, then: Callable[[Job], None]) -> None:
        start, end = pipe.carry(job.nbytes, self._clock.now)
        job.start_ns, job.end_ns = int(start * 1e9), int(end * 1e9)
        self._clock.call_at(end, lambda: self._end_job(job, then))

    def _end_job(self, job: Job, then: Callable[[Job], None]) -> None:
        if job.number in self._cancelled:
            self._on_done(self, job, TransferAborted("the copy was given up"))
            return
        then(job)
        self._on_done(self, job, None)

    def _stored(self, job: Job) -> None:
        for part in job.parts:
            if part.key in self._held:
                continue
            nbytes = part.slot.nbytes
            if self._make_room(nbytes, part.key):
                entry = self._held[part.key] = Entry(Held(nbytes, part.layers), key=part.key, room_bytes=nbytes)
                self._order.insert(entry, self._held.get(part.lead))
                self._nbytes += nbytes
        self.most_bytes = max(self.most_bytes, self._nbytes)

    def _make_room(self, nbytes: int, instead: bytes) -> bool:
        """Make room for the chunk `instead`, if evictions can; return whether there is room now."""
        lack = self._nbytes + nbytes - self._room_bytes
        gone: list[bytes] = []
        spared: list[bytes] = []
        for entry in self._order.victims(instead) if lack > 0 else ():
            if self._is_used(entry.key) and len(spared) < INFLIGHT_CHUNKS:  # requests find it in memory, not here
                spared.append(entry.key)
                continue
            gone.append(entry.key)
            lack -= entry.room_bytes
            if lack <= 0:
                break
        if lack > 0:
            return False
        for key in spared:
            self.use([key])
        for key in gone:
            self._remove(key)
        self.removed += len(gone)
        if gone:
            self._on_removed(gone)
        return True

    def _remove(self, key: bytes) -> bool:
        entry = self._held.pop(key, None)
        if entry is not None:
            self._order.remove(entry)
            self._nbytes -= entry.room_bytes
        return entry is not None

    def cancel(self, copy: Copy) -> None:
        self._cancelled.add(copy.number)

    def copy_ended(self, copy: Copy) -> None:
        """See `Tier.copy_ended`. Stored chunks count as used now."""
        self._cancelled.discard(copy.number)
        if not copy.is_load:
            self.refresh(copy.keys)

    def evict(self, keys: Iterable[bytes], shards: int = 0) -> int:
        return sum([self._remove(key) for key in keys])

    def close(self) -> None:
        """See `Tier.close`; it has no threads."""


class PeersTier(ModelledTier):
    """The memory of other nodes, across a network: chunks are fetched from it and never stored there."""

    others: Sequence[Store] = ()

    def __contains__(self, key: bytes) -> bool:
        return bool(self.find([key], 1))

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        return [Held(GRANULE_BYTES, 1)] * max((len(each.find(keys, shards)) for each in self.others), default=0)

    def use(self, keys: Sequence[bytes]) -> None:
        """No-op: the other nodes' own requests decide the age of their chunks."""

    def refresh(self, keys: Sequence[bytes]) -> None:
        """No-op, likewise."""

    def admit(self, copy: Copy) -> Grant:
        return Grant([])
