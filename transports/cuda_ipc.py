"""CUDA IPC: between nodes of one user on one host, with the memory of at least one of them on a GPU.

The writer hands its memory over with its greeting: a descriptor of the driver's virtual-memory API, a legacy IPC
handle, or the file of a host region. The reader opens it, checks each write against its grants and copies from device
to device (over NVLink between two GPUs), or between device and host. The reader's own GPU copies; if its region is the
host's, the writer's does.

Memory under a descriptor lives as long as either side has it. Memory under a legacy handle ends with its process: a
copy does not count if the writer has begun to die by its end.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu, why_no_gpu
from pdx.cuda.memory import DeviceMemory, Handle
from pdx.cuda.page_lock import PageLock
from pdx.errors import ChannelBroken, ChannelUnavailable, GpuError, ProtocolError
from pdx.extras import install
from pdx.telemetry.host import process_stat
from pdx.transports.channel import Availability, GpuMemory, Memory, decoded
from pdx.transports.local import Address, LocalListener, LocalRegion, Source, hand_over
from pdx.transports.shm import Mapping

_FIX = f"{install('gpu')}, on a host with an NVIDIA GPU and its driver"
_HOST_TO_HOST = "neither side's memory is a GPU's; use shm"


# What a writer hands over. Without a handle, the descriptor beside it is a file in host memory.
_exported: msgspec.msgpack.Decoder[Handle | None] = msgspec.msgpack.Decoder(Handle | None)
_log = logging.getLogger(__name__)


class CudaSource(Source):
    """A GPU's memory, or a file of the host's. Owns the mapping and a copying stream."""

    def __init__(self, gpu: Gpu, block: DeviceMemory | Mapping, *, lock: PageLock | None = None, pid: int = 0) -> None:
        """`gpu` copies. `pid`: the process that the memory ends with, 0 if it outlives its writer."""
        self.address = block.address
        self.nbytes = block.nbytes
        self._gpu = gpu
        self._block = block
        self._lock = lock
        self._pid = pid
        self._stream: CopyStream | None = None

    def __repr__(self) -> str:
        return f"<CudaSource {self._block} copied by {self._gpu.uuid}>"

    @classmethod
    def open_device(cls, gpu: Gpu, handle: Handle, fd: int, pid: int) -> CudaSource:
        """Map memory of a GPU that the process `pid` has handed over, for copies by `gpu`. `fd` stays the caller's.

        :raises ProtocolError: there is no descriptor where there must be one.
        :raises ChannelUnavailable: it is gone, or cannot be opened here; the text says why.
        """
        is_mortal = handle.kind == "ipc"
        if not is_mortal and fd < 0:
            raise ProtocolError("a greeting without a descriptor of its memory")
        if is_mortal and pid == 0:
            raise ChannelUnavailable("the writer is in another process namespace, so its death would not be noticed")
        try:
            return cls(gpu, DeviceMemory.open(handle, fd, on=gpu), pid=pid if is_mortal else 0)
        except GpuError as error:
            raise ChannelUnavailable(str(error)) from error

    @classmethod
    def open_file(cls, gpu: Gpu, fd: int) -> CudaSource:
        """Map a file in host memory, and page-lock it in the background, for copies by `gpu`. `fd` stays the caller's.

        :raises ProtocolError: there is no descriptor.
        :raises ChannelUnavailable: it is no file of this user, or cannot be mapped.
        """
        if fd < 0:
            raise ProtocolError("a greeting without a file")
        mapping = Mapping.open(fd)
        return cls(gpu, mapping, lock=locked(mapping, gpu, is_read_only=True))

    def copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        try:
            if self._stream is None:
                self._stream = CopyStream(self._gpu)
            try:
                for each in copies:
                    self._stream.copy(*each)
            finally:
                self._stream.wait()
        except GpuError as error:
            self._give_up()
            raise ChannelBroken(f"cannot copy from {self!r}: {error}") from error
        if self._pid and ((stat := process_stat(self._pid)) is None or stat.is_exiting):
            raise ConnectionError("the writer died, and its memory with it")

    def close(self) -> None:
        """Unmap everything; no thread may copy any more. Errors of CUDA are logged."""
        self._give_up()
        if self._lock is not None:
            self._lock.close()
        self._block.close()

    def _give_up(self) -> None:
        """End the stream, which waits once more: copies that have begun must not land later."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def locked(block: Mapping | Memory, gpu: Gpu, *, is_read_only: bool = False) -> PageLock | None:
    """Page-lock host memory in the background. If that is refused, copies are slower, which is logged."""

    def refused(why: str) -> None:
        _log.warning("channel cuda_ipc copies slowly: %s", why)

    try:
        return PageLock(block.address, block.nbytes, gpu, anchor=block, on_refused=refused, is_read_only=is_read_only)
    except RuntimeError as error:  # no more threads can be had
        refused(str(error))
        return None


