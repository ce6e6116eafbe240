"""What an eviction policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from pdx.store.chunk import Chunk


class EvictionPolicy(ABC):
    """The order in which sealed chunks of one arena go. Owned by the control loop; no call may wait.

    A chunk is inserted and held in turns, as readers come and go. `chunk.rank`, `uses` and `keep.expires_at` are the
    policy's own, so that it knows the chunk again; a chunk that comes from another level has its uses and its end, but
    no rank. No call may cost in proportion to the chunks that there are.
    """

    @abstractmethod
    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        """The chunk may be evicted from now on. `before`: one that leads up to it, held or not, and should stay longer.

        Never called for a chunk that was inserted and not held since.
        """

    @abstractmethod
    def hold(self, chunk: Chunk) -> None:
        """The chunk may not be evicted for now. Only called for a chunk that was inserted and not held since."""

    def access(self, chunk: Chunk) -> None:
        """A request has found this chunk, which is held now."""
        return

    def remove(self, chunk: Chunk) -> None:
        """This chunk, which is held and has a rank, is gone, or is on another level from now on."""
        chunk.rank = None

    @abstractmethod
    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        """The chunks that may be evicted, in the order in which they should go, from `start` on where it is not None.

        The caller changes nothing meanwhile, and may evict what it likes of them afterwards.
        """

    def peek(self) -> Iterator[Chunk]:
        """About the order in which they would go now; looking changes nothing. The caller changes nothing meanwhile."""
        return self.victims(None)

    def overdue(self) -> list[Chunk]:
        """Chunks, held or not, that should go now even if there is room. Each is told of once."""
        return []
