"""The arena: a node's shared-memory file, mapped by its engines, with chunk data and the node's tables about slots.

The file is [data][generations][filled]: a 64-bit generation and a 16-bit number of filled slices per 4 KB granule of
data. Only the node writes these tables. A slot is valid as long as the generation at its offset is the slot's own. So
an engine can check before and after a copy, without a message, that the slot was not taken back meanwhile; and it sees
which leading slices may be read while others are still being filled.

If the data is on a GPU (`pdx.cuda.arena`), the file holds only the tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pdx.closing import Closing
from pdx.errors import ArenaTooSmall, NodeUnavailable, StaleSlot
from pdx.memory.slot import Slot

GRANULE_BYTES = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14: map all pages now instead of at first touch
_POPULATE_BYTES = 64 << 20
_GENERATION_BYTES = 8
_FILLED_BYTES = 2
TABLE_BYTES = _GENERATION_BYTES + _FILLED_BYTES  # per granule
NEVER = (1 << 16) - 1  # in place of the number of filled slices: the rest will never be filled
_FILL_GENERATIONS = 1 << 17
LAST_GENERATION = (1 << 63) - 1  # the largest number in a message; then 0 follows
FIRST_GENERATIONS = 1 << 31  # generations begin at a random number below this, so they take five bytes in a message


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole granules."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


def populate_in_background(address: int, nbytes: int, owner: object) -> threading.Thread:
    """Have the kernel map [address, address + nbytes) now, in a daemon thread; `owner` keeps that memory alive.

    Contents do not change. Anonymous memory gets huge pages if the system allows asking for them. On kernels without
    support this is a no-op: pages are mapped at first touch.
    """
    thread = threading.Thread(target=_populate, args=(address, nbytes, owner), name="pdx-populate", daemon=True)
    thread.start()
    return thread


def _populate(address: int, nbytes: int, owner: object) -> None:
    # Through ctypes because mmap.madvise holds the GIL for the whole call.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start, end = -(-address // GRANULE_BYTES) * GRANULE_BYTES, (address + nbytes) // GRANULE_BYTES * GRANULE_BYTES
    madvise(start, end - start, mmap.MADV_HUGEPAGE)  # a hint; shared memory refuses it unless its mount allows it
    for piece in range(start, end, _POPULATE_BYTES):
        if madvise(piece, min(_POPULATE_BYTES, end - piece), _MADV_POPULATE_WRITE):
            return


def memory_limit(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The memory that this process's control groups, of either version, may have, in bytes; None: no limit is known.

    A container may not see the folders of those it is in, only its own as the root.
    """
    limits = []
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # it is not seen from here; it has "max", which is none
                limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


