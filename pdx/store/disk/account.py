"""The cap of a disk tier: what may be on the disk never exceeds it.

Files count, files that are being written, and files until they are removed; also what can be neither found nor removed.
"""

from __future__ import annotations

from collections.abc import Callable

from pdx.store.disk.chunk_file import ChunkFile

FULL_S = 60.0  # so long new files take the place of old ones after the disk was full before the cap was reached


class Account:
    """Owned by the control loop."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float]) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.leaving = 0  # of these, files that are to be removed in place of no other
        self.coming = 0  # files that are being written
        self._clock = clock
        # What cannot be found, nor removed, until it is replaced: which file, and whether it is unfinished.
        self.stuck: set[tuple[ChunkFile, bool]] = set()
        self._reached = limit_bytes  # bytes of files when the disk was full, until …
        self._reached_until = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the disk was found to be full, because others use it, too."""
        return self._clock() < self._reached_until

    def full(self) -> None:
        """It has no room for more than there is, for a while."""
        self._reached, self._reached_until = self.used_bytes, self._clock() + FULL_S

    def lack(self, nbytes: int) -> int:
        """Bytes that must go so that these have room; none where it is not positive."""
        return self.used_bytes + nbytes - (self._reached if self._clock() < self._reached_until else self.limit_bytes)

    @property
    def excess(self) -> int:
        """Bytes above the cap when all that leaves is gone."""
        return self.used_bytes - self.leaving - self.limit_bytes

    def stick(self, file: ChunkFile, *, is_unfinished: bool = False) -> None:
        """This is there, is not found, and could not be removed."""
        self.used_bytes += file.charge * ((file, is_unfinished) not in self.stuck)
        self.stuck.add((file, is_unfinished))

    def replaced(self, file: ChunkFile, unfinished: ChunkFile) -> None:
        """A file of that name was written, by way of an unfinished one: neither is stuck any more."""
        gone = {(file, False), (unfinished, True)} & self.stuck
        self.used_bytes -= file.charge * len(gone)
        self.stuck -= gone
