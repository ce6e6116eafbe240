"""The memory that a test's regions lie in: a file of the host's, or a block of a GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory
from pdx.transports.channel import GpuMemory, Memory


class DeviceView:
    """Bytes of a GPU's memory, copied out and in whenever they are asked for. Any thread may use it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, gpu: Gpu, address: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._gpu = gpu
        self._address = address

    def __getitem__(self, span: slice) -> bytes:
        start, stop = self._span(span)
        found = ctypes.create_string_buffer(max(stop - start, 1))
        self._copy(ctypes.addressof(found), self._address + start, stop - start)
        return ctypes.string_at(found, stop - start)

    def __setitem__(self, span: slice, data: bytes | memoryview) -> None:
        start, stop = self._span(span)
        source = (ctypes.c_char * max(len(data), 1)).from_buffer_copy(data or b"\0")
        if len(data) != stop - start:
            raise ValueError(f"{len(data)} bytes for a span of {stop - start}")
        self._copy(self._address + start, ctypes.addressof(source), stop - start)

    def __bytes__(self) -> bytes:
        return self[:]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bytes | memoryview | DeviceView) and bytes(self) == bytes(other)

    def _span(self, span: slice) -> tuple[int, int]:
        start, stop, step = span.indices(self.nbytes)
        assert step == 1
        return start, max(start, stop)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        with CopyStream(self._gpu) as stream:
            stream.copy(target, source, nbytes)
            stream.wait()


View: TypeAlias = memoryview | DeviceView  # what a test sees of it


class SideMemory(ABC):
    """Memory of one side, of a kind of its own; contents are undefined. Its owner closes it, after all regions."""

    memory: Memory
    view: View
    path: Path | None = None  # where other processes can read it

    def __init__(self, nbytes: int) -> None:
        self.acquire(nbytes)

    @abstractmethod
    def acquire(self, nbytes: int) -> None:
        """Take that much; sets the attributes."""

    @abstractmethod
    def close(self) -> None:
        """Give it back. Idempotent."""


class HostFile(SideMemory):
    """A file in /dev/shm, mapped."""

    path: Path

    def acquire(self, nbytes: int) -> None:
        """See `SideMemory.acquire`."""
        self.path = Path("/dev/shm") / f"pdx-side-{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            view = memoryview(mmap.mmap(fd, nbytes))
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(fd)
        self.view = view
        self.memory = Memory(view, self.path)

    def close(self) -> None:
        """Remove the file; the mapping goes with its last view."""
        self.path.unlink(missing_ok=True)


class GpuBlock(SideMemory):
    """Memory of a GPU, handed over as a descriptor."""

    kind: ClassVar[Literal["vmm", "ipc"]] = "vmm"
    which: ClassVar[str] = "0"  # the GPU

    def acquire(self, nbytes: int) -> None:
        """See `SideMemory.acquire`."""
        gpu = Gpu.find(self.which)
        self._device = DeviceMemory.create(gpu, nbytes, self.kind)
        self.memory = GpuMemory(self._device, nbytes)
        self.view = DeviceView(gpu, self._device.address, nbytes)

    def close(self) -> None:
        """See `SideMemory.close`."""
        self._device.close()


class LegacyGpuBlock(GpuBlock):
    """Memory of a GPU, handed over as a legacy IPC handle."""

    kind = "ipc"


class SecondGpuBlock(GpuBlock):
    """Of another GPU."""

    which = "1"
