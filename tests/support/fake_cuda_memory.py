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
from typing import Any

from fake_cuda_calls import DeviceCalls, Refused

from pdx.telemetry.host import process_stat

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
    """What this process has of device memory: names and arguments of calls are the bindings'. Any thread may call.

    One lock guards all of it, and is held while bytes are copied: nothing is unmapped under a copy.
    """

    def __init__(self, devices: DeviceCalls) -> None:
        self.lock = threading.RLock()
        self._devices = devices
        self._bindings = devices.bindings
        self._used = [0] * devices.num_gpus  # by what this process made
        self._host = os.environ.setdefault(_HOST_VARIABLE, f"p{os.getpid()}")
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
        return self._devices.total - _held_bytes(f"/memfd:pdx-fake-gpu-{self._host}-{ordinal}")

    def close(self) -> None:
        """Give back what the process did not. Nothing may use it any more."""
        with self.lock:
            for found in list(self._ranges.values()):
                self._drop_range(found)
            for handle in list(self._handles):
                self.cuMemRelease(handle)

    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.free(self._devices.here()), self._devices.total

    # --- the virtual-memory API

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> int:
        self._check_properties(properties)
        return GRANULARITY

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> Any:
        self._check_properties(properties)
        if properties.allocFlags.gpuDirectRDMACapable and not self._devices.has["rdma_memory"]:
            raise Refused("NOT_SUPPORTED")
        if nbytes <= 0 or nbytes % GRANULARITY or not 0 <= properties.location.id < self._devices.num_gpus:
            raise Refused("INVALID_VALUE")
        with self.lock:
            return self._new_handle(self._allocate(nbytes, properties.location.id))

    def cuMemRelease(self, handle: Any) -> None:
        with self.lock:
            self._let_go(self._handles.pop(int(handle), None))

    def cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> int:
        """A new descriptor of the allocation, which was made here."""
        self._check_kind(kind)
        with self.lock:
            allocation = self._handles.get(int(handle))
            if allocation is None or not allocation.is_ours:
                raise Refused("INVALID_VALUE")
            fd = os.dup(allocation.fd)
            os.set_inheritable(fd, True)  # as one that a C library made
            return fd

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> Any:
        """A handle of the allocation behind a descriptor; the descriptor stays the caller's."""
        self._check_kind(kind)
        try:
            match = _MEMFD.match(os.readlink(f"/proc/self/fd/{fd}"))
            nbytes = os.fstat(fd).st_size
        except OSError:
            raise Refused("INVALID_VALUE") from None
        if match is None:
            raise Refused("INVALID_VALUE")
        with self.lock:
            return self._new_handle(Allocation(os.dup(fd), nbytes, int(match[2]), is_ours=False))

    def cuMemAddressReserve(self, nbytes: int, alignment: int, hint: Any, flags: int) -> Any:
        return self._bindings.CUdeviceptr(self._reserve(nbytes))

    def cuMemAddressFree(self, address: Any, nbytes: int) -> None:
        with self.lock:
            found = self._exactly(address, nbytes)
            if found.mapped is not None:
                raise Refused("INVALID_VALUE")
            self._drop_range(found)

    def cuMemMap(self, address: Any, nbytes: int, offset: int, handle: Any, flags: int) -> None:
        with self.lock:
            found, allocation = self._exactly(address, nbytes), self._handles.get(int(handle))
            is_right = allocation is not None and found.mapped is None and offset == 0
            if allocation is None or not is_right or nbytes > allocation.nbytes:
                raise Refused("INVALID_VALUE")
            found.shadow = _shadow_of(allocation, nbytes)
            allocation.holds += 1
            found.mapped = allocation

    def cuMemUnmap(self, address: Any, nbytes: int) -> None:
        with self.lock:
            found = self._exactly(address, nbytes)
            if found.mapped is None or found.kind != "vmm":
                raise Refused("INVALID_VALUE")
            _libc.munmap(found.shadow, found.nbytes)
            self._let_go(found.mapped)
            found.mapped, found.shadow, found.access = None, 0, set()

    def cuMemSetAccess(self, address: Any, nbytes: int, access: list[Any], count: int) -> None:
        ordinals = {entry.location.id for entry in access[:count]}
        with self.lock:
            found = self._exactly(address, nbytes)
            if found.mapped is None:
                raise Refused("INVALID_VALUE")
            if not all(self._devices.can_access(ordinal, found.mapped.ordinal) for ordinal in ordinals):
                raise Refused("INVALID_DEVICE")
            found.access |= ordinals

    def _check_properties(self, properties: Any) -> None:
        is_right = (
            properties.type == self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            and properties.location.type == self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        )
        if not is_right:
            raise Refused("INVALID_VALUE")
        self._check_kind(properties.requestedHandleTypes)

    def _check_kind(self, kind: Any) -> None:
        if kind != self._bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
            raise Refused("INVALID_VALUE")
        if not self._devices.has["vmm"]:
            raise Refused("NOT_SUPPORTED")

    # --- cuMemAlloc and legacy IPC

    def cuMemAlloc(self, nbytes: int) -> Any:
        """New memory, mapped."""
        ordinal = self._devices.here()
        if nbytes <= 0:
            raise Refused("INVALID_VALUE")
        size = -(-nbytes // GRANULARITY) * GRANULARITY
        with self.lock:
            allocation = self._allocate(size, ordinal)
            return self._bindings.CUdeviceptr(self._map_whole(allocation, ordinal, kind="alloc").start)

    def cuMemFree(self, address: Any) -> None:
        self._drop_of_kind(address, "alloc")

    def cuIpcGetMemHandle(self, address: Any) -> Any:
        """The 64 bytes by which another process finds it."""
        self._devices.here()
        with self.lock:
            found = self._ranges.get(int(address))
            if found is None or found.kind != "alloc" or found.mapped is None:
                raise Refused("INVALID_VALUE")
            pid, memory = os.getpid(), found.mapped
            raw = _IPC.pack(_IPC_MARK, pid, memory.fd, _started(pid), memory.nbytes, memory.ordinal)
        handle = self._bindings.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), raw, 64)
        return handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        """Map what a living process has; once for all opens of the same handle."""
        raw, ordinal = ctypes.string_at(handle.getPtr(), 64), self._devices.here()
        mark, pid, fd, started, nbytes, owner = _IPC.unpack(raw)
        if mark != _IPC_MARK:
            raise Refused("INVALID_VALUE")
        if pid == os.getpid():
            raise Refused("INVALID_CONTEXT")
        if not self._devices.can_access(ordinal, owner):
            raise Refused("PEER_ACCESS_UNSUPPORTED")
        with self.lock:
            found = next((each for each in self._ranges.values() if each.kind == "ipc" and each.key == raw), None)
            if found is not None:
                found.opens += 1
                return self._bindings.CUdeviceptr(found.start)
            if _started(pid) != started:
                raise Refused("INVALID_HANDLE")
            try:
                ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                raise Refused("INVALID_HANDLE") from None
            found = self._map_whole(Allocation(ours, nbytes, owner, is_ours=False), ordinal, kind="ipc")
            found.key, found.exporter = raw, (pid, started)
            return self._bindings.CUdeviceptr(found.start)

    def cuIpcCloseMemHandle(self, address: Any) -> None:
        self._drop_of_kind(address, "ipc")

    def cuMemGetAddressRange(self, address: Any) -> tuple[Any, int]:
        """Start and size of the memory that has this address."""
        self._devices.here()
        with self.lock:
            found = self._range_with(int(address))
            if found is None or found.mapped is None:
                raise Refused("INVALID_VALUE")
            return self._bindings.CUdeviceptr(found.start), found.nbytes

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

    def _reserve(self, nbytes: int) -> int:
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

    def _new_handle(self, allocation: Allocation) -> Any:
        self._next_handle += 1
        self._handles[self._next_handle] = allocation
        return self._bindings.CUmemGenericAllocationHandle(self._next_handle)

    def _let_go(self, allocation: Allocation | None) -> None:
        if allocation is None:
            raise Refused("INVALID_VALUE")
        allocation.holds -= 1
        if not allocation.holds:
            os.close(allocation.fd)
            if allocation.is_ours:
                self._used[allocation.ordinal] -= allocation.nbytes

    def _map_whole(self, allocation: Allocation, ordinal: int, *, kind: str) -> Range:
        address = self._reserve(allocation.nbytes)
        found = self._ranges[address]
        found.shadow = _shadow_of(allocation, allocation.nbytes)
        found.mapped, found.kind, found.access = allocation, kind, {ordinal, allocation.ordinal}
        return found

    def _drop_of_kind(self, address: Any, kind: str) -> None:
        self._devices.here()
        with self.lock:
            found = self._ranges.get(int(address))
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
        if found.exporter is None or _started(found.exporter[0]) == found.exporter[1]:
            return
        found.exporter = None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _mmap(found.shadow, found.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)
        ctypes.memset(found.shadow, _JUNK[0], found.nbytes)

    def _exactly(self, address: Any, nbytes: int) -> Range:
        found = self._ranges.get(int(address))
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
    """When the process started, in the kernel's ticks; -1: it is gone."""
    stat = process_stat(pid)
    return -1 if stat is None or stat.state in "ZX" else stat.started


def _shadow_of(allocation: Allocation, nbytes: int) -> int:
    return _mmap(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, allocation.fd)


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
