"""The interface of tiers to the scheduler of copies: a few methods that never wait.

A tier is any place for chunks other than the arena that a copy reads or writes: another arena, a disk, a remote store,
a peer. `pdx.store.copies` decides what is copied and when; a tier says what it has, finds room, and moves the bytes of
jobs on threads of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import NodeError, PdxError
from pdx.memory.layout import slice_span
from pdx.memory.slot import Slot
from pdx.store.history import History
from pdx.telemetry.rate import Rate

if TYPE_CHECKING:
    from pdx.memory.arena import Arena
    from pdx.store.copy import Copy
    from pdx.store.store_tier import OnChunk, Pair, Recoding
    from pdx.telemetry.env import Env
    from pdx.wire.status import TierStatus


class Part(msgspec.Struct, frozen=True):
    """Slices [first_layer, first_layer + count) of one chunk of one shard; of `layers` slices in all."""

    key: bytes
    shard: int
    layers: int
    first_layer: int
    count: int
    slot: Slot  # of the whole chunk in this node's arena `slot.arena`, to be read or written
    remote: Slot | None = None  # of the whole chunk in the tier, if the tier has slots
    form: str = ""  # the lossy codec for storing the chunk below memory, as its request asked; empty: none
    lead: bytes = b""  # the predecessor's key, if the same copy has that chunk, too
    is_passed: bool = False  # see `Evictable`

    @property
    def span(self) -> tuple[int, int]:
        """Start and bytes of the slices within a slot of the chunk."""
        return slice_span(self.slot.nbytes, self.layers, self.first_layer, self.count)


class Job(msgspec.Struct, eq=False):
    """A movement of bytes for the copy `number`: the smallest unit that is submitted, ends and fails.

    Before it reports the job's end, the tier sets `start_ns` and `end_ns` (CLOCK_MONOTONIC): the time in which bytes
    were moved, including encoding or decoding, but not the wait for a thread; 0 if none were moved. If it encodes or
    decodes, it also sets `coded_bytes`, and `form` for a load.
    """

    number: int
    parts: Sequence[Part]
    nbytes: int
    transfer: str | None = None  # of the copy
    start_ns: int = 0
    end_ns: int = 0
    coded_bytes: int = 0  # bytes written or read for `nbytes`; 0: as many
    form: str = ""  # see `Part.form`


class Held(msgspec.Struct, frozen=True):
    """A key that a tier has in all shards, with chunks of so many bytes and slices each."""

    nbytes: int
    layers: int


class Grant(msgspec.Struct, frozen=True):
    """Room for some of a copy's keys, by index. `slots`: len(keys) x shards, key-major; None if the tier has none."""

    keys: Sequence[int]
    slots: Sequence[Slot] | None = None


