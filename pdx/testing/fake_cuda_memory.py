"""The memory of the fake CUDA driver: memfds at reserved addresses, page-locked host memory, and what has leaked.

Real addresses: copies, the Triton interpreter and `ctypes` work on them. Device memory is sparse until it is written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

GRANULARITY = 2 << 20
_MEMFD = re.compile(r"/memfd:pdx-fake-gpu-(\d+)( \(deleted\))?\Z")
_IPC = struct.Struct("<8sIIQQI28x")  # mark, pid, descriptor, start time of the process, bytes, ordinal
_IPC_MARK = b"pdx-fake"
_MAP_FIXED, _MAP_NORESERVE, _MAP_FAILED = 0x10, 0x4000, ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Refused(Exception):  # noqa: N818 - no error of PDX, but a CUresult
    """A call that ends with this CUresult: its name without CUDA_ERROR_."""


@dataclass(eq=False)
class Allocation:
    """Memory of one GPU. `holds`: handles and mappings of this process."""

    fd: int
    nbytes: int
    ordinal: int
    is_ours: bool  # counts against what this process's fake GPU has
    holds: int = 1


@dataclass
class Range:
    """Reserved addresses, and what is mapped there. `access`: the ordinals of GPUs that may use it."""

    start: int
    nbytes: int
    mapped: Allocation | None = None
    access: set[int] = field(default_factory=set)
    kind: str = "vmm"  # or "alloc" (cuMemAlloc), "ipc" (cuIpcOpenMemHandle)
    opens: int = 1  # kind "ipc"
    key: bytes = b""  # kind "ipc": its handle

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class FakeMemory:
    """What this process has of device memory, and which of its host memory is page-locked. Any thread may call.

    One lock guards all of it, and is held while bytes are copied: nothing is unmapped under a copy.
    """

    def __init__(self, gpus: int, nbytes: int, *, has_peer_access: bool, reaches_unseen: bool) -> None:
        self.lock = threading.RLock()
        self.free = [nbytes] * gpus
        self.total = nbytes
        self._has_peer_access = has_peer_access
        self._reaches_unseen = reaches_unseen  # also GPUs that this process has no ordinal of
        self._handles: dict[int, Allocation] = {}
        self._next_handle = 0x1000
        self._ranges: dict[int, Range] = {}
        self._registered: dict[int, int] = {}  # address -> bytes

    def counts(self) -> dict[str, int]:
        """What is not given back, by kind."""
        with self.lock:
            ranges = self._ranges.values()
            return {
                "handles": len(self._handles),
                "reserved": len(self._ranges),
                "mapped": sum(found.mapped is not None for found in ranges),
                "registered": len(self._registered),
                "used bytes": sum(self.total - free for free in self.free),
            }

    def close(self) -> None:
        """Give back what the process did not. Nothing may use it any more."""
        with self.lock:
            for found in list(self._ranges.values()):
                self._drop_range(found)
            for handle in list(self._handles):
                self.release(handle)
            self._registered.clear()

    def can_access(self, ordinal: int, other: int) -> bool:
        """Whether one GPU reaches the other's memory."""
        is_seen = other < len(self.free)
        return ordinal == other or (self._has_peer_access and (is_seen or self._reaches_unseen))

    # --- the virtual-memory API

    def create(self, nbytes: int, ordinal: int) -> int:
        """A new allocation; its handle."""
        if nbytes <= 0 or nbytes % GRANULARITY or not 0 <= ordinal < len(self.free):
            raise Refused("INVALID_VALUE")
        with self.lock:
            return self._new_handle(self._allocate(nbytes, ordinal))

    def release(self, handle: int) -> None:
        with self.lock:
            self._let_go(self._handles.pop(handle, None))

    def export(self, handle: int) -> int:
        """A new descriptor of the allocation."""
        with self.lock:
            allocation = self._handles.get(handle)
            if allocation is None:
                raise Refused("INVALID_VALUE")
            fd = os.dup(allocation.fd)
            os.set_inheritable(fd, True)  # as one that a C library made
            return fd

    def take_in(self, fd: int) -> int:
        """A handle of the allocation behind a descriptor; the descriptor stays the caller's."""
        try:
            match = _MEMFD.match(os.readlink(f"/proc/self/fd/{fd}"))
            nbytes = os.fstat(fd).st_size
        except OSError:
            raise Refused("INVALID_VALUE") from None
        if match is None:
            raise Refused("INVALID_VALUE")
        with self.lock:
            return self._new_handle(Allocation(os.dup(fd), nbytes, int(match[1]), is_ours=False))

    def reserve(self, nbytes: int) -> int:
        """Addresses at which nothing is yet."""
        if nbytes <= 0 or nbytes % GRANULARITY:
            raise Refused("INVALID_VALUE")
        # Aligned as a GPU's addresses are: room for one more granule, from which the ends are cut off again.
        start = _mmap(0, nbytes + GRANULARITY, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        aligned = -(-start // GRANULARITY) * GRANULARITY
        for address, size in ((start, aligned - start), (aligned + nbytes, start + GRANULARITY - aligned)):
            if size:
                _libc.munmap(address, size)
        with self.lock:
            self._ranges[aligned] = Range(aligned, nbytes)
        return aligned

    def free_addresses(self, address: int, nbytes: int) -> None:
        with self.lock:
            found = self._exactly(address, nbytes)
            if found.mapped is not None:
                raise Refused("INVALID_VALUE")
            _libc.munmap(found.start, found.nbytes)
            del self._ranges[address]

    def map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        with self.lock:
            found, allocation = self._exactly(address, nbytes), self._handles.get(handle)
            is_right = allocation is not None and found.mapped is None and offset == 0
            if allocation is None or not is_right or nbytes > allocation.nbytes:
                raise Refused("INVALID_VALUE")
            _mmap(address, nbytes, 0, mmap.MAP_SHARED | _MAP_FIXED, allocation.fd)
            allocation.holds += 1
            found.mapped = allocation

    def unmap(self, address: int, nbytes: int) -> None:
        with self.lock:
            found = self._exactly(address, nbytes)
            if found.mapped is None or found.kind != "vmm":
                raise Refused("INVALID_VALUE")
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            _mmap(address, nbytes, 0, flags, -1)
            self._let_go(found.mapped)
            found.mapped, found.access = None, set()

    def set_access(self, address: int, nbytes: int, ordinals: list[int]) -> None:
        with self.lock:
            found = self._exactly(address, nbytes)
            if found.mapped is None:
                raise Refused("INVALID_VALUE")
            if not all(self.can_access(ordinal, found.mapped.ordinal) for ordinal in ordinals):
                raise Refused("INVALID_DEVICE")
            _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            found.access |= set(ordinals)

    # --- cuMemAlloc and legacy IPC

    def alloc(self, nbytes: int, ordinal: int) -> int:
        """New memory, mapped."""
        if nbytes <= 0:
            raise Refused("INVALID_VALUE")
        size = -(-nbytes // GRANULARITY) * GRANULARITY
        with self.lock:
            allocation = self._allocate(size, ordinal)
            return self._map_whole(allocation, ordinal, kind="alloc").start

    def free_memory(self, address: int) -> None:
        self._drop_of_kind(address, "alloc")

    def ipc_handle(self, address: int) -> bytes:
        """The 64 bytes by which another process finds it."""
        with self.lock:
            found = self._ranges.get(address)
            if found is None or found.kind != "alloc" or found.mapped is None:
                raise Refused("INVALID_VALUE")
            pid, memory = os.getpid(), found.mapped
            return _IPC.pack(_IPC_MARK, pid, memory.fd, _started(pid), memory.nbytes, memory.ordinal)

    def open_ipc(self, raw: bytes, ordinal: int) -> int:
        """Map what a living process has; once for all opens of the same handle."""
        mark, pid, fd, started, nbytes, owner = _IPC.unpack(raw)
        if mark != _IPC_MARK:
            raise Refused("INVALID_VALUE")
        if pid == os.getpid():
            raise Refused("INVALID_CONTEXT")
        if not self.can_access(ordinal, owner):
            raise Refused("PEER_ACCESS_UNSUPPORTED")
        with self.lock:
            for found in self._ranges.values():
                if found.kind == "ipc" and found.key == raw:
                    found.opens += 1
                    return found.start
            try:
                if _started(pid) != started:
                    raise Refused("INVALID_HANDLE")
                ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                raise Refused("INVALID_HANDLE") from None
            mapping = self._map_whole(Allocation(ours, nbytes, owner, is_ours=False), ordinal, kind="ipc")
            mapping.key = raw
            return mapping.start

    def close_ipc(self, address: int) -> None:
        self._drop_of_kind(address, "ipc")

    def range_of(self, address: int) -> tuple[int, int]:
        """Start and size of the memory that has this address."""
        with self.lock:
            found = self._range_with(address)
            if found is None or found.mapped is None:
                raise Refused("INVALID_VALUE")
            return found.start, found.nbytes

    # --- host memory

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> None:
        if nbytes <= 0 or not _is_mapped(address, nbytes, needs_write=not is_read_only):
            raise Refused("INVALID_VALUE")
        with self.lock:
            if any(start < address + nbytes and address < start + size for start, size in self._registered.items()):
                raise Refused("HOST_MEMORY_ALREADY_REGISTERED")
            self._registered[address] = nbytes

    def unregister(self, address: int) -> None:
        with self.lock:
            if self._registered.pop(address, None) is None:
                raise Refused("HOST_MEMORY_NOT_REGISTERED")

    def is_registered(self, address: int, nbytes: int) -> bool:
        """Whether registered pieces cover all of it."""
        with self.lock:
            for start, size in sorted(self._registered.items()):
                if start <= address < start + size:
                    step = min(nbytes, start + size - address)
                    address, nbytes = address + step, nbytes - step
            return nbytes == 0

    # --- copies

    def check_copy(self, address: int, nbytes: int, ordinal: int) -> Range | None:
        """Refuse what a driver refuses: device memory beyond its mapping, or host memory over two registrations.

        The device memory that it is, None: host memory.
        """
        with self.lock:
            found = next((r for r in self._ranges.values() if r.start < address + nbytes and address < r.end), None)
            if found is not None:
                is_inside = found.start <= address and address + nbytes <= found.end
                if found.mapped is None or not is_inside or ordinal not in found.access:
                    raise Refused("INVALID_VALUE")
                return found
            for start, size in self._registered.items():
                touches = start < address + nbytes and address < start + size
                if touches and not (start <= address and address + nbytes <= start + size):
                    raise Refused("INVALID_VALUE")
            return None

    def copy(self, target: int, source: int, nbytes: int, device_memory: list[Range]) -> None:
        """Copy now; refused if `device_memory`, which the copy is about, has been unmapped since it was asked for."""
        with self.lock:
            for found in device_memory:
                if self._ranges.get(found.start) is not found or found.mapped is None:
                    raise Refused("ILLEGAL_ADDRESS")
            ctypes.memmove(target, source, nbytes)

    # --- inner parts, under the lock

    def _allocate(self, nbytes: int, ordinal: int) -> Allocation:
        if nbytes > self.free[ordinal]:
            raise Refused("OUT_OF_MEMORY")
        fd = os.memfd_create(f"pdx-fake-gpu-{ordinal}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        self.free[ordinal] -= nbytes
        return Allocation(fd, nbytes, ordinal, is_ours=True)

    def _new_handle(self, allocation: Allocation) -> int:
        self._next_handle += 1
        self._handles[self._next_handle] = allocation
        return self._next_handle

    def _let_go(self, allocation: Allocation | None) -> None:
        if allocation is None:
            raise Refused("INVALID_VALUE")
        allocation.holds -= 1
        if not allocation.holds:
            os.close(allocation.fd)
            if allocation.is_ours:
                self.free[allocation.ordinal] += allocation.nbytes

    def _map_whole(self, allocation: Allocation, ordinal: int, *, kind: str) -> Range:
        address = self.reserve(allocation.nbytes)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(address, allocation.nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, allocation.fd)
        found = self._ranges[address]
        found.mapped, found.kind, found.access = allocation, kind, {ordinal, allocation.ordinal}
        return found

    def _drop_of_kind(self, address: int, kind: str) -> None:
        with self.lock:
            found = self._ranges.get(address)
            if found is None or found.kind != kind:
                raise Refused("INVALID_VALUE")
            found.opens -= 1
            if not found.opens:
                self._drop_range(found)

    def _drop_range(self, found: Range) -> None:
        _libc.munmap(found.start, found.nbytes)
        del self._ranges[found.start]
        if found.mapped is not None:
            self._let_go(found.mapped)

    def _exactly(self, address: int, nbytes: int) -> Range:
        found = self._ranges.get(address)
        if found is None or found.nbytes != nbytes:
            raise Refused("INVALID_VALUE")
        return found

    def _range_with(self, address: int) -> Range | None:
        return next((found for found in self._ranges.values() if found.start <= address < found.end), None)


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _MAP_FAILED or found is None:
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(found)


def _started(pid: int) -> int:
    """When the process started, in the kernel's ticks. :raises OSError: it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        raise ProcessLookupError(pid)
    return int(fields[19])


def _is_mapped(address: int, nbytes: int, *, needs_write: bool) -> bool:
    """Whether this process has all of it mapped, writable if needed."""
    end = address + nbytes
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split(maxsplit=2)
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            if permissions[0] != "r" or (needs_write and permissions[1] != "w"):
                return False
            address = high
        if address >= end:
            return True
    return False
