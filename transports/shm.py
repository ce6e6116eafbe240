"""Shared memory: between nodes of one user on one host. The writer hands over its memory's file, opened read-only."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import stat
import threading
from collections.abc import Iterable
from typing import ClassVar

from pdx.errors import ChannelUnavailable, ProtocolError
from pdx.transports.channel import Memory
from pdx.transports.local import LocalListener, LocalRegion, Source, hand_over

_MADV_POPULATE_READ = 22  # Linux 5.14: map all pages now instead of at the first touch
_POPULATE_BYTES = 32 << 20  # at a time; `close` waits for one of them
_MAX_BYTES = 1 << 48

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping(Source):
    """Read-only memory at `address`. The file's owner could truncate it, which ends this process; so the owner must be
    this process's own user, who could end it anyway."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._closing = threading.Event()
        self._populating = threading.Thread(target=self._populate, name="pdx-populate", daemon=True)

    def __repr__(self) -> str:
        return f"<Mapping {self.nbytes >> 10} KiB>"

    @classmethod
    def open(cls, fd: int) -> Mapping:
        """Map the whole file. A thread faults in its pages, so that no copy waits for them.

        :raises ChannelUnavailable: it is no file of this user, or cannot be mapped.
        """
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not 0 < found.st_size <= _MAX_BYTES:
            raise ChannelUnavailable(f"a region must be a file of this user, not {found}")
        address = _libc.mmap(None, found.st_size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise ChannelUnavailable(f"cannot map a region: {os.strerror(ctypes.get_errno())}")
        mapping = cls(address, found.st_size)
        mapping._populating.start()
        return mapping

    def copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        for each in copies:
            ctypes.memmove(*each)

    def close(self) -> None:
        """Unmap it; nothing may read it any more. Call once."""
        self._closing.set()
        self._populating.join()
        _libc.munmap(self.address, self.nbytes)

    def _populate(self) -> None:
        for start in range(0, self.nbytes, _POPULATE_BYTES):
            nbytes = min(_POPULATE_BYTES, self.nbytes - start)
            if self._closing.is_set() or _libc.madvise(self.address + start, nbytes, _MADV_POPULATE_READ):
                return


class ShmListener(LocalListener):
    """Maps the writers' files. The copying releases the GIL."""

    def _open(self, packed: bytes, fd: int, pid: int) -> Mapping:
        if packed or fd < 0:
            raise ProtocolError("a greeting without a file")
        return Mapping.open(fd)


class ShmRegion(LocalRegion):
    """Memory that maps a file."""

    scheme: ClassVar[str] = "shm"

    def __init__(self, memory: Memory, host: str, wake: threading.Event) -> None:
        super().__init__(memory, host, wake)
        self._open_file()

    def _listening(self) -> ShmListener:
        return ShmListener(self)

    def _hand_over(self, stream: socket.socket) -> None:
        hand_over(stream, b"", self.fd)
