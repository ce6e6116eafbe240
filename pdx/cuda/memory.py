"""A block of one GPU's memory that other processes can map: by a file descriptor of the driver, or a legacy IPC handle.

Descriptors ("vmm"): the memory lives as long as any process has one open or mapped, so it outlives the process that
made it. Legacy handles ("ipc"): the memory ends with the process that made it, and mappings of it become invalid.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdx.closing import Closing
from pdx.cuda import driver
from pdx.cuda.driver import api, call
from pdx.cuda.gpu import Gpu
from pdx.errors import GpuError, GpuHandleDead, GpuMemoryFull, GpuUnavailable
from pdx.telemetry.host import process_stat

MAX_NBYTES = 1 << 44
_IPC_HANDLE_BYTES = 64
_IPC_GRANULARITY = 2 << 20  # an IPC handle shares the driver's whole block, so nothing else may lie in it
_log = logging.getLogger(__name__)
_mapped: set[DeviceMemory] = set()
_mapped_lock = threading.Lock()

Kind = Literal["vmm", "ipc"]


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """What another process needs to map the memory; for kind "vmm", a file descriptor comes with it."""

    kind: Kind
    gpu: Annotated[str, Meta(pattern=r"^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")]
    nbytes: Annotated[int, Meta(ge=1, le=MAX_NBYTES)]
    driver: Annotated[int, Meta(ge=0, le=1 << 31)]  # the exporter's cuDriverGetVersion
    pid: Annotated[int, Meta(ge=1, le=1 << 31)]  # the exporter
    data: Annotated[bytes, Meta(max_length=_IPC_HANDLE_BYTES)]  # kind "ipc": the driver's own handle


_Steps = list[tuple[Any, ...]]  # driver calls that release what one memory has taken


def _give_back(steps: _Steps) -> bool:
    """Make these calls, last first. Returns whether all succeeded; failures are logged, and stop nothing."""
    is_clean = True
    while steps:
        try:
            call(*steps.pop())
        except GpuError as error:
            is_clean = False
            _log.warning("GPU memory was not released cleanly: %s", error)
    return is_clean


@contextlib.contextmanager
def _holding() -> Iterator[_Steps]:
    """Release what the block has taken if it fails."""
    steps: _Steps = []
    try:
        yield steps
    except BaseException:
        _give_back(steps)
        raise


class DeviceMemory(Closing):
    """Mapped memory of a GPU, `address` to `address + nbytes`, for kernels and copies of this process.

    The caller of `close` makes sure that no kernel and no copy on it is in flight. Thread-safe.
    """

    def __init__(self, address: int, nbytes: int, gpu: str, kind: Kind, *, on: Gpu, held: _Steps) -> None:
        self.address = address
        self.nbytes = nbytes  # whole granules of the driver
        self.gpu = gpu  # whose memory it is
        self.kind: Kind = kind
        self._on = on  # whose context uses it here
        self._held: _Steps | None = held
        self._is_made = False  # by this object, so that it can be exported
        self._generic: Any = None  # the driver's handle of it then; kind "vmm"
        with _mapped_lock:
            _mapped.add(self)

    @classmethod
    def create(cls, gpu: Gpu, nbytes: int, kind: Kind | Literal[""] = "") -> DeviceMemory:
        """At least `nbytes` of new memory on `gpu`; contents are undefined. "" is "vmm" if the GPU supports it. Raises
        GpuMemoryFull, which says what is free, and GpuUnavailable if the GPU does not support that kind."""
        if not 0 < nbytes <= MAX_NBYTES:
            raise ValueError(f"{nbytes} bytes of GPU memory; 1 to {MAX_NBYTES} are possible")
        if kind == "vmm" and not gpu.supports_vmm:
            raise GpuUnavailable(f"{gpu.name} ({gpu.uuid}) cannot export memory as a file descriptor")
        if not kind and not gpu.supports_vmm:
            _log.warning("%s (%s) cannot export memory as a file descriptor: legacy IPC is used", gpu.name, gpu.uuid)
        gpu.use()
        try:
            return cls._create_vmm(gpu, nbytes) if gpu.supports_vmm and kind != "ipc" else cls._create_ipc(gpu, nbytes)
        except GpuMemoryFull as error:
            free = f"{gpu.free_bytes() >> 20} of {gpu.total_bytes >> 20} MiB are free"
            raise GpuMemoryFull(
                f"no room for {nbytes >> 20} MiB on {gpu.name} ({gpu.uuid}), {free}: {error}"
            ) from error

    @classmethod
    def open(cls, handle: Handle, fd: int, *, on: Gpu) -> DeviceMemory:
        """Map what another process exported, for use by `on`. `fd` (kind "vmm") stays the caller's. Raises
        GpuHandleDead if the exporter is gone, and the memory with it; GpuUnavailable if `on` cannot reach that GPU, or
        open such a handle."""
        _check(handle, fd)
        if not on.can_access(handle.gpu):
            raise GpuUnavailable(
                f"GPU {on.uuid} cannot access memory of GPU {handle.gpu}: there is no peer access between them"
            )
        on.use()
        try:
            return cls._open_vmm(handle, fd, on) if handle.kind == "vmm" else cls._open_ipc(handle, on)
        except (GpuHandleDead, GpuMemoryFull):
            raise
        except GpuError as error:
            if on.sees(handle.gpu):
                raise
            raise GpuUnavailable(
                f"{error}; this process does not see GPU {handle.gpu} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')})"
            ) from error

    def __repr__(self) -> str:
        state = "closed" if self._held is None else f"at {self.address:#x}"
        return f"<DeviceMemory {self.kind} {self.nbytes >> 20} MiB of {self.gpu} {state}>"

    def export(self) -> tuple[Handle, int]:
        """A handle for other processes, and a new file descriptor that the caller closes (-1 for kind "ipc"). Raises
        GpuError if it is closed, or was opened instead of made."""
        if self._held is None or not self._is_made:
            raise GpuError(f"{self} cannot be exported: only who made the memory can, until it is closed")
        version, fd, data = driver.version(), -1, b""
        self._on.use()
        if self.kind == "vmm":
            kinds = api().CUmemAllocationHandleType
            fd = call("cuMemExportToShareableHandle", self._generic, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
            os.set_inheritable(fd, False)
        else:
            handle = call("cuIpcGetMemHandle", self.address)
            data = ctypes.string_at(handle.getPtr(), _IPC_HANDLE_BYTES)  # newer bindings hide its bytes
        return Handle(self.kind, self.gpu, self.nbytes, version, os.getpid(), data), fd

    def allow(self, other: Gpu) -> bool:
        """Let this process copy to and from it by `other`, too. False: without peer access, and for a legacy IPC
        handle."""
        if self.kind != "vmm" or not other.can_access(self.gpu):
            return False
        try:
            _give_access(self.address, self.nbytes, other)
        except GpuError as error:
            _log.warning("GPU %s cannot use memory of GPU %s: %s", other.uuid, self.gpu, str(error))
            return False
        return True

    def close(self) -> None:
        """Unmap it and give up this process's hold on it. Idempotent. Errors of the driver are logged, and the memory
        still counts as mapped then."""
        with _mapped_lock:
            held, self._held = self._held, None
        if held is None:
            return
        try:
            self._on.use()
        except GpuError as error:
            _log.warning("GPU memory may not be released cleanly: %s", error)
        if _give_back(held):
            with _mapped_lock:
                _mapped.discard(self)

    @classmethod
    def _create_vmm(cls, gpu: Gpu, nbytes: int) -> DeviceMemory:
        if not gpu.supports_rdma:
            return cls._create_vmm_as(_properties(gpu, is_for_rdma=False), gpu, nbytes)
        try:
            return cls._create_vmm_as(_properties(gpu, is_for_rdma=True), gpu, nbytes)
        except GpuMemoryFull:
            raise
        except GpuError as error:  # as in a virtual machine without the kernel's part of GPUDirect
            made = cls._create_vmm_as(_properties(gpu, is_for_rdma=False), gpu, nbytes)
            _log.warning(
                "memory of GPU %s cannot be made for network cards, so `nixl` and `ucx` may not reach it: %s",
                gpu.uuid,
                str(error),
            )
            return made

    @classmethod
    def _create_vmm_as(cls, properties: Any, gpu: Gpu, nbytes: int) -> DeviceMemory:
        granularity = _granularity(properties)
        nbytes = -(-nbytes // granularity) * granularity
        with _holding() as held:
            generic = call("cuMemCreate", nbytes, properties, 0)
            held.append(("cuMemRelease", generic))
            made = cls._map(generic, nbytes, gpu.uuid, on=gpu, held=held)
            made._generic, made._is_made = generic, True
            return made

    @classmethod
    def _open_vmm(cls, handle: Handle, fd: int, on: Gpu) -> DeviceMemory:
        if not on.supports_vmm:
            raise GpuUnavailable(f"{on.name} ({on.uuid}) cannot map memory from a file descriptor")
        granularity = _granularity(_properties(on, is_for_rdma=False))
        if handle.nbytes % granularity:
            raise GpuUnavailable(f"{handle.nbytes} bytes are not whole granules of {granularity} of GPU {on.uuid}")
        kinds = api().CUmemAllocationHandleType
        with _holding() as held:
            try:
                generic = call("cuMemImportFromShareableHandle", fd, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
            except GpuError as error:
                raise _cannot_open(error, handle) from error
            held.append(("cuMemRelease", generic))
            return cls._map(generic, handle.nbytes, handle.gpu, on=on, held=held)

    @classmethod
    def _map(cls, generic: Any, nbytes: int, gpu: str, *, on: Gpu, held: _Steps) -> DeviceMemory:
        """Map the allocation for `on`; `held` has what was taken before."""
        address = int(call("cuMemAddressReserve", nbytes, 0, 0, 0))
        held.append(("cuMemAddressFree", address, nbytes))
        call("cuMemMap", address, nbytes, 0, generic, 0)  # also refuses more than the allocation has
        held.append(("cuMemUnmap", address, nbytes))
        _give_access(address, nbytes, on)
        return cls(address, nbytes, gpu, "vmm", on=on, held=held)

    @classmethod
    def _create_ipc(cls, gpu: Gpu, nbytes: int) -> DeviceMemory:
        nbytes = -(-nbytes // _IPC_GRANULARITY) * _IPC_GRANULARITY
        with _holding() as held:
            address = int(call("cuMemAlloc", nbytes))
            held.append(("cuMemFree", address))
            made = cls(address, nbytes, gpu.uuid, "ipc", on=gpu, held=held)
            made._is_made = True
            return made

    @classmethod
    def _open_ipc(cls, handle: Handle, on: Gpu) -> DeviceMemory:
        if handle.pid == os.getpid():
            raise GpuUnavailable("a legacy IPC handle cannot be opened by the process that made it")
        raw = api().CUipcMemHandle()
        ctypes.memmove(raw.getPtr(), handle.data, _IPC_HANDLE_BYTES)
        with _holding() as held:
            flags = int(api().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
            try:
                address = int(call("cuIpcOpenMemHandle", raw, flags))
            except GpuError as error:
                raise _cannot_open(error, handle) from error
            held.append(("cuIpcCloseMemHandle", address))
            _, nbytes = call("cuMemGetAddressRange", address)
            if nbytes < handle.nbytes:
                raise GpuUnavailable(f"the handle promises {handle.nbytes} bytes, its memory has {nbytes}")
            return cls(address, handle.nbytes, handle.gpu, "ipc", on=on, held=held)


class DeviceSpan:
    """Bytes of a GPU's memory in the form that other libraries accept. Its creator keeps them mapped."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None}


