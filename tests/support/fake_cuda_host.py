"""Host memory of the fake CUDA driver: what this process has mapped, and what of it is page-locked."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any, NamedTuple

from fake_cuda_calls import DeviceCalls, Refused


class Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    is_readable: bool
    is_writable: bool
    is_shared: bool


class HostMemory:
    """Registrations of host memory: names and arguments of calls are the bindings'. Any thread may call.

    `lock_limit`: bytes that may be page-locked; -1: any number.
    """

    def __init__(self, devices: DeviceCalls, lock_limit: int) -> None:
        self._devices = devices
        self._bindings = devices.bindings
        self.lock = threading.RLock()
        self._lock_limit = lock_limit
        self._registered: dict[int, tuple[int, bool]] = {}  # address -> bytes, whether kernels reach it

    def count(self) -> int:
        with self.lock:
            return len(self._registered)

    def forget(self, *addresses: int) -> None:
        """What is registered there is so no more; all, if none is named."""
        with self.lock:
            for address in addresses or list(self._registered):
                if self._registered.pop(address, None) is None:
                    raise Refused("HOST_MEMORY_NOT_REGISTERED")

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Whole pages that this process has mapped, and nothing of which is registered."""
        self._devices.here()
        is_read_only = bool(flags & int(self._bindings.CU_MEMHOSTREGISTER_READ_ONLY))
        is_for_kernels = bool(flags & int(self._bindings.CU_MEMHOSTREGISTER_DEVICEMAP))
        if nbytes <= 0 or address % mmap.PAGESIZE or nbytes % mmap.PAGESIZE:
            raise Refused("INVALID_VALUE")
        if not _is_mapped(address, nbytes, needs_write=not is_read_only):
            raise Refused("INVALID_VALUE")
        with self.lock:
            if any(start < address + nbytes and address < start + size for start, size in self.spans()):
                raise Refused("HOST_MEMORY_ALREADY_REGISTERED")
            if 0 <= self._lock_limit < nbytes + sum(size for _, size in self.spans()):
                raise Refused("OUT_OF_MEMORY")
            self._registered[address] = nbytes, is_for_kernels

    def cuMemHostUnregister(self, address: int) -> None:
        self._devices.here()
        self.forget(address)

    def cuPointerGetAttribute(self, attribute: Any, address: Any) -> Any:
        """What is asked of page-locked host memory; the fake knows no other."""
        self._devices.here()
        known, found = self._bindings.CUpointer_attribute, self.at(int(address))
        if found is None:
            raise Refused("INVALID_VALUE")
        start, nbytes, is_for_kernels = found
        if attribute == known.CU_POINTER_ATTRIBUTE_DEVICE_POINTER and is_for_kernels:
            return self._bindings.CUdeviceptr(int(address))
        if attribute == known.CU_POINTER_ATTRIBUTE_MAPPED:
            return True
        if attribute == known.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            return self._bindings.CUdeviceptr(start)
        if attribute == known.CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            return nbytes
        raise Refused("INVALID_VALUE")

    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of every registration."""
        return [(start, size) for start, (size, _) in self._registered.items()]

    def at(self, address: int) -> tuple[int, int, bool] | None:
        """The registration that has this address: its start, its bytes, whether kernels reach it."""
        with self.lock:
            for start, (size, is_for_kernels) in self._registered.items():
                if start <= address < start + size:
                    return start, size, is_for_kernels
        return None

    def is_registered(self, address: int, nbytes: int) -> bool:
        """Whether registered pieces cover all of it."""
        with self.lock:
            for start, size in sorted(self.spans()):
                if start <= address < start + size:
                    step = min(nbytes, start + size - address)
                    address, nbytes = address + step, nbytes - step
            return nbytes == 0

    def check_copy(self, address: int, nbytes: int) -> None:
        """Refuse a copy that touches a registration, but is not within it."""
        with self.lock:
            for start, size in self.spans():
                touches = start < address + nbytes and address < start + size
                if touches and not (start <= address and address + nbytes <= start + size):
                    raise Refused("INVALID_VALUE")


def mappings() -> list[Mapping]:
    """What this process has mapped, by address."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split(maxsplit=2)
        start, end = (int(part, 16) for part in span.split("-"))
        found.append(Mapping(start, end, permissions[0] == "r", permissions[1] == "w", permissions[3] == "s"))
    return found


def _is_mapped(address: int, nbytes: int, *, needs_write: bool) -> bool:
    """Whether this process has all of it mapped, writable if needed."""
    end = address + nbytes
    for mapping in mappings():
        if mapping.start <= address < mapping.end:
            if not mapping.is_readable or (needs_write and not mapping.is_writable):
                return False
            address = mapping.end
        if address >= end:
            return True
    return False
