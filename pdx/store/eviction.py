"""Which chunks go first: a policy per arena, and the one that PDX has, least recently used first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from pdx.memory.slot import Slot
from pdx.store.chunk import Chunk


class EvictionPolicy(ABC):
    """Has the sealed chunks of one arena that nobody leases or pins. Owned by the control loop; no call may wait.

    `insert` and `remove` are idempotent; `nbytes` is the room of all chunks that it has. `chunk.hints` is what the
    application said of it when it was reserved.
    """

    nbytes: int

    @abstractmethod
    def __contains__(self, chunk: Chunk | None) -> bool:
        """Whether it has this chunk."""

    @abstractmethod
    def insert(self, chunk: Chunk, before: Chunk | None = None, *, goes_first: bool = False) -> None:
        """The chunk may be evicted from now on; `before`: a chunk that leads up to it, which should stay longer.

        `goes_first`: it is worth the least: the end of a prompt, which no other prompt has been found to share.
        """

    @abstractmethod
    def remove(self, chunk: Chunk) -> None:
        """The chunk may not be evicted any more: it is read, pinned or gone."""

    @abstractmethod
    def access(self, chunk: Chunk) -> None:
        """The chunk was used just now."""

    @abstractmethod
    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        """The chunks in the order in which they should go, from `start` where it has that.

        Nothing changes while they are looked at.
        """


class Lru(EvictionPolicy):
    """Least recently used first, the end of a prompt before its beginning.

    A ring through the chunks themselves, closed by one that is nobody's: every call takes the same few steps.
    """

    def __init__(self) -> None:
        self._end = Chunk(b"", 0, Slot(0, 0, 0), 1)  # older than the oldest, newer than the newest
        self._end.older = self._end.newer = self._end
        self._count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, chunk: Chunk | None) -> bool:
        return chunk is not None and chunk.newer is not None

    def insert(self, chunk: Chunk, before: Chunk | None = None, *, goes_first: bool = False) -> None:
        """The chunk goes just before `before` where that may be evicted, too, else as the most recently used.

        So a chunk that is sealed step by step goes before what leads up to it. Nothing else moves: a prompt counts as
        used when the first of its chunks was, until it is read.
        """
        if chunk.newer is None:
            newer = before if before is not None and before.newer is not None else self._end
            oldest = self._end.newer
            assert oldest is not None
            self._link(chunk, oldest if goes_first else newer)
            self._count += 1
            self.nbytes += chunk.room_bytes

    def remove(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.remove`."""
        if chunk.newer is not None:
            self._unlink(chunk)
            self._count -= 1
            self.nbytes -= chunk.room_bytes

    def access(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.access`; nothing where it may not be evicted."""
        if chunk.newer is not None:
            self._unlink(chunk)
            self._link(chunk, self._end)

    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        """See `EvictionPolicy.victims`."""
        at = start if start is not None and start in self else self._end.newer
        while at is not None and at is not self._end:
            yield at
            at = at.newer

    def _link(self, chunk: Chunk, newer: Chunk) -> None:
        older = newer.older
        assert older is not None
        chunk.older, chunk.newer = older, newer
        older.newer = newer.older = chunk

    def _unlink(self, chunk: Chunk) -> None:
        older, newer = chunk.older, chunk.newer
        assert older is not None
        assert newer is not None
        older.newer, newer.older = newer, older
        chunk.older = chunk.newer = None
