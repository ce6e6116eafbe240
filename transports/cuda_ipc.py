"""CUDA IPC: between nodes of one user on one host, with the memory of at least one of them on a GPU.

The writer hands its memory over with its greeting: a descriptor of the driver's virtual-memory API, a legacy IPC
handle, or the file of a host region. The reader opens it, checks each write against its grants and copies from device
to device (over NVLink between two GPUs), or between device and host. The reader's own GPU copies; if its region is the
host's, the writer's does.

Memory under a descriptor lives as long as either side has it. That under a legacy handle goes with its process: a copy
behind which the writer has begun to die does not count.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import msgspec

from pdx.cuda.gpu import Gpu, why_no_gpu
from pdx.cuda.memory import Handle
from pdx.cuda.page_lock import PageLock
from pdx.errors import ChannelUnavailable, GpuError, ProtocolError
from pdx.transports import local_socket
from pdx.transports.channel import Availability, GpuMemory, Memory, Piece
from pdx.transports.cuda_source import Copy, CudaSource, locked
from pdx.transports.local_region import LocalListener, LocalRegion, Source
from pdx.transports.local_socket import Address
from pdx.transports.shm import open_file

_FIX = "pip install 'pdx-transport[gpu]', on a host with an NVIDIA GPU and its driver"
_HOST_TO_HOST = "neither side's memory is a GPU's; use shm"


class Luggage(msgspec.Struct, array_like=True, frozen=True):
    """What a writer hands over. Without a handle, the descriptor beside it is a file in host memory."""

    handle: Handle | None


_luggage = msgspec.msgpack.Decoder(Luggage)


class CudaIpcListener(LocalListener):
    """Maps the writers' memory. Its own is page-locked, if it is the host's, as soon as a first GPU writes to it."""

    def __init__(self, memory: Memory, wake: Callable[[], None]) -> None:
        super().__init__(CudaIpcRegion.scheme, memory, wake)
        self._locking = threading.Lock()  # guards all below
        self._own_lock: PageLock | None = None

    def close(self) -> None:
        """See `Listener.close`."""
        super().close()
        with self._locking:
            lock, self._own_lock = self._own_lock, None
        if lock is not None:
            lock.close()

    def _open(self, packed: bytes, fd: int, pid: int) -> CudaSource:
        try:
            handle = _luggage.decode(packed).handle
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a handle of memory: {error}") from error
        uuid = self._memory.gpu or (handle.gpu if handle is not None else "")
        if not uuid:
            raise ChannelUnavailable(_HOST_TO_HOST)
        try:
            gpu = Gpu.find(uuid)
        except GpuError as error:
            raise ChannelUnavailable(str(error)) from error
        if handle is None:
            return CudaSource.open_file(gpu, fd)
        source = CudaSource.open_device(gpu, handle, fd, pid)
        if not self._memory.gpu:
            self._lock_own(gpu)
        return source

    def _copy(self, stream: socket.socket, source: Source, pieces: list[Piece]) -> None:
        assert isinstance(source, CudaSource)
        source.copy(stream, self._copies(source, pieces))

    def _copies(self, source: CudaSource, pieces: list[Piece]) -> Iterator[Copy]:
        for piece in pieces:
            yield Copy(self._memory.address + piece.remote, source.address + piece.local, piece.nbytes)

    def _lock_own(self, gpu: Gpu) -> None:
        with self._locking:
            if self._own_lock is None and not self._closing.is_set():
                self._own_lock = locked(self._memory, gpu)


class CudaIpcRegion(LocalRegion):
    """Memory of a GPU, or host memory that maps a file. Registering the latter makes no CUDA context."""

    scheme: ClassVar[str] = "cuda_ipc"

    def __init__(self, memory: Memory, host: str, wake: Callable[[], None], fd: int) -> None:
        super().__init__(memory, host, wake)
        self._fd = fd  # of host memory's file, else -1

    @classmethod
    def availability(cls) -> Availability:
        """Where a driver finds a GPU. Makes no CUDA context."""
        found = local_socket.availability()
        if found.is_ok and (why := why_no_gpu()):
            return Availability(is_ok=False, why=why, fix=_FIX)
        return found

    @classmethod
    def register(
        cls, memory: Memory, *, host: str = "127.0.0.1", wake: Callable[[], None] = lambda: None
    ) -> CudaIpcRegion:
        """See `Region.register`; `host` does not matter."""
        found = cls.availability()
        if not found.is_ok:
            raise ChannelUnavailable(f"{found.why}; {found.fix}")
        if memory.address % mmap.PAGESIZE:
            raise ChannelUnavailable(f"{memory} begins at {memory.address:#x}, not at a page")
        return cls(memory, host, wake, -1 if memory.gpu else open_file(memory))

    def close(self) -> None:
        """See `Region.close`."""
        super().close()
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _listening(self) -> CudaIpcListener:
        return CudaIpcListener(self._memory, self._wake)

    def _check(self, address: Address) -> None:
        if not (address.gpu or self._memory.gpu):
            raise ChannelUnavailable(_HOST_TO_HOST)

    def _hand_over(self, stream: socket.socket) -> None:
        if not isinstance(self._memory, GpuMemory):
            local_socket.hand_over(stream, msgspec.msgpack.encode(Luggage(None)), self._fd)
            return
        try:
            handle, fd = self._memory.export()
        except GpuError as error:
            raise ChannelUnavailable(f"cannot hand {self._memory} over: {error}") from error
        try:
            local_socket.hand_over(stream, msgspec.msgpack.encode(Luggage(handle)), fd)
        finally:
            if fd >= 0:
                os.close(fd)
