"""Tests what the GPUs of a machine can do for PDX.

    python -m pdx.cli.gpus    prints a list of `Fact` as JSON

A separate program, because it loads the driver and creates CUDA contexts, which may hang or crash; its parent ends it
at a deadline.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdx.cli.machine import Fact, FindingName
from pdx.cli.tables import size
from pdx.errors import GpuError
from pdx.extras import install
from pdx.transports.channel import Memory
from pdx.transports.registry import FOR_GPUS, find

if TYPE_CHECKING:
    from pdx.cuda.gpu import Gpu

PAGE_LOCK_BYTES = 1 << 20
_PAGE_LOCK_S = 10.0
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_GET_ONE = f"install its driver; in a container --gpus all; then {install('gpu')}"


def facts(sysfs: Path = Path("/sys")) -> list[Fact]:
    """What there is and what it can do; or a single fact that there is no GPU."""
    from pdx.cuda.gpu import all_gpus, why_no_gpu

    if why := why_no_gpu():
        if not _has_device(sysfs):
            return [Fact("GPU", f"no GPU: chunks lie in host memory ({why})", finding=FindingName.GPU_NONE)]
        found = f"no GPU that can be used, but one is built in: {why}"
        return [Fact("GPU", found, False, _GET_ONE, FindingName.GPU_UNUSABLE)]
    gpus = all_gpus()
    return [
        *(_tried(f"GPU {gpu.ordinal}", lambda gpu=gpu: _describe(gpu, sysfs)) for gpu in gpus),  # type: ignore[misc]
        _tried("CUDA driver", _driver),
        _tried("GPU arena", lambda: _arena(gpus)),
        _tried("peer access", lambda: _peers(gpus)),
        _tried("page-locking", lambda: _page_locking(gpus[0])),
        _kernels(),
        _channel(),
    ]


def _tried(name: str, look: Callable[[], Fact]) -> Fact:
    try:
        return look()
    except GpuError as error:
        fix = "see `nvidia-smi`, and the kernel's log for Xid errors"
        return Fact(name, str(error), False, fix, FindingName.GPU_FAILED)


def _describe(gpu: Gpu, sysfs: Path) -> Fact:
    from pdx.cuda.gpu import numa_node

    node = numa_node(gpu, sysfs)
    place = "" if node is None else f", NUMA node {node}"
    free = f"{size(gpu.total_bytes)}, {size(gpu.free_bytes())} of it free"
    return Fact(f"GPU {gpu.ordinal}", f"{gpu.name}, {free}, {gpu.uuid}{place}")


def _driver() -> Fact:
    from pdx.cuda import driver

    version = driver.version()
    bindings = getattr(sys.modules.get("cuda.bindings"), "__version__", "")
    return Fact("CUDA driver", f"CUDA {version // 1000}.{version % 1000 // 10}, cuda-bindings {bindings}".strip())


def _arena(gpus: Sequence[Gpu]) -> Fact:
    """Whether memory can be allocated that other processes can map, and by which mechanism."""
    from pdx.cuda.memory import DeviceMemory

    kinds = {}
    for gpu in gpus:
        with DeviceMemory.create(gpu, 1) as memory:
            kinds[gpu.ordinal] = memory.kind
            _, fd = memory.export()
            if fd >= 0:
                os.close(fd)
    legacy = [str(ordinal) for ordinal, kind in kinds.items() if kind == "ipc"]
    if not legacy:
        return Fact("GPU arena", "shared by file descriptors of the driver")
    fix = "bare metal or passthrough instead of a virtual GPU, and a current driver, give file descriptors"
    found = f"GPU {', '.join(legacy)}: shared by legacy IPC handles, so chunks are gone when their node ends"
    return Fact("GPU arena", found, False, fix, FindingName.GPU_ARENA_LEGACY)


def _peers(gpus: Sequence[Gpu]) -> Fact:
    if len(gpus) == 1:
        return Fact("peer access", "one GPU")
    pairs = [(one, other) for one in gpus for other in gpus if one is not other]
    missing = [f"{one.ordinal}→{other.ordinal}" for one, other in pairs if not one.can_access(other.uuid)]
    if not missing:
        return Fact("peer access", f"between all {len(gpus)} GPUs")
    fix = f"not between these by {FOR_GPUS}; see `nvidia-smi topo -p2p r`, PCIe ACS and the IOMMU; MIG has none"
    return Fact("peer access", f"missing: {' '.join(missing)}", False, fix, FindingName.GPU_NO_PEER_ACCESS)


def _page_locking(gpu: Gpu) -> Fact:
    from pdx.cuda.page_lock import PageLock

    memory = Memory(memoryview(mmap.mmap(-1, PAGE_LOCK_BYTES)))
    lock = PageLock(memory.address, memory.nbytes, gpu, anchor=memory, on_refused=lambda text: None)
    try:
        deadline = time.monotonic() + _PAGE_LOCK_S
        while not lock.error and not lock.covers(0, memory.nbytes):
            if time.monotonic() > deadline:
                found = f"{size(memory.nbytes)} took longer than {_PAGE_LOCK_S:g} s"
                return Fact("page-locking", found, False, finding=FindingName.PAGE_LOCK_SLOW)
            time.sleep(0.001)
        if not lock.error:
            return Fact("page-locking", f"works ({size(memory.nbytes)} tried)")
        why, _, fix = lock.error.partition("; ")
        return Fact("page-locking", why, False, fix, FindingName.PAGE_LOCK_REFUSED)
    finally:
        lock.close()


def _kernels() -> Fact:
    """Whether Triton can build the launcher of the copy kernels: it compiles C for this Python on first use."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if compiler and shutil.which(compiler) else ["no C compiler (gcc, clang or CC)"]
    missing += [] if header.exists() else [f"no {header}"]
    if not missing:
        return Fact("copy kernels", f"{compiler} and Python's headers are there")
    fix = "install gcc and this Python's headers (python3-dev); engines on GPUs run without PDX until then"
    return Fact("copy kernels", ", ".join(missing), False, fix, FindingName.GPU_NO_COMPILER)


def _channel() -> Fact:
    availability = find(FOR_GPUS).availability()
    if availability.is_ok:
        return Fact(FOR_GPUS, "available")
    return Fact(FOR_GPUS, availability.why, False, availability.fix, FindingName.CUDA_IPC_UNAVAILABLE)


def _has_device(sysfs: Path) -> bool:
    for device in (sysfs / "bus/pci/devices").glob("*"):
        try:
            is_ours = (device / "vendor").read_text().strip() == _NVIDIA
            if is_ours and (device / "class").read_text().startswith(_DISPLAY_CLASSES):
                return True
        except OSError:
            continue
    return False


if __name__ == "__main__":
    print(msgspec.json.encode(facts()).decode())
