"""What the fake CUDA driver does for calls about GPUs, contexts and memory: names and arguments are the bindings'."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import Counter
from types import ModuleType
from typing import Any

from pdx.testing.fake_cuda_host import HostMemory
from pdx.testing.fake_cuda_memory import GRANULARITY, FakeMemory, Refused

_ATTRIBUTES = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "vmm",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "vmm",
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": "rdma",
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": "host_pointers",
    "READ_ONLY_HOST_REGISTER_SUPPORTED": "read_only_register",
}


SPOIL_CAPTURES = frozenset(
    (
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemHostRegister",
        "cuMemHostUnregister",
    )
)


class DeviceCalls:
    """GPUs, and which of their contexts is current in which thread. `has`: what the GPUs can do, see `_ATTRIBUTES`."""

    def __init__(self, bindings: ModuleType, memory: FakeMemory, *, version: int, has: dict[str, bool]) -> None:
        self.bindings = bindings
        self.memory = memory
        self.has = has
        self.is_initialised = False
        self.is_capturing = False  # a thread captures a graph, in the global mode
        self.spoiled: list[str] = []  # calls that have ended such a capture
        self.contexts: Counter[int] = Counter()  # ordinal -> how often its primary context is retained
        self._version = version
        self._current = threading.local()
        self._lock = threading.Lock()

    @property
    def num_gpus(self) -> int:
        return self.memory.num_gpus

    def here(self) -> int:
        """The ordinal of the GPU whose context is current in this thread."""
        ordinal: int | None = getattr(self._current, "ordinal", None)
        if ordinal is None or not self.contexts[ordinal]:
            raise Refused("INVALID_CONTEXT")
        return ordinal

    def ordinal(self, device: Any) -> int:
        if not 0 <= int(device) < self.num_gpus:
            raise Refused("INVALID_DEVICE")
        return int(device)

    def cuInit(self, flags: int) -> None:
        if not self.num_gpus:
            raise Refused("NO_DEVICE")
        self.is_initialised = True

    def cuDriverGetVersion(self) -> int:
        return self._version

    def cuDeviceGetCount(self) -> int:
        return self.num_gpus

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self.bindings.CUdevice(self.ordinal(ordinal))

    def cuDeviceGetUuid(self, device: Any) -> Any:
        uuid = self.bindings.CUuuid()
        ctypes.memmove(uuid.getPtr(), fake_uuid_bytes(self.ordinal(device)), 16)
        return uuid

    cuDeviceGetUuid_v2 = cuDeviceGetUuid

    def cuDeviceGetName(self, length: int, device: Any) -> bytes:
        return f"Fake GPU {self.ordinal(device)}".encode().ljust(length, b"\0")

    def cuDeviceTotalMem(self, device: Any) -> int:
        self.ordinal(device)
        return self.memory.total

    def cuDeviceGetPCIBusId(self, length: int, device: Any) -> bytes:
        return f"0000:{0x3B + self.ordinal(device):02X}:00.0".encode().ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        self.ordinal(device)
        known = self.bindings.CUdevice_attribute
        for name, what in _ATTRIBUTES.items():  # by value: some have two names
            if attribute == getattr(known, f"CU_DEVICE_ATTRIBUTE_{name}"):
                return int(self.has[what])
        raise Refused("INVALID_VALUE")

    def cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> int:
        return int(self.memory.can_access(self.ordinal(device), self.ordinal(peer)))

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        with self._lock:
            self.contexts[self.ordinal(device)] += 1
        return self.bindings.CUcontext(self.ordinal(device) + 1)

    def cuDevicePrimaryCtxRelease(self, device: Any) -> None:
        with self._lock:
            if not self.contexts[self.ordinal(device)]:
                raise Refused("INVALID_CONTEXT")
            self.contexts[self.ordinal(device)] -= 1

    def cuCtxSetCurrent(self, context: Any) -> None:
        ordinal = int(context) - 1 if int(context) else None
        if ordinal is not None and not self.contexts[ordinal]:
            raise Refused("INVALID_CONTEXT")
        self._current.ordinal = ordinal

    def cuCtxGetCurrent(self) -> Any:
        ordinal: int | None = getattr(self._current, "ordinal", None)
        return self.bindings.CUcontext(0 if ordinal is None else ordinal + 1)

    def check_capture(self, name: str) -> None:
        """Some calls spoil such a capture, unless their thread has said that it has nothing to do with it; a wait for
        the whole context does so from any thread.
        """
        if not self.is_capturing or name not in SPOIL_CAPTURES:
            return
        modes = self.bindings.CUstreamCaptureMode
        mode = getattr(self._current, "capture_mode", modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
        if mode == modes.CU_STREAM_CAPTURE_MODE_GLOBAL or name == "cuCtxSynchronize":
            self.spoiled.append(name)
            raise Refused("STREAM_CAPTURE_UNSUPPORTED")

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before = getattr(self._current, "capture_mode", self.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        self._current.capture_mode = mode
        return before

    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.memory.free(self.here()), self.memory.total


class MemoryCalls:
    """Memory of GPUs, its exports, and page-locked host memory."""

    def __init__(self, devices: DeviceCalls, host: HostMemory) -> None:
        self._devices = devices
        self._host = host
        self._bindings = devices.bindings
        self._memory = devices.memory

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> int:
        self._check_properties(properties)
        return GRANULARITY

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> Any:
        self._check_properties(properties)
        if properties.allocFlags.gpuDirectRDMACapable and not self._devices.has["rdma_memory"]:
            raise Refused("NOT_SUPPORTED")
        return self._bindings.CUmemGenericAllocationHandle(self._memory.create(nbytes, properties.location.id))

    def _check_properties(self, properties: Any) -> None:
        kinds = self._bindings.CUmemAllocationHandleType
        is_right = (
            properties.type == self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            and properties.location.type == self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            and properties.requestedHandleTypes == kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        if not is_right:
            raise Refused("INVALID_VALUE")
        if not self._devices.has["vmm"]:
            raise Refused("NOT_SUPPORTED")

    def cuMemRelease(self, handle: Any) -> None:
        self._memory.release(int(handle))

    def cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> int:
        self._check_kind(kind)
        return self._memory.export(int(handle))

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> Any:
        self._check_kind(kind)
        return self._bindings.CUmemGenericAllocationHandle(self._memory.take_in(fd))

    def _check_kind(self, kind: Any) -> None:
        if kind != self._bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
            raise Refused("INVALID_VALUE")
        if not self._devices.has["vmm"]:
            raise Refused("NOT_SUPPORTED")

    def cuMemAddressReserve(self, nbytes: int, alignment: int, hint: Any, flags: int) -> Any:
        return self._bindings.CUdeviceptr(self._memory.reserve(nbytes))

    def cuMemAddressFree(self, address: Any, nbytes: int) -> None:
        self._memory.free_addresses(int(address), nbytes)

    def cuMemMap(self, address: Any, nbytes: int, offset: int, handle: Any, flags: int) -> None:
        self._memory.map(int(address), nbytes, offset, int(handle))

    def cuMemUnmap(self, address: Any, nbytes: int) -> None:
        self._memory.unmap(int(address), nbytes)

    def cuMemSetAccess(self, address: Any, nbytes: int, access: list[Any], count: int) -> None:
        self._memory.set_access(int(address), nbytes, [entry.location.id for entry in access[:count]])

    def cuMemAlloc(self, nbytes: int) -> Any:
        return self._bindings.CUdeviceptr(self._memory.alloc(nbytes, self._devices.here()))

    def cuMemFree(self, address: Any) -> None:
        self._devices.here()
        self._memory.free_memory(int(address))

    def cuMemGetAddressRange(self, address: Any) -> tuple[Any, int]:
        self._devices.here()
        start, nbytes = self._memory.range_of(int(address))
        return self._bindings.CUdeviceptr(start), nbytes

    def cuIpcGetMemHandle(self, address: Any) -> Any:
        self._devices.here()
        handle = self._bindings.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), self._memory.ipc_handle(int(address)), 64)
        return handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        raw = ctypes.string_at(handle.getPtr(), 64)
        return self._bindings.CUdeviceptr(self._memory.open_ipc(raw, self._devices.here()))

    def cuIpcCloseMemHandle(self, address: Any) -> None:
        self._devices.here()
        self._memory.close_ipc(int(address))

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        self._devices.here()
        is_read_only = bool(flags & int(self._bindings.CU_MEMHOSTREGISTER_READ_ONLY))
        is_for_kernels = bool(flags & int(self._bindings.CU_MEMHOSTREGISTER_DEVICEMAP))
        self._host.register(address, nbytes, is_read_only=is_read_only, is_for_kernels=is_for_kernels)

    def cuMemHostUnregister(self, address: int) -> None:
        self._devices.here()
        self._host.unregister(address)

    def cuPointerGetAttribute(self, attribute: Any, address: Any) -> Any:
        """What is asked of page-locked host memory; the fake knows no other."""
        self._devices.here()
        known, found = self._bindings.CUpointer_attribute, self._host.at(int(address))
        if found is None:
            raise Refused("INVALID_VALUE")
        start, nbytes, is_for_kernels = found
        if attribute == known.CU_POINTER_ATTRIBUTE_DEVICE_POINTER and is_for_kernels:
            return self._bindings.CUdeviceptr(int(address))
        if attribute == known.CU_POINTER_ATTRIBUTE_MAPPED:
            return True
        if attribute == known.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            return self._bindings.CUdeviceptr(start)
        if attribute == known.CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            return nbytes
        raise Refused("INVALID_VALUE")


def fake_uuid_bytes(ordinal: int) -> bytes:
    """The UUID of a fake GPU: the same in every process."""
    return hashlib.sha256(f"pdx fake gpu {ordinal}".encode()).digest()[:16]
