"""Calls of the CUDA driver: the only place that touches `cuda.bindings.driver`. Results become values or `GpuError`s.

All of PDX's calls of the driver raise these: GpuMemoryFull if it is out of memory, GpuUnavailable if there is no
driver, no package or no such GPU, else GpuError; the text has the call, and the error's name and explanation.
Thread-safe. The bindings release the GIL during a call (cuda-bindings 12.9.1 and later).
"""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import Any

from pdx.errors import GpuError, GpuMemoryFull, GpuUnavailable
from pdx.extras import install

_SUCCESS = 0
_UNAVAILABLE = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "NO_DEVICE",
        "INVALID_DEVICE",
        "DEVICE_UNAVAILABLE",
        "STUB_LIBRARY",
        "NOT_INITIALIZED",
        "DEINITIALIZED",
        "SYSTEM_NOT_READY",
        "SYSTEM_DRIVER_MISMATCH",
        "COMPAT_NOT_SUPPORTED_ON_DEVICE",
    )
)
_bindings: ModuleType | None = None
_ready_in = 0  # the process that has called cuInit; a forked child has not
_lock = threading.Lock()


def api() -> ModuleType:
    """`cuda.bindings.driver`, for its structs and enums. Loads no driver library."""
    global _bindings
    if _bindings is None:
        _bindings = real_api()
    return _bindings


def real_api() -> ModuleType:
    """The same, even while `replace` has put another module there."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise GpuUnavailable(f"cuda-bindings is missing ({error}): {install('gpu')}") from error
    bindings: ModuleType = driver
    return bindings


def replace(module: Any) -> None:
    """Call this module from now on, which must act like `cuda.bindings.driver`; None: the real one. For tests."""
    global _bindings, _ready_in
    with _lock:
        _bindings, _ready_in = module, 0


def call(name: str, *args: Any) -> Any:
    """Call a function of the driver. Returns the value behind its CUresult (None, or a tuple of several)."""
    _initialise()
    return _call(name, *args)


def version() -> int:
    """The driver's CUDA version, 1000 * major + 10 * minor."""
    return int(call("cuDriverGetVersion"))


def _initialise() -> None:
    global _ready_in
    if _ready_in == os.getpid():
        return
    with _lock:
        if _ready_in == os.getpid():
            return
        try:
            _call("cuInit", 0)
        except GpuError as error:
            raise GpuUnavailable(str(error)) from error
        _ready_in = os.getpid()


def _call(name: str, *args: Any) -> Any:
    bindings = api()
    try:
        result, *values = getattr(bindings, name)(*args)
        if result == _SUCCESS:
            return values[0] if len(values) == 1 else tuple(values) or None
        code, text = result.name, (bindings.cuGetErrorString(result)[1] or b"").decode(errors="replace")
    except RuntimeError as error:  # the bindings cannot load the driver's library
        raise GpuUnavailable(f"{name}: no NVIDIA driver can be loaded here ({error})") from error
    except ValueError as error:  # the driver is newer than the bindings, which do not know this result
        code, text = "CUDA_ERROR_UNKNOWN", str(error)
    kind = GpuMemoryFull if code == "CUDA_ERROR_OUT_OF_MEMORY" else GpuUnavailable if code in _UNAVAILABLE else GpuError
    refused = kind(f"{name} failed: {code} ({text})")
    refused.code = code
    raise refused
