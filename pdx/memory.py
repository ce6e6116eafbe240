"""The arena: one shared-memory file per node that its engines map, with the slots' generations behind the data.

The file is [data][generations]: one 64-bit generation per 4 KB granule of data. The node alone writes generations;
a slot is what it was promised to be as long as the generation at its offset is the promised one. So an engine
checks before and after a copy, without a message, that nobody took the slot away meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from pathlib import Path
from types import TracebackType

from pdx.errors import ArenaTooSmall, NodeUnavailable, StaleSlot
from pdx.messages import Slot

GRANULE_BYTES = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14: map all pages now instead of at the first touch
_POPULATE_BYTES = 64 << 20


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole granules."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


def populate_in_background(address: int, nbytes: int, owner: object) -> threading.Thread:
    """Have the kernel map [address, address + nbytes) now, in a daemon thread; `owner` keeps that memory alive.

    Contents stay as they are. Anonymous memory gets huge pages where the system allows asking for them. On kernels
    that cannot do it nothing happens: pages come at their first touch.
    """
    thread = threading.Thread(target=_populate, args=(address, nbytes, owner), name="pdx-populate", daemon=True)
    thread.start()
    return thread


def _populate(address: int, nbytes: int, owner: object) -> None:
    # Through ctypes because mmap.madvise holds the GIL for the whole call.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start, end = -(-address // GRANULE_BYTES) * GRANULE_BYTES, (address + nbytes) // GRANULE_BYTES * GRANULE_BYTES
    madvise(start, end - start, mmap.MADV_HUGEPAGE)  # a hint; shared memory usually refuses it
    for piece in range(start, end, _POPULATE_BYTES):
        if madvise(piece, min(_POPULATE_BYTES, end - piece), _MADV_POPULATE_WRITE):
            return


class Arena:
    """A mapping of a node's chunk memory. `slice()` and `check()` may be called from any thread.

    Whoever holds a view of it keeps the mapping alive; `close()` then only drops this object's own reference.
    """

    def __init__(self, path: Path, nbytes: int, *, writable_generations: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        total = nbytes + nbytes // GRANULE_BYTES * 8
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != total:
                raise NodeUnavailable(f"{path} has {os.fstat(fd).st_size} bytes, expected {total}")
            self._data = mmap.mmap(fd, nbytes)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable_generations else 0)
            self._table = mmap.mmap(fd, total - nbytes, prot=protection, offset=nbytes)
        finally:
            os.close(fd)
        self.data = memoryview(self._data)
        self.generations = memoryview(self._table).cast("Q")

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Arena:
        """Make the file (mode 0600) with all its memory allocated now, and map it.

        :raises ArenaTooSmall: the file system cannot hold it.
        """
        nbytes = round_up(nbytes)
        total = nbytes + nbytes // GRANULE_BYTES * 8
        stats = os.statvfs(path.parent)
        available = stats.f_bavail * stats.f_frsize
        if total > available:
            raise ArenaTooSmall(
                f"an arena of {nbytes >> 20} MiB needs {total >> 20} MiB in {path.parent}, which has "
                f"{available >> 20} MiB left; choose a smaller --arena or make it larger "
                f"(mount -o remount,size=… {path.parent}, docker run --shm-size=…)"
            )
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, total)
        except OSError as error:
            path.unlink()
            raise ArenaTooSmall(f"cannot allocate {total >> 20} MiB at {path}: {error}") from error
        finally:
            os.close(fd)
        return cls(path, nbytes, writable_generations=True)

    @classmethod
    def open(cls, path: Path, nbytes: int) -> Arena:
        """Map an arena that a node made; its generations read-only.

        :raises NodeUnavailable: the file is gone (the node ended) or is not that arena.
        """
        try:
            return cls(path, nbytes, writable_generations=False)
        except OSError as error:
            raise NodeUnavailable(f"cannot map the node's arena {path}: {error}") from error

    def __repr__(self) -> str:
        return f"<Arena {self.path} {self.nbytes >> 20} MiB>"

    def is_current(self, slot: Slot) -> bool:
        """Whether the slot is still what it was promised to be."""
        index, rest = divmod(slot.offset, GRANULE_BYTES)
        in_bounds = not rest and 0 < slot.nbytes <= self.nbytes - slot.offset
        return in_bounds and self.generations[index] == slot.generation

    def check(self, slot: Slot) -> None:
        """:raises StaleSlot: the slot belongs to somebody else now, or never was a slot."""
        if not self.is_current(slot):
            raise StaleSlot(f"{slot} is not what it was promised to be")

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, without a copy.

        :raises StaleSlot: see `check`.
        """
        self.check(slot)
        return self.data[slot.offset : slot.offset + slot.nbytes]

    def populate_in_background(self) -> threading.Thread:
        """Map all pages into this process from a daemon thread, so that first copies run at full speed."""
        anchor = (ctypes.c_char * self.nbytes).from_buffer(self._data)  # keeps the mapping alive meanwhile
        return populate_in_background(ctypes.addressof(anchor), self.nbytes, anchor)

    def close(self) -> None:
        """Drop this mapping; memory stays mapped as long as a view of it lives. Idempotent."""
        self.generations.release()
        self.data.release()
        for mapping in (self._table, self._data):
            with contextlib.suppress(BufferError):  # a view is alive: the mapping goes with it
                mapping.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
