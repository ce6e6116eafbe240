"""A writer's memory as the reader of a `cuda_ipc` channel has opened it: a GPU's, or a file of the host's."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from typing import NamedTuple

from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory, Handle
from pdx.cuda.page_lock import PageLock
from pdx.errors import ChannelBroken, ChannelUnavailable, GpuError, ProtocolError
from pdx.transports.channel import Memory
from pdx.transports.local_socket import has_begun_to_exit
from pdx.transports.mapping import Mapping

_log = logging.getLogger(__name__)


class Copy(NamedTuple):
    """`nbytes` bytes from the address `source` to the address `target`."""

    target: int
    source: int
    nbytes: int


class CudaSource:
    """Owns the mapping and a copying stream for each connection. A connection's thread copies; the last one closes."""

    def __init__(self, gpu: Gpu, block: DeviceMemory | Mapping, *, lock: PageLock | None = None, pid: int = 0) -> None:
        """`gpu` copies. `pid`: the process with which the memory goes, 0 if it outlives its writer."""
        self.address = block.address
        self.nbytes = block.nbytes
        self._gpu = gpu
        self._block = block
        self._lock = lock
        self._pid = pid
        self._streams: dict[socket.socket, CopyStream] = {}  # each thread has one entry of its own

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
        :raises ChannelUnavailable: it is no file of ours, or cannot be mapped.
        """
        if fd < 0:
            raise ProtocolError("a greeting without a file")
        mapping = Mapping.open(fd)
        return cls(gpu, mapping, lock=locked(mapping, gpu, is_read_only=True))

    def copy(self, connection: socket.socket, copies: Iterable[Copy]) -> None:
        """Make these copies, all together; none runs on when this has returned or raised.

        :raises ConnectionError: the process with which the memory goes is on its way: bytes may have been others.
        :raises ChannelBroken: CUDA cannot.
        """
        try:
            stream = self._stream(connection)
            try:
                for each in copies:
                    stream.copy(each.target, each.source, each.nbytes)
            finally:
                stream.wait()
        except GpuError as error:
            self._give_up(connection)
            raise ChannelBroken(f"cannot copy from {self!r}: {error}") from error
        if self._pid and has_begun_to_exit(self._pid):
            raise ConnectionError("the writer died, and its memory with it")

    def close(self) -> None:
        """Unmap everything; no thread copies any more. What CUDA does not give back it has logged."""
        while self._streams:
            self._streams.popitem()[1].close()
        if self._lock is not None:
            self._lock.close()
        self._block.close()

    def _give_up(self, connection: socket.socket) -> None:
        """End its stream, which waits once more: what did begin must not land when nobody expects it any more."""
        stream = self._streams.pop(connection, None)
        if stream is not None:
            stream.close()

    def _stream(self, connection: socket.socket) -> CopyStream:
        stream = self._streams.get(connection)
        if stream is None:
            stream = self._streams[connection] = CopyStream(self._gpu)
        return stream


def locked(block: Mapping | Memory, gpu: Gpu, *, is_read_only: bool = False) -> PageLock | None:
    """Page-lock host memory in the background. Where that is refused, copies are slower, which is logged."""

    def refused(why: str) -> None:
        _log.warning("channel cuda_ipc copies slowly: %s", why)

    try:
        return PageLock(block.address, block.nbytes, gpu, anchor=block, on_refused=refused, is_read_only=is_read_only)
    except RuntimeError as error:  # no more threads can be had
        refused(str(error))
        return None
