"""Shared memory: between nodes of one user on one host. What is handed over is the memory's file, opened to be read."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import stat
import threading
from collections.abc import Callable
from typing import ClassVar

from pdx.errors import ChannelUnavailable, ProtocolError
from pdx.transports.channel import Availability, Memory, Piece, check_on_host
from pdx.transports.local import LocalListener, LocalRegion, Source, availability, hand_over

_MADV_POPULATE_READ = 22  # Linux 5.14: map all pages now instead of at the first touch
_POPULATE_BYTES = 32 << 20  # at a time; `close` waits for one of them
_MAX_BYTES = 1 << 48

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """Read-only memory at `address`. Whoever owns the file could cut it short under us, which ends this process; so it
    must be of our own user, who could end us anyway."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._closing = threading.Event()
        self._populating = threading.Thread(target=self._populate, name="pdx-populate", daemon=True)

    def __repr__(self) -> str:
        return f"<Mapping {self.nbytes >> 10} KiB>"

    @classmethod
    def open(cls, fd: int) -> Mapping:
        """Map the whole file. Its pages are brought in by a thread, so that no copy waits for them.

        :raises ChannelUnavailable: it is no file of ours, or cannot be mapped.
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

    def close(self) -> None:
        """Unmap it; nobody may read it any more. Once."""
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

    def _copy(self, source: Source, pieces: list[Piece]) -> None:
        assert isinstance(source, Mapping)
        for piece in pieces:
            ctypes.memmove(self._memory.address + piece.remote, source.address + piece.local, piece.nbytes)


class ShmRegion(LocalRegion):
    """Memory that maps a file."""

    scheme: ClassVar[str] = "shm"

    def __init__(self, memory: Memory, host: str, wake: Callable[[], None], fd: int) -> None:
        super().__init__(memory, host, wake)
        self._fd = fd

    @classmethod
    def availability(cls) -> Availability:
        """On Linux."""
        return availability()

    @classmethod
    def register(cls, memory: Memory, *, host: str = "127.0.0.1", wake: Callable[[], None] = lambda: None) -> ShmRegion:
        """See `Region.register`; `host` does not matter. Opens the memory's file, to be read by peers."""
        check_on_host(memory, cls.scheme)
        return cls(memory, host, wake, open_file(memory))

    def close(self) -> None:
        """See `Region.close`."""
        super().close()
        with self._lock, contextlib.suppress(OSError):
            os.close(self._fd)
            self._fd = -1

    def _listening(self) -> ShmListener:
        return ShmListener(self.scheme, self._memory, self._wake)

    def _hand_over(self, stream: socket.socket) -> None:
        hand_over(stream, b"", self._fd)


def open_file(memory: Memory) -> int:
    """A descriptor of the memory's file, to be read.

    :raises ChannelUnavailable: it has none, or not all of it.
    """
    if memory.path is None:
        raise ChannelUnavailable("anonymous memory cannot be handed to another process; it must map a file")
    try:
        fd = os.open(memory.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ChannelUnavailable(f"cannot open {memory.path}: {error}") from error
    if os.fstat(fd).st_size < memory.nbytes:
        os.close(fd)
        raise ChannelUnavailable(f"{memory.path} is smaller than {memory}")
    return fd
