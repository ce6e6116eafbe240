"""What every tier is to the scheduler of copies: a few methods that never wait.

A tier is anywhere that chunks can be besides the arena that a copy reads or writes: another arena, a disk, a remote
store, a peer. `pdx.store.copies` decides what is copied and when; a tier says what it has, finds room, and moves the
bytes of one job at a time on threads of its own.
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
    slot: Slot  # of the whole chunk in this node's arena `slot.arena`: what is read, or written
    remote: Slot | None = None  # of the whole chunk in the tier, where the tier has slots
    form: str = ""  # the lossy codec by which the chunk is stored below memory, as its request asked; empty: none
    lead: bytes = b""  # the key that leads up to it, if the same copy has that, too
    is_passed: bool = False  # see `Evictable`

    @property
    def span(self) -> tuple[int, int]:
        """Where the slices lie in a slot of the chunk: (start, bytes)."""
        return slice_span(self.slot.nbytes, self.layers, self.first_layer, self.count)


class Job(msgspec.Struct, eq=False):
    """One movement of bytes for the copy `number`: the smallest unit that is submitted, ends and fails.

    The tier sets `start_ns` and `end_ns` (CLOCK_MONOTONIC) before it says that the job is over: from when to when bytes
    were moved, with encoding or decoding, and without the wait for a thread; 0 where none were. Where it encodes or
    decodes, it sets `coded_bytes`, and of a load `form`.
    """

    number: int
    parts: Sequence[Part]
    nbytes: int
    transfer: str | None = None  # that the copy is part of
    start_ns: int = 0
    end_ns: int = 0
    coded_bytes: int = 0  # what was written or read for `nbytes`; 0: as many
    form: str = ""  # see `Part.form`


class Held(msgspec.Struct, frozen=True):
    """What a tier has of one key: all shards have chunks of so many bytes and slices."""

    nbytes: int
    layers: int


class Grant(msgspec.Struct, frozen=True):
    """Room for these of a copy's keys, by index; `slots`: len(keys) x shards, key-major; None: it has no slots."""

    keys: Sequence[int]
    slots: Sequence[Slot] | None = None