class Tally(msgspec.Struct):
    """Counters of one tier since its node started; `TierStatus` has them under the same names."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    stores: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    dropped: int = 0
    errors: int = 0
    read_bytes: int = 0  # like `loaded_bytes`, but as encoded …
    written_bytes: int = 0  # … and like `stored_bytes`

    def moved(self, job: Job, *, is_load: bool) -> None:
        """Count a job that has succeeded. A job that found its bytes in the tier already has moved nothing."""
        if job.end_ns and is_load:
            self.loads += len(job.parts)
            self.loaded_bytes += job.nbytes
            self.read_bytes += job.coded_bytes or job.nbytes
        elif job.end_ns:
            self.stores += len(job.parts)
            self.stored_bytes += job.nbytes
            self.written_bytes += job.coded_bytes or job.nbytes


class TierHost(ABC):
    """The owner of tiers: gives them memory to copy from and to, and takes their reports.

    A tier calls it on the control loop only; a tier's threads call nothing but `env.mailbox.post`.
    """

    env: Env
    memory: Sequence[Arena]  # by `Slot.arena`
    # key -> (number of a queued request that wants it -> its index in that prompt), in the queue's order
    wanted: Mapping[bytes, Mapping[int, int]] = MappingProxyType({})

    @abstractmethod
    def done(self, tier: Tier, job: Job, error: PdxError | None) -> None:
        """A job is over: the tier no longer accesses the arena for it."""

    def answered(self, keys: Iterable[bytes]) -> None:
        """The answer to an earlier `seeks` for these keys is known now."""
        return

    def removed(self, keys: Iterable[bytes]) -> None:
        """The tier no longer has these keys."""
        return

    def is_used(self, key: bytes) -> bool:
        """Whether requests find this key in memory, so that they do not ask the tier for it."""
        return False


class Tier(ABC):
    """A place for chunks. Owned by the control loop, which alone calls it; no method waits or does I/O.

    Each job given to `store` or `load` ends exactly once, also after `cancel`: the tier has the control loop call
    `TierHost.done(tier, job, error)`. Until then the arena's memory may still be read or written.
    """

    kind: str  # the prefix of its counters: "peer", "disk", …
    name: str  # "disk", "remote", the peer's name
    is_shared: bool = False  # whether other nodes find its chunks; chunks with clients' names are then not stored there
    can_pin: bool = False  # whether it has `pin` …
    can_recode: bool = False  # … and `recode`
    is_whole: bool = False  # whether a job must be one whole chunk of one shard
    max_job_bytes: int = 8 << 20  # small enough that a job does not delay the next one for long
    late_at: float = -math.inf  # when a load was given up while the tier brought nothing; reset when bytes come
    answer_s: float = 0.0  # how long a recent question by `seeks` took
    max_inflight_bytes: int = 32 << 20
    loads_at_once: int = 8  # jobs that keep it busy
    # keys that came or went since the event log last took them -> shards (0: not known); None: no log is kept
    changed: dict[bytes, int] | None = None

    @cached_property
    def tally(self) -> Tally:
        """Counters of this tier alone; the node's counters are per kind."""
        return Tally()

    @cached_property
    def load_rate(self) -> Rate:
        return Rate()

    @cached_property
    def store_rate(self) -> Rate:
        return Rate()

    @cached_property
    def history(self) -> History:
        """Why keys are not here: removed, or never stored."""
        return History()

    @property
    def is_ready(self) -> bool:
        """Whether copies may be admitted and jobs given now. The tier calls `Copies.ready` when this becomes true."""
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no job, question or removal is in flight."""
        return True

    @property
    def takes_stores(self) -> bool:
        """Whether it accepts stores that no request waits for."""
        return True

    def status(self) -> TierStatus | None:
        """The tier's status for `pdx node --status`; None: it is not shown."""
        return None

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        """The leading keys that the tier has in every shard, from an index in memory. A tier that is never loaded from,
        such as a peer, has none, and overrides neither `load` nor `evict`. A lookup does not count as a use."""
        return []

    def use(self, keys: Sequence[bytes]) -> None:
        """A request, or a prefetch for one, has found these keys: a tier that evicts by itself evicts them last."""
        return

    def refresh(self, keys: Sequence[bytes]) -> None:
        """What queued requests will use of these keys has changed (`TierHost.wanted`)."""
        return

    def holds(self, key: bytes, shards: int = 0) -> bool:
        """Whether the tier has this key in every shard, from an index in memory, even if it cannot be loaded now.
        `shards` 0: the number is not known, and the shards that are there count as all."""
        return False

    def keys(self) -> list[bytes]:
        """All keys for which `holds` may be true."""
        return []

    def note(self, keys: Iterable[bytes]) -> None:
        """Called by the tier itself: these keys have come or gone."""
        if self.changed is not None:
            for key in keys:
                self.changed.setdefault(key, 0)

    def seeks(self, keys: Sequence[bytes], shards: int) -> bool:
        """Whether the first of these keys, which `find` lacks, may be found in a moment: the tier is asking for them,
        or begins to. It calls `TierHost.answered` when the answer is there."""
        return False

    def asked_s(self, key: bytes) -> float:
        """How many seconds ago it began to ask for this key."""
        return 0.0

    def why_not(self, key: bytes) -> str:
        """Why this key may be here although `find` does not return it, in words that follow the tier's name.

        Empty if it is not here; `history` may say why.
        """
        return ""

    @abstractmethod
    def admit(self, copy: Copy) -> Grant | None:
        """Find room for a copy into this tier. Keys without room, or that it has already, are left out of the grant.

        None: the answer comes later, through `Copies.granted` or `Copies.stopped`.
        """

    @abstractmethod
    def store(self, job: Job) -> None:
        """Copy these parts from the arena into this tier."""

    def load(self, job: Job) -> None:
        """Copy these parts from this tier into the arena. A digest that does not match is an error."""
        raise NotImplementedError(f"{self.name} has no chunks that `find` tells of")

    @abstractmethod
    def cancel(self, copy: Copy) -> None:
        """End a copy's jobs soon."""

    @abstractmethod
    def copy_ended(self, copy: Copy) -> None:
        """This copy has no jobs in flight, and no more will come."""

    def evict(self, keys: Sequence[bytes], shards: int = 0) -> int:
        """Delete these keys in every shard; return how many were there, as far as is known. `shards`: how many they
        have, for a tier to which other nodes may have written them; 0: those known to this node."""
        return 0

    def tick(self) -> None:
        """Do periodic work; called a few times a second."""
        return

    def is_pinned(self, key: bytes) -> bool:
        """Whether the key is pinned here."""
        return False

    def pin(self, keys: Sequence[bytes], *, pinned: bool, share: float) -> None:
        """Pin keys that the tier has, or unpin them (counted per key). Pins of a disk outlive the node; others end with
        it.

        :raises ArenaFull: more than this share of its cap would be pinned. :raises NodeError: it has no pins.
        """
        raise NodeError(
            f"{self.name} keeps nothing for a controller: it is shared, and others may remove what is there"
        )

    def recode(self, pairs: Sequence[Pair], codec: str, shards: int, on_chunk: OnChunk) -> Recoding:
        """Store chunks, all shards of each, in another form. With "lossless" or "none" a chunk keeps its key. With the
        text of a `pdx.memory.form.Form`, which is lossy, it gets another key, and the old chunk is removed when the new
        one is there. Chunks already in that form are skipped; a chunk that fails stays as it was. `on_chunk` is called
        for each chunk, with its old key.

        :raises CodecError: there is no such codec. :raises TierError: a key would change, or stay, that must not.
        :raises NodeError: it stores chunks in one form only.
        """
        raise NodeError(f"{self.name} stores chunks in one form only")

    @abstractmethod
    def close(self) -> None:
        """End all jobs and threads. Idempotent."""


Hit = tuple[bytes, Tier, Held]  # a key that a tier has