def num_mapped() -> int:
    """How many `DeviceMemory` of this process are open, made or mapped."""
    with _mapped_lock:
        return len(_mapped)


def _check(handle: Handle, fd: int) -> None:
    """Raise GpuUnavailable for a handle that decodes, but that no PDX process has exported."""
    expected = _IPC_HANDLE_BYTES if handle.kind == "ipc" else 0
    if len(handle.data) != expected or (fd >= 0) != (handle.kind == "vmm"):
        raise GpuUnavailable(f"a handle of kind {handle.kind!r} with {len(handle.data)} bytes and descriptor {fd}")


def _properties(gpu: Gpu, *, is_for_rdma: bool) -> Any:
    properties = api().CUmemAllocationProp()
    properties.type = api().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = api().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = api().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = gpu.ordinal
    properties.allocFlags.gpuDirectRDMACapable = int(is_for_rdma)  # so that NIXL and UCX can register it
    return properties


def _give_access(address: int, nbytes: int, gpu: Gpu) -> None:
    access = api().CUmemAccessDesc()
    access.location.type = api().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = gpu.ordinal
    access.flags = api().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call("cuMemSetAccess", address, nbytes, [access], 1)


def _granularity(properties: Any) -> int:
    options = api().CUmemAllocationGranularity_flags
    return int(call("cuMemGetAllocationGranularity", properties, options.CU_MEM_ALLOC_GRANULARITY_MINIMUM))


def _cannot_open(error: GpuError, handle: Handle) -> GpuError:
    """The exception for a handle that the driver does not open."""
    if isinstance(error, GpuMemoryFull):
        return error
    why = str(error)
    try:
        stat = process_stat(handle.pid)
    except OSError:  # no descriptor is left, perhaps none for the driver, either
        stat = None
    if handle.kind == "ipc" and (stat is None or stat.state in "ZX"):
        # Which error that gives is not documented.
        return GpuHandleDead(f"process {handle.pid}, which exported it, is gone (or in another PID namespace): {why}")
    if (ours := driver.version()) != handle.driver:
        why += f"; its exporter's CUDA driver has version {handle.driver}, this process's {ours}"
    return GpuUnavailable(f"memory of process {handle.pid} on GPU {handle.gpu} cannot be opened here: {why}")
