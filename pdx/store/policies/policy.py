"""The interface of eviction policies, and the records that they order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from pdx.wire.hints import NO_HINTS, Hints

Rank = tuple[int, int, int]  # in an eviction policy; lower ranks go first

# Standings in the order of eviction; plain numbers, because each hold and insert checks them.
OUT = 0
IN = 1  # may be evicted now
PARKED = 2  # may not, but the eviction policy has not been told


class Keep(msgspec.Struct, frozen=True, gc=False):
    """The reasons to keep one chunk, and its expiry."""

    pins: int = 0
    expected_at: float = 0.0  # when a request expects to want it again (`Hints.reuse_s`); 0: not said
    leased_until: float = 0.0  # end of a tenant's lease (`pdx.store.tenant_leases`) …
    lessee: bytes = b""  # … and the tenant
    expires_at: float = 0.0  # set by an eviction policy with a time limit


ORDINARY = Keep()  # nothing holds it


class Evictable(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """A record that can be evicted: a chunk of one shard, in an arena or as a disk's file. Owned by the control loop.

    Python's garbage collector does not track these records, because a node holds millions of them and would pause for
    that. They do not leak: references between them are cleared when they go.
    """

    key: bytes
    shard: int = 0
    room_bytes: int  # freed by its eviction
    hints: Hints = NO_HINTS  # of the request for which it was reserved
    keep: Keep = ORDINARY
    standing: int = OUT  # in the order of eviction (`pdx.store.eviction`): `OUT`, `IN` or `PARKED` …
    level: int = 0  # … on this level
    is_over: bool = False  # over the quota of its cache salt (`pdx.store.eviction`)
    is_passed: bool = False  # its prompt has gone on and no longer needs it; no request has found it since
    rank: Rank | None = None  # private to …
    uses: int = 0  # … its eviction policy
    older: Evictable | None = None  # its neighbors in `pdx.store.policies.lru`; None: it is not there
    newer: Evictable | None = None


E = TypeVar("E", bound=Evictable)


class EvictionPolicy(ABC, Generic[E]):
    """The order of eviction for the sealed chunks of an arena, or of a disk. Owned by the control loop; must not wait.

    A chunk is inserted and held in turn, as readers come and go. `chunk.rank`, `uses` and `keep.expires_at` belong to
    the policy, so that it recognizes a chunk; a chunk from another level keeps its `uses` and `expires_at`, but has no
    rank. The cost of a call must not grow in proportion to the number of chunks.
    """

    @abstractmethod
    def insert(self, chunk: E, before: E | None = None) -> None:
        """Make the chunk evictable. `before`: a predecessor in the prompt, held or not, which should stay longer.

        Never called for a chunk that was inserted and not held since.
        """

    @abstractmethod
    def hold(self, chunk: E) -> None:
        """Protect the chunk from eviction for now. Only called for a chunk that was inserted and not held since."""

    def access(self, chunk: E) -> None:
        """A request has hit this chunk, which is held now."""
        return

    def remove(self, chunk: E) -> None:
        """This chunk, which is held and has a rank, is gone, or moves to another level."""
        chunk.rank = None

    @abstractmethod
    def victims(self, start: E | None) -> Iterator[E]:
        """The evictable chunks in order of eviction, from `start` on if it is not None.

        The caller changes nothing meanwhile, and may evict any of them afterwards.
        """

    def peek(self) -> Iterator[E]:
        """The approximate order of eviction, without changing anything. The caller changes nothing meanwhile."""
        return self.victims(None)

    def overdue(self) -> list[E]:
        """Chunks, held or not, that should go now even if there is room. Each is returned once."""
        return []
