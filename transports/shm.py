"""Shared memory: between nodes of one user on one host. What is handed over is the memory's file, opened to be read."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from typing import ClassVar

from pdx.errors import ChannelUnavailable, ProtocolError
from pdx.transports import local_socket
from pdx.transports.channel import Availability, Memory, Piece, check_on_host
from pdx.transports.local_region import LocalListener, LocalRegion, Source
from pdx.transports.mapping import Mapping


class ShmListener(LocalListener):
    """Maps the writers' files. The copying releases the GIL."""

    def _open(self, packed: bytes, fd: int, pid: int) -> Mapping:
        if packed or fd < 0:
            raise ProtocolError("a greeting without a file")
        return Mapping.open(fd)

    def _copy(self, stream: socket.socket, source: Source, pieces: list[Piece]) -> None:
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
        return local_socket.availability()

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
        local_socket.hand_over(stream, b"", self._fd)


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
