"""What the fake CUDA driver does for calls about GPUs and contexts: names and arguments are the bindings'."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import Counter
from types import ModuleType
from typing import Any

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


class Refused(Exception):  # noqa: N818 - no error of PDX, but a CUresult
    """A call that ends with this CUresult: its name without CUDA_ERROR_."""


class DeviceCalls:
    """GPUs of `nbytes` each, and which of their contexts is current in which thread."""

    def __init__(self, bindings: ModuleType, gpus: int, nbytes: int, *, version: int, has: dict[str, bool]) -> None:
        """`has`: what the GPUs can do, see `_ATTRIBUTES`; "peer_access"; and whether "unseen" GPUs can be reached, of
        which this process has no ordinal.
        """
        self.bindings = bindings
        self.num_gpus = gpus
        self.total = nbytes
        self.has = has
        self.is_initialised = False
        self.is_capturing = False  # a thread captures a graph, in the global mode
        self.spoiled: list[str] = []  # calls that have ended such a capture
        self.contexts: Counter[int] = Counter()  # ordinal -> how often its primary context is retained
        self._version = version
        self._current = threading.local()
        self._lock = threading.Lock()

    def can_access(self, ordinal: int, other: int) -> bool:
        """Whether one GPU reaches the other's memory."""
        return ordinal == other or (self.has["peer_access"] and (other < self.num_gpus or self.has["unseen"]))

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
        return self.total

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
        return int(self.can_access(self.ordinal(device), self.ordinal(peer)))

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


def fake_uuid_bytes(ordinal: int) -> bytes:
    """The UUID of a fake GPU: the same in every process."""
    return hashlib.sha256(f"pdx fake gpu {ordinal}".encode()).digest()[:16]
