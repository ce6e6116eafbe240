"""Host memory of the fake CUDA driver: what this process has mapped, and what of it is page-locked."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import NamedTuple

from pdx.testing.fake_cuda_memory import Refused


class Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    is_readable: bool
    is_writable: bool
    is_shared: bool


class HostMemory:
    """Registrations of host memory. Any thread may call.

    `lock_limit`: bytes that may be page-locked; -1: any number.
    """

    def __init__(self, lock_limit: int) -> None:
        self.lock = threading.RLock()
        self._lock_limit = lock_limit
        self._registered: dict[int, tuple[int, bool]] = {}  # address -> bytes, whether kernels reach it

    def count(self) -> int:
        with self.lock:
            return len(self._registered)

    def forget(self) -> None:
        with self.lock:
            self._registered.clear()

    def register(self, address: int, nbytes: int, *, is_read_only: bool, is_for_kernels: bool = True) -> None:
        """Whole pages that this process has mapped, and nothing of which is registered."""
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

    def unregister(self, address: int) -> None:
        with self.lock:
            if self._registered.pop(address, None) is None:
                raise Refused("HOST_MEMORY_NOT_REGISTERED")

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
