"""The memory between which `pdx.cli.loopback` tries a channel: a mapped file, or a block of the first GPU."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from pathlib import Path
from typing import Protocol

from pdx.transports.channel import GpuMemory, Memory
from pdx.transports.registry import FOR_GPUS


class Block(Protocol):
    """Memory of one side; its owner closes it behind the region."""

    memory: Memory

    def write(self, data: bytes) -> None:
        """Fill all of it."""

    def digest(self) -> str:
        """Of all of it."""

    def close(self) -> None:
        """Give it back."""


class HostBlock:
    """A new file, mapped; somebody removes its folder."""

    def __init__(self, path: Path, nbytes: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            self.memory: Memory = Memory(memoryview(mmap.mmap(fd, nbytes)), path)
        finally:
            os.close(fd)

    def write(self, data: bytes) -> None:
        """See `Block.write`."""
        self.memory.view[:] = data

    def digest(self) -> str:
        """See `Block.digest`."""
        return hashlib.blake2b(self.memory.view).hexdigest()

    def close(self) -> None:
        """The mapping goes with its last view."""


class GpuBlock:
    """Memory of the first GPU, staged through the host to be written and looked at."""

    def __init__(self, nbytes: int) -> None:
        """:raises GpuError: it cannot be had."""
        from pdx.cuda.gpu import Gpu
        from pdx.cuda.memory import DeviceMemory

        self._gpu = Gpu.find("0")
        self._device = DeviceMemory.create(self._gpu, nbytes)
        self.memory: Memory = GpuMemory(self._device, nbytes)

    def write(self, data: bytes) -> None:
        """See `Block.write`."""
        staged = (ctypes.c_char * len(data)).from_buffer_copy(data)
        self._copy(self.memory.address, ctypes.addressof(staged))

    def digest(self) -> str:
        """See `Block.digest`."""
        staged = (ctypes.c_char * self.memory.nbytes)()
        self._copy(ctypes.addressof(staged), self.memory.address)
        return hashlib.blake2b(staged).hexdigest()

    def close(self) -> None:
        """See `Block.close`."""
        self._device.close()

    def _copy(self, target: int, source: int) -> None:
        from pdx.cuda.copies import CopyStream

        with CopyStream(self._gpu) as stream:
            stream.copy(target, source, self.memory.nbytes)
            stream.wait()


def block(scheme: str, path: Path, nbytes: int) -> Block:
    """What this channel is for; `path` names a new file where it is host memory.

    :raises GpuError: it is a GPU's, and cannot be had.
    """
    return GpuBlock(nbytes) if scheme == FOR_GPUS else HostBlock(path, nbytes)