class Arena(Closing):
    """A mapping of a node's chunk memory. All methods except `close` are thread-safe.

    A view keeps the mapping alive; `close()` then only drops this object's own reference.
    """

    gpu: str = ""  # UUID of the GPU that has the data; empty: host memory
    address: int  # of the data, in this process
    _has_data_in_file: ClassVar[bool] = True
    _held = -1  # descriptor of the locked file, if this process is the node

    def __init__(self, path: Path, nbytes: int, *, writable_generations: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        total = self._file_bytes(nbytes)
        generation_bytes = nbytes // GRANULE_BYTES * _GENERATION_BYTES
        table_bytes = nbytes // GRANULE_BYTES * TABLE_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != total:
                raise NodeUnavailable(f"{path} has {os.fstat(fd).st_size} bytes, expected {total}")
            self._table = _map_table(fd, table_bytes, total - table_bytes, writable=writable_generations)
            self._data = mmap.mmap(fd, nbytes) if self._has_data_in_file else None
            if writable_generations:  # this is the node: while it lives, the lock protects the file from `remove_left`
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._held = os.dup(fd)
        finally:
            os.close(fd)
        self.generations = memoryview(self._table)[:generation_bytes].cast("Q")
        self.filled = memoryview(self._table)[generation_bytes:].cast("H")  # leading slices, see `filled_slices`
        if self._data is not None:
            self._bytes = memoryview(self._data)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._data))

    @classmethod
    def _file_bytes(cls, nbytes: int) -> int:
        table_bytes = nbytes // GRANULE_BYTES * TABLE_BYTES
        return (nbytes if cls._has_data_in_file else 0) + table_bytes

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Arena:
        """Create the file (mode 0600), allocate all its memory, and map it.

        :raises ArenaTooSmall: the file system cannot hold it.
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # some ARM kernels have pages of 64 KiB
        with cls._allocated(path, nbytes):
            return cls(path, nbytes, writable_generations=True)

    @classmethod
    @contextlib.contextmanager
    def _allocated(cls, path: Path, nbytes: int) -> Iterator[None]:
        """A new file with all its memory. In here it is locked, so that `remove_left` of another process spares it."""
        total = cls._file_bytes(nbytes)
        stats = os.statvfs(path.parent)
        available = stats.f_bavail * stats.f_frsize
        if total > available:
            raise ArenaTooSmall(
                f"an arena of {nbytes >> 20} MiB needs {total >> 20} MiB in {path.parent}, which has "
                f"{available >> 20} MiB left; choose a smaller --arena or make it larger "
                f"(mount -o remount,size=… {path.parent}, docker run --shm-size=…)"
            )
        limit = memory_limit()
        if limit is not None and total > limit:
            raise ArenaTooSmall(
                f"an arena of {nbytes >> 20} MiB needs {total >> 20} MiB, and this container has a memory limit of "
                f"{limit >> 20} MiB; choose a smaller --arena or raise it (docker run --memory=…, "
                "resources.limits.memory)"
            )
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            try:
                if cls._has_data_in_file:
                    _allocate_huge(fd, nbytes, total)
                os.posix_fallocate(fd, 0, total)
            except OSError as error:
                path.unlink()
                raise ArenaTooSmall(f"cannot allocate {total >> 20} MiB at {path}: {error}") from error
            yield
        finally:
            os.close(fd)

    @staticmethod
    def remove_left(path: Path) -> None:
        """Remove the arena file of a killed node, but not another user's, or one that a node still uses."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # gone meanwhile, or not this user's
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid == os.getuid():
                path.unlink(missing_ok=True)
        except BlockingIOError:
            return
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path, nbytes: int) -> Arena:
        """Map an arena that a node has created, with read-only tables.

        :raises NodeUnavailable: the file is gone (the node ended) or is not that arena.
        """
        try:
            return cls(path, nbytes, writable_generations=False)
        except OSError as error:
            raise not_mapped(path, error) from error

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path} {self.nbytes >> 20} MiB>"

    def begin_generations(self, base: int) -> None:
        """Set all generations to `base`. For the node, before it grants any slot: with a random base, no slot of an
        earlier epoch is current in this one."""
        piece = base.to_bytes(_GENERATION_BYTES, "little") * _FILL_GENERATIONS
        table = self.generations.cast("B")
        for first in range(0, len(table), len(piece)):
            table[first : first + len(piece)] = piece[: len(table) - first]

    @property
    def data(self) -> memoryview:
        """All the data, writable, without a copy. :raises LayoutError: it is on a GPU."""
        return self._bytes

    def is_current(self, slot: Slot) -> bool:
        """Whether the slot is still valid."""
        index, rest = divmod(slot.offset, GRANULE_BYTES)
        in_bounds = not rest and 0 < slot.nbytes <= self.nbytes - slot.offset
        return in_bounds and self.generations[index] == slot.generation

    def filled_slices(self, slot: Slot) -> int:
        """The number of leading slices that are filled and may be read, if the slot `is_current` before and after.

        :returns: `NEVER` if the rest will never be filled.
        """
        return self.filled[slot.offset // GRANULE_BYTES]

    def check(self, slot: Slot) -> None:
        """:raises StaleSlot: the slot was given to another owner, or never was a slot."""
        if not self.is_current(slot):
            raise StaleSlot(f"{slot} is not what it was promised to be")

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, without a copy.

        :raises StaleSlot: see `check`.
        :raises LayoutError: they are on a GPU.
        """
        self.check(slot)
        return self.data[slot.offset : slot.offset + slot.nbytes]

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Bytes for the CPU to read: a view if they are in host memory, else a copy.

        :raises ValueError: they are outside the arena.
        :raises GpuError: they could not be copied.
        """
        check_span(offset, nbytes, self.nbytes)
        return self.data[offset : offset + nbytes]

    def populate_in_background(self) -> threading.Thread | None:
        """Map all pages into this process from a daemon thread, so that first copies run at full speed.

        None: the memory is a GPU's, which has no such pages.
        """
        if self._data is None:
            return None
        anchor = (ctypes.c_char * self.nbytes).from_buffer(self._data)  # keeps the mapping alive meanwhile
        return populate_in_background(self.address, self.nbytes, anchor)

    def close(self) -> None:
        """Drop this mapping; the memory stays mapped as long as it has a view. Idempotent."""
        self.generations.release()
        self.filled.release()
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
        if self._data is not None:
            self._bytes.release()
        for mapping in (self._table, self._data):
            with contextlib.suppress(BufferError):  # a view is alive: the mapping ends with it
                if mapping is not None:
                    mapping.close()


def not_mapped(path: Path, error: OSError) -> NodeUnavailable:
    """The error for an arena that its node has just announced and that cannot be mapped."""
    why = str(error)
    if isinstance(error, FileNotFoundError):
        why = (
            "no such file here; a container needs the node's own /dev/shm, and if the file was removed (systemd does "
            "that when its user logs out, see RemoveIPC in logind.conf), start the node anew"
        )
    return NodeUnavailable(f"cannot map the node's arena {path}: {why}")


def _allocate_huge(fd: int, nbytes: int, total: int) -> None:
    """Allocate the data of a new file in huge pages, if the kernel grants them on request (a mount with `huge=advise`).

    The caller allocates the rest.

    With huge pages, copies to and from a GPU, disk reads and copies by the CPU have fewer pages to look up.
    """
    os.ftruncate(fd, total)
    with mmap.mmap(fd, nbytes) as data:
        start = ctypes.c_char.from_buffer(data)
        _populate(ctypes.addressof(start), nbytes, data)
        del start


def _map_table(fd: int, nbytes: int, offset: int, *, writable: bool) -> mmap.mmap:
    if writable:
        return mmap.mmap(fd, nbytes, offset=offset)
    # A mapping through a read-only descriptor can never be made writable, not even by mistake.
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(read_only, nbytes, prot=mmap.PROT_READ, offset=offset)
    finally:
        os.close(read_only)


def check_span(offset: int, nbytes: int, total: int) -> None:
    """:raises ValueError: [offset, offset + nbytes) is not inside `total` bytes."""
    if not (offset >= 0 and 0 <= nbytes <= total - offset):
        raise ValueError(f"{nbytes} bytes at {offset} are not inside {total} bytes")