class CudaIpcListener(LocalListener):
    """Maps the writers' memory. Its own is page-locked, if it is the host's, as soon as a first GPU writes to it."""

    def __init__(self, region: CudaIpcRegion) -> None:
        self._locking = threading.Lock()  # guards all below
        self._own_lock: PageLock | None = None
        super().__init__(region)

    def close(self) -> None:
        super().close()
        with self._locking:
            lock, self._own_lock = self._own_lock, None
        if lock is not None:
            lock.close()

    def _open(self, packed: bytes, fd: int, pid: int) -> CudaSource:
        handle = decoded(_exported, packed, ProtocolError, "a handle of memory")
        uuid = self.memory.gpu or (handle.gpu if handle is not None else "")
        if not uuid:
            raise ChannelUnavailable(_HOST_TO_HOST)
        try:
            gpu = Gpu.find(uuid)
        except GpuError as error:
            raise ChannelUnavailable(str(error)) from error
        if handle is None:
            return CudaSource.open_file(gpu, fd)
        source = CudaSource.open_device(gpu, handle, fd, pid)
        if not self.memory.gpu:
            self._lock_own(gpu)
        return source

    def _lock_own(self, gpu: Gpu) -> None:
        with self._locking:
            if self._own_lock is None and not self._closing.is_set():
                self._own_lock = locked(self.memory, gpu)


class CudaIpcRegion(LocalRegion):
    """Memory of a GPU, or host memory that maps a file. Registering the latter makes no CUDA context."""

    scheme: ClassVar[str] = "cuda_ipc"
    streams: ClassVar[int] = 1  # a GPU's engine copies as fast behind one, and memory is mapped and page-locked once
    takes_gpus: ClassVar[bool] = True

    def __init__(self, memory: Memory, host: str, wake: threading.Event) -> None:
        super().__init__(memory, host, wake)
        if memory.address % mmap.PAGESIZE:
            raise ChannelUnavailable(f"{memory} begins at {memory.address:#x}, not at a page")
        if not memory.gpu:
            self._open_file()

    @classmethod
    def availability(cls) -> Availability:
        """Whether a driver finds a GPU. Makes no CUDA context."""
        found = super().availability()
        if found.is_ok and (why := why_no_gpu()):
            return Availability(is_ok=False, why=why, fix=_FIX)
        return found

    def _listening(self) -> CudaIpcListener:
        return CudaIpcListener(self)

    def _check(self, address: Address) -> None:
        if not (address.gpu or self.memory.gpu):
            raise ChannelUnavailable(_HOST_TO_HOST)

    def _hand_over(self, stream: socket.socket) -> None:
        handle, fd = None, self.fd
        if isinstance(self.memory, GpuMemory):
            try:
                handle, fd = self.memory.export()
            except GpuError as error:
                raise ChannelUnavailable(f"cannot hand {self.memory} over: {error}") from error
        try:
            hand_over(stream, msgspec.msgpack.encode(handle), fd)
        finally:
            if handle is not None and fd >= 0:
                os.close(fd)
