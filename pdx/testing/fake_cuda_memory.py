"""The memory of the fake CUDA driver's GPUs: memfds behind reserved addresses, and what has leaked.

The CPU cannot look at an address of a GPU: it is reserved, and nothing else, so whoever tries ends with SIGSEGV as on
a real machine. What the fake GPU itself copies goes through a second mapping of the memfd (`Range.shadow`), which lies
at addresses of its own. Device memory is sparse until it is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

GRANULARITY = 2 << 20
_HOST_VARIABLE = "PDX_FAKE_GPU_HOST"  # which processes have their GPUs in common: a name, inherited by children
_MEMFD = re.compile(r"/memfd:pdx-fake-gpu-(\w+)-(\d+)( \(deleted\))?\Z")
_JUNK = b"\xb5" * (64 << 10)  # what new memory begins with, and all that can be seen of a dead process's
_IPC = struct.Struct("<8sIIQQI28x")  # mark, pid, descriptor, start time of the process, bytes, ordinal
_IPC_MARK = b"pdx-fake"
_MAP_FIXED, _MAP_NORESERVE, _MAP_FAILED = 0x10, 0x4000, ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Refused(Exception):  # noqa: N818 - no error of PDX, but a CUresult
    """A call that ends with this CUresult: its name without CUDA_ERROR_."""


@dataclass(eq=False)
class Allocation:
    """Memory of one GPU. `holds`: handles and mappings of this process."""

    fd: int
    nbytes: int
    ordinal: int
    is_ours: bool  # made here, not imported
    holds: int = 1


@dataclass
class Range:
    """Reserved addresses, and what is mapped there. `access`: the ordinals of GPUs that may use it.

    `shadow`: where the fake GPU's own accesses go, 0 while nothing is mapped. `exporter`: pid and start time of the
    process that legacy memory goes with, None once it is known to be gone.
    """

    start: int
    nbytes: int
    mapped: Allocation | None = None
    shadow: int = 0
    exporter: tuple[int, int] | None = None
    access: set[int] = field(default_factory=set)
    kind: str = "vmm"  # or "alloc" (cuMemAlloc), "ipc" (cuIpcOpenMemHandle)
    opens: int = 1  # kind "ipc"
    key: bytes = b""  # kind "ipc": its handle

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class FakeMemory:
    """What this process has of device memory. Any thread may call.

    One lock guards all of it, and is held while bytes are copied: nothing is unmapped under a copy.
    """

    def __init__(self, gpus: int, nbytes: int, *, has_peer_access: bool, reaches_unseen: bool) -> None:
        self.lock = threading.RLock()
        self.num_gpus = gpus
        self.total = nbytes
        self._used = [0] * gpus  # by what this process made
        self._host = os.environ.setdefault(_HOST_VARIABLE, f"p{os.getpid()}")
        self._has_peer_access = has_peer_access
        self._reaches_unseen = reaches_unseen  # also GPUs that this process has no ordinal of
        self._handles: dict[int, Allocation] = {}
        self._next_handle = 0x1000
        self._ranges: dict[int, Range] = {}

    def counts(self) -> dict[str, int]:
        """What is not given back, by kind."""
        with self.lock:
            ranges = self._ranges.values()
            return {
                "handles": len(self._handles),
                "reserved": len(self._ranges),
                "mapped": sum(found.mapped is not None for found in ranges),
                "used bytes": sum(self._used),
            }

    def free(self, ordinal: int) -> int:
        """Bytes of the GPU that no process has, whoever made them and whether that one lives."""
        return self.total - _held_bytes(f"/memfd:pdx-fake-gpu-{self._host}-{ordinal}")

    def close(self) -> None:
        """Give back what the process did not. Nothing may use it any more."""
        with self.lock:
            for found in list(self._ranges.values()):
                self._drop_range(found)
            for handle in list(self._handles):
                self.release(handle)

    def can_access(self, ordinal: int, other: int) -> bool:
        """Whether one GPU reaches the other's memory."""
        is_seen = other < self.num_gpus
        return ordinal == other or (self._has_peer_access and (is_seen or self._reaches_unseen))

    # --- the virtual-memory API

    def create(self, nbytes: int, ordinal: int) -> int:
        """A new allocation; its handle."""
        if nbytes <= 0 or nbytes % GRANULARITY or not 0 <= ordinal < self.num_gpus:
            raise Refused("INVALID_VALUE")
        with self.lock:
            return self._new_handle(self._allocate(nbytes, ordinal))

    def release(self, handle: int) -> None:
        with self.lock:
            self._let_go(self._handles.pop(handle, None))

    def export(self, handle: int) -> int:
        """A new descriptor of the allocation, which was made here."""
        with self.lock:
            allocation = self._handles.get(handle)
            if allocation is None or not allocation.is_ours:
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
            return self._new_handle(Allocation(os.dup(fd), nbytes, int(match[2]), is_ours=False))

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
            found.shadow = _shadow_of(allocation, nbytes)
            allocation.holds += 1
            found.mapped = allocation

    def unmap(self, address: int, nbytes: int) -> None:
        with self.lock:
            found = self._exactly(address, nbytes)
            if found.mapped is None or found.kind != "vmm":
                raise Refused("INVALID_VALUE")
            _libc.munmap(found.shadow, found.nbytes)
            self._let_go(found.mapped)
            found.mapped, found.shadow, found.access = None, 0, set()

    def set_access(self, address: int, nbytes: int, ordinals: list[int]) -> None:
        with self.lock:
            found = self._exactly(address, nbytes)
            if found.mapped is None:
                raise Refused("INVALID_VALUE")
            if not all(self.can_access(ordinal, found.mapped.ordinal) for ordinal in ordinals):
                raise Refused("INVALID_DEVICE")
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
            mapping.key, mapping.exporter = raw, (pid, started)
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

    # --- copies

    def check_copy(self, address: int, nbytes: int, ordinal: int) -> Range | None:
        """Refuse what a driver refuses: device memory beyond its mapping, or that this GPU may not use.

        The device memory that it is, None: host memory.
        """
        with self.lock:
            found = next((r for r in self._ranges.values() if r.start < address + nbytes and address < r.end), None)
            if found is not None:
                is_inside = found.start <= address and address + nbytes <= found.end
                if found.mapped is None or not is_inside or ordinal not in found.access:
                    raise Refused("INVALID_VALUE")
            return found

    def copy(self, target: tuple[int, Range | None], source: tuple[int, Range | None], nbytes: int) -> None:
        """Copy now, between addresses in device memory or (None) the host's; refused if that device memory has been
        unmapped since it was asked for.
        """
        with self.lock:
            ctypes.memmove(self._seen_at(*target), self._seen_at(*source), nbytes)

    def ranges(self) -> list[Range]:
        """All device addresses, as a kernel sees them now. Under the lock, which keeps them so."""
        for found in self._ranges.values():
            self._bury(found)
        return list(self._ranges.values())

    def look(self, address: int, nbytes: int) -> int:
        """For tests, which are no copy and wait for none: where this process can read and write these bytes."""
        with self.lock:
            found = self._range_with(address)
            if found is None or found.mapped is None or address + nbytes > found.end:
                raise Refused("INVALID_VALUE")
            return self._seen_at(address, found)

    # --- inner parts, under the lock

    def _allocate(self, nbytes: int, ordinal: int) -> Allocation:
        if nbytes > self.free(ordinal):
            raise Refused("OUT_OF_MEMORY")
        fd = os.memfd_create(f"pdx-fake-gpu-{self._host}-{ordinal}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, _JUNK, 0)
        self._used[ordinal] += nbytes
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
                self._used[allocation.ordinal] -= allocation.nbytes

    def _map_whole(self, allocation: Allocation, ordinal: int, *, kind: str) -> Range:
        address = self.reserve(allocation.nbytes)
        found = self._ranges[address]
        found.shadow = _shadow_of(allocation, allocation.nbytes)
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
            _libc.munmap(found.shadow, found.nbytes)
            self._let_go(found.mapped)

    def _seen_at(self, address: int, found: Range | None) -> int:
        """Where the fake GPU finds this address, which is in that device memory or the host's."""
        if found is None:
            return address
        if self._ranges.get(found.start) is not found or found.mapped is None:
            raise Refused("ILLEGAL_ADDRESS")
        self._bury(found)
        return found.shadow + address - found.start

    def _bury(self, found: Range) -> None:
        """Legacy memory of a process that is gone: what is mapped is anything, and what is written is nowhere."""
        if found.exporter is None or _lives(*found.exporter):
            return
        found.exporter = None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _mmap(found.shadow, found.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)
        ctypes.memset(found.shadow, _JUNK[0], found.nbytes)

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


def _shadow_of(allocation: Allocation, nbytes: int) -> int:
    return _mmap(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, allocation.fd)


def _lives(pid: int, started: int) -> bool:
    try:
        return _started(pid) == started
    except OSError:
        return False


def _held_bytes(name: str) -> int:
    """Of all memfds of that name which some process has open: each once."""
    found: dict[int, int] = {}
    for process in os.listdir("/proc"):
        if not process.isdigit():
            continue
        folder = f"/proc/{process}/fd"
        with contextlib.suppress(OSError):  # it is gone, or another user's
            for fd in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{fd}").partition(" ")[0] == name:
                        what = os.stat(f"{folder}/{fd}")
                        found[what.st_ino] = what.st_size
    return sum(found.values())
