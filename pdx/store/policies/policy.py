"""What an eviction policy is, and what it puts in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from pdx.wire.hints import NO_HINTS, Hints

Rank = tuple[int, int, int]  # in an eviction policy; less goes first

# In the order of eviction; plain numbers, because each hold and insert looks at them.
OUT = 0
IN = 1  # it may be evicted now
PARKED = 2  # it may not, but its eviction policy has not been told


class Keep(msgspec.Struct, frozen=True, gc=False):
    """What was asked of how long one chunk stays."""

    pins: int = 0
    expected_at: float = 0.0  # a request has said that it is wanted again then (`Hints.reuse_s`); 0: none has
    leased_until: float = 0.0  # a tenant keeps it from being evicted (`pdx.store.tenant_leases`) …
    lessee: bytes = b""  # … this one
    expires_at: float = 0.0  # when it goes, if its eviction policy says so


ORDINARY = Keep()  # nothing was asked


class Evictable(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What can be evicted: a chunk of one shard, in an arena or as the file of a disk. Owned by the control loop.

    Python's collector does not look at these, because a node holds millions of them and would stand still meanwhile.
    Nothing is lost by that: what they have of each other is taken back when they go.
    """

    key: bytes
    shard: int = 0
    room_bytes: int  # that are free when it is gone
    hints: Hints = NO_HINTS  # of the request for which it was reserved
    keep: Keep = ORDINARY
    standing: int = OUT  # in the order of eviction (`pdx.store.eviction`): `OUT`, `IN` or `PARKED` …
    level: int = 0  # … on this level
    is_over: bool = False  # its cache salt has used so much since that this one goes first (`pdx.store.eviction`)
    is_passed: bool = False  # its prompt has gone on, and needs it no more; no request has found it since
    rank: Rank | None = None  # its eviction policy's …
    uses: int = 0  # … own knowledge of it
    older: Evictable | None = None  # its neighbours in `pdx.store.policies.lru`; None: it is not there
    newer: Evictable | None = None


E = TypeVar("E", bound=Evictable)


class EvictionPolicy(ABC, Generic[E]):
    """The order in which sealed chunks of one arena, or of one disk, go. Owned by the control loop; no call may wait.

    A chunk is inserted and held in turns, as readers come and go. `chunk.rank`, `uses` and `keep.expires_at` are the
    policy's own, so that it knows the chunk again; a chunk that comes from another level has its uses and its end, but
    no rank. No call may cost in proportion to the chunks that there are.
    """

    @abstractmethod
    def insert(self, chunk: E, before: E | None = None) -> None:
        """The chunk may be evicted from now on. `before`: one that leads up to it, held or not, and should stay longer.

        Never called for a chunk that was inserted and not held since.
        """

    @abstractmethod
    def hold(self, chunk: E) -> None:
        """The chunk may not be evicted for now. Only called for a chunk that was inserted and not held since."""

    def access(self, chunk: E) -> None:
        """A request has found this chunk, which is held now."""
        return

    def remove(self, chunk: E) -> None:
        """This chunk, which is held and has a rank, is gone, or is on another level from now on."""
        chunk.rank = None

    @abstractmethod
    def victims(self, start: E | None) -> Iterator[E]:
        """The chunks that may be evicted, in the order in which they should go, from `start` on where it is not None.

        The caller changes nothing meanwhile, and may evict what it likes of them afterwards.
        """

    def peek(self) -> Iterator[E]:
        """About the order in which they would go now; looking changes nothing. The caller changes nothing meanwhile."""
        return self.victims(None)

    def overdue(self) -> list[E]:
        """Chunks, held or not, that should go now even if there is room. Each is told of once."""
        return []
