"""The GPUs that this process sees: what they are, and their primary contexts, which PyTorch uses, too."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdx.cuda.driver import api, call
from pdx.errors import GpuError, GpuUnavailable

_contexts: dict[int, Any] = {}  # ordinal -> primary context, retained once per process
_contexts_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, by the ordinal that it has in this process. Any thread may use it; making one makes no CUDA context."""

    ordinal: int
    uuid: str  # "GPU-…", the same in every process of the host
    name: str
    total_bytes: int
    pci: str  # "0000:3b:00.0"
    supports_vmm: bool  # memory of the driver's virtual-memory API, exported as a file descriptor
    supports_rdma: bool  # network cards can read and write such memory

    @classmethod
    def find(cls, which: str) -> Gpu:
        """The GPU with that ordinal ("0") or UUID; raises GpuUnavailable, whose text names those that there are."""
        gpus = all_gpus()
        wanted = _bare(which)
        for gpu in gpus:
            if wanted in (str(gpu.ordinal), _bare(gpu.uuid)):
                return gpu
        found = ", ".join(f"{gpu.ordinal} = {gpu.uuid} ({gpu.name})" for gpu in gpus) or "none"
        raise GpuUnavailable(f"there is no GPU {which!r} here; this process sees: {found}{_mask()}")

    def use(self) -> None:
        """Make its primary context the current one of the calling thread, as PyTorch's `set_device` does. The first
        call of a process takes long."""
        context = _contexts.get(self.ordinal)
        if context is None:
            with _contexts_lock:
                context = _contexts.get(self.ordinal)
                if context is None:
                    context = call("cuDevicePrimaryCtxRetain", self.device())
                    _contexts[self.ordinal] = context
        call("cuCtxSetCurrent", context)

    def wait(self) -> None:
        """Return when all work of this process on it has ended, or some has failed; other threads run meanwhile. Makes
        its context current in the calling thread."""
        self.use()
        call("cuCtxSynchronize")

    def device(self) -> Any:
        return call("cuDeviceGet", self.ordinal)

    def attribute(self, name: str) -> int:
        return _attribute(self.device(), name)

    def can_access(self, other_uuid: str) -> bool:
        """Whether it may read and write that GPU's memory, as far as the driver knows.

        Of a GPU that this process does not see (CUDA_VISIBLE_DEVICES) it knows nothing before its memory is mapped.
        """
        if other_uuid == self.uuid:
            return True
        other = next((gpu for gpu in all_gpus() if gpu.uuid == other_uuid), None)
        return other is None or bool(call("cuDeviceCanAccessPeer", self.device(), other.device()))

    def sees(self, other_uuid: str) -> bool:
        return any(gpu.uuid == other_uuid for gpu in all_gpus())

    def free_bytes(self) -> int:
        """The bytes that are free on it now. Makes its context current in the calling thread."""
        self.use()
        return int(call("cuMemGetInfo")[0])


def all_gpus() -> list[Gpu]:
    """Every GPU that this process sees, by ordinal."""
    return [_describe(ordinal) for ordinal in range(call("cuDeviceGetCount"))]


def why_no_gpu() -> str:
    """Why this process cannot use any GPU; "" if it can. Makes no context, raises nothing."""
    try:
        return "" if all_gpus() else f"the driver finds no GPU{_mask()}"
    except GpuError as error:
        return str(error)


@contextlib.contextmanager
def keeping_context() -> Iterator[None]:
    """Restore the calling thread's current context after the block: PyTorch takes it for the thread's current device.
    For threads that are not PDX's own."""
    before = call("cuCtxGetCurrent")
    try:
        yield
    finally:
        call("cuCtxSetCurrent", before)


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Keep driver calls in the block from spoiling a graph that another thread of this process captures meanwhile."""
    before = call("cuThreadExchangeStreamCaptureMode", api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def numa_node(gpu: Gpu, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node that the GPU hangs on; None if the system does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / gpu.pci / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _describe(ordinal: int) -> Gpu:
    device = call("cuDeviceGet", ordinal)
    # Since CUDA 13 the plain name is what was _v2 before: in MIG mode the instance's own UUID.
    get_uuid = "cuDeviceGetUuid_v2" if hasattr(api(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    raw = call(get_uuid, device).bytes.hex()
    return Gpu(
        ordinal=ordinal,
        uuid=f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}",
        name=_text(call("cuDeviceGetName", 128, device)),
        total_bytes=int(call("cuDeviceTotalMem", device)),
        pci=_text(call("cuDeviceGetPCIBusId", 32, device)).lower(),
        supports_vmm=bool(
            _attribute(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
            and _attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        ),
        supports_rdma=bool(_attribute(device, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")),
    )


def _attribute(device: Any, name: str) -> int:
    attribute = getattr(api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", attribute, device))


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")


def _bare(which: str) -> str:
    return which.strip().lower().removeprefix("gpu-").removeprefix("mig-")


def _mask() -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"
