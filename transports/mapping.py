"""A file of another process, mapped to be read. Through the C library, because copies need its address."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import threading

from pdx.errors import ChannelUnavailable

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