class Tally(msgspec.Struct):
    """What a tier has done since its node started: what `TierStatus` says under the same names."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    stores: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    dropped: int = 0
    errors: int = 0
    read_bytes: int = 0  # for the loaded ones: fewer where chunks are encoded …
    written_bytes: int = 0  # … and for the stored ones

    def moved(self, job: Job, *, is_load: bool) -> None:
        """A job has ended well; one that found its bytes there already has moved nothing."""
        if job.end_ns and is_load:
            self.loads += len(job.parts)
            self.loaded_bytes += job.nbytes
            self.read_bytes += job.coded_bytes or job.nbytes
        elif job.end_ns:
            self.stores += len(job.parts)
            self.stored_bytes += job.nbytes
            self.written_bytes += job.coded_bytes or job.nbytes


class TierHost(ABC):
    """Who runs a tier, and what it gives the tier: memory to copy from and to, and whom to tell.

    A tier calls it on the control loop alone; its threads call nothing but `env.mailbox.post`.
    """

    env: Env
    memory: Sequence[Arena]  # by `Slot.arena`
    # By key, where in its prompt each request that waits has it, the first in the queue first.
    wanted: Mapping[bytes, Mapping[int, int]] = MappingProxyType({})

    @abstractmethod
    def done(self, tier: Tier, job: Job, error: PdxError | None) -> None:
        """A job is over: the tier reads and writes the arena for it no more."""

    def answered(self, keys: Iterable[bytes]) -> None:
        """What `seeks` was asked for is known now."""
        return

    def removed(self, keys: Iterable[bytes]) -> None:
        """These are not in the tier any more."""
        return

    def is_used(self, key: bytes) -> bool:
        """Whether memory has this for requests, which so do not ask for it in the tier."""
        return False


class Tier(ABC):
    """Owned by the control loop, which alone calls it; no method waits or does I/O.

    Each job that was given to `store` or `load` ends exactly once, also after `cancel`: the tier has the control loop
    call `TierHost.done(tier, job, error)`, because only then the arena's memory is no longer read or written.
    """

    kind: str  # what its counters begin with: "peer", "disk", …
    name: str  # "disk", "remote", the peer's name
    is_shared: bool = False  # whether other nodes find there what is stored: then names of clients do not go there
    can_pin: bool = False  # whether it has `pin` …
    can_recode: bool = False  # … and `recode`
    is_whole: bool = False  # whether a job must hold one whole chunk of one shard
    max_job_bytes: int = 8 << 20  # a job shall not keep the next one waiting for long
    late_at: float = -math.inf  # when a load was given up, where nothing has come from there meanwhile, nor since
    answer_s: float = 0.0  # how long a question took lately that `seeks` has asked
    max_inflight_bytes: int = 32 << 20  # of jobs that were given and are not over
    loads_at_once: int = 8  # so many jobs keep it busy
    # keys that came or went since somebody looked, and in how many shards (0: not known); None: nobody looks
    changed: dict[bytes, int] | None = None

    @cached_property
    def tally(self) -> Tally:
        """What is counted of this tier alone; the node's counters are by kind."""
        return Tally()

    @cached_property
    def load_rate(self) -> Rate:
        """How fast loads from there have moved bytes …"""
        return Rate()

    @cached_property
    def store_rate(self) -> Rate:
        """… and stores to there."""
        return Rate()

    @cached_property
    def history(self) -> History:
        """What became of keys that are not here: removed, or never stored, and why."""
        return History()

    @property
    def is_ready(self) -> bool:
        """Whether copies may be admitted and jobs given now; where that changes, `Copies.ready` is to be called."""
        return True

    @property
    def is_idle(self) -> bool:
        """Whether it is at nothing: no job, no question and no removal is under way."""
        return True

    @property
    def takes_stores(self) -> bool:
        """Whether what nobody waits for may be stored now."""
        return True

    def status(self) -> TierStatus | None:
        """For `pdx node --status`; None: it shows nothing of it."""
        return None

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        """The leading keys that the tier has in every shard, by what it knows in memory. A tier that nothing is loaded
        from, as a peer, has none, and neither `load` nor `evict` of its own. To look is no use of them."""
        return []

    def use(self, keys: Sequence[bytes]) -> None:
        """A request, or who loads ahead for one, has found these: of a tier that makes room itself they go last."""
        return

    def refresh(self, keys: Sequence[bytes]) -> None:
        """What requests that wait will use of these has changed (`TierHost.wanted`)."""
        return

    def holds(self, key: bytes, shards: int = 0) -> bool:
        """Whether the tier has this key in every shard, by what it knows in memory, whether or not it can be loaded
        now. `shards` 0: how many there are is not known; then as many as are there."""
        return False

    def keys(self) -> list[bytes]:
        """All that `holds` may be true of."""
        return []

    def note(self, keys: Iterable[bytes]) -> None:
        """For the tier itself: these have come or gone."""
        if self.changed is not None:
            for key in keys:
                self.changed.setdefault(key, 0)

    def seeks(self, keys: Sequence[bytes], shards: int) -> bool:
        """Whether the first of these, which `find` does not have, may be found in a moment: the tier is asking for
        them, or begins to. `TierHost.answered` is to be called then."""
        return False

    def asked_s(self, key: bytes) -> float:
        """For how many seconds it has been asking for this key already."""
        return 0.0

    def why_not(self, key: bytes) -> str:
        """Why this key may be here though `find` does not tell of it, in words that follow the tier's name.

        Empty: it is not here, and `history` may say why.
        """
        return ""

    @abstractmethod
    def admit(self, copy: Copy) -> Grant | None:
        """Find room for a copy into this tier: what it has no room for, or has already, is left out of the grant.

        None: the answer comes later, by `Copies.granted` or `Copies.stopped`.
        """

    @abstractmethod
    def store(self, job: Job) -> None:
        """Copy these parts from the arena into this tier."""

    def load(self, job: Job) -> None:
        """Copy these parts from this tier into the arena. A part whose digest does not match is an error."""
        raise NotImplementedError(f"{self.name} has no chunks that `find` tells of")

    @abstractmethod
    def cancel(self, copy: Copy) -> None:
        """End the jobs of a copy soon."""

    @abstractmethod
    def over(self, copy: Copy) -> None:
        """No job of this copy comes any more, and none is under way."""

    def evict(self, keys: Sequence[bytes], shards: int = 0) -> int:
        """Forget these in every shard; returns how many were there, as far as that is known. `shards`: how many they
        have, for a tier that others may have put them in; 0: as many as this node knows of."""
        return 0

    def tick(self) -> None:
        """What is to be done now and then; called a few times a second."""
        return

    def is_pinned(self, key: bytes) -> bool:
        """Whether the tier keeps this until it is unpinned."""
        return False

    def pin(self, keys: Sequence[bytes], *, pinned: bool, share: float) -> None:
        """Keep these, which it has, until they are unpinned (counted per key), or no more. A disk's outlive the
        node; others end with it.

        :raises ArenaFull: more than this share of its cap would be pinned. :raises NodeError: it has no pins.
        """
        raise NodeError(
            f"{self.name} keeps nothing for a controller: it is shared, and others may remove what is there"
        )

    def recode(self, pairs: Sequence[Pair], codec: str, shards: int, on_chunk: OnChunk) -> Recoding:
        """Store chunks, all shards of each, in another form. With "lossless" or "none" a chunk keeps its key. By the
        text of a `pdx.memory.form.Form`, with a loss, it gets another one: then the old chunk goes when the new one is
        there. Chunks that are in that form already are passed over; what fails is as it was. `on_chunk` is told of
        each, by its old key.

        :raises CodecError: there is no such codec. :raises TierError: a key is to change, or stay, that must not.
        :raises NodeError: it stores chunks in one form.
        """
        raise NodeError(f"{self.name} stores chunks in one form only")

    @abstractmethod
    def close(self) -> None:
        """End all jobs and threads. Idempotent."""


Hit = tuple[bytes, Tier, Held]  # a key that a tier has
