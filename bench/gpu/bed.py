"""The beds on which the GPU benches run: a real GPU, or a toy for tests without a GPU.

The toy is the fake CUDA driver of our tests (tests/support) with the Triton interpreter: the same calls in the same
order, on host memory. Times measured on it mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from pdx.bench.harness.report import Figure, installed
from pdx.cuda import driver
from pdx.cuda.gpu import Gpu

PACKAGES = ("cuda-bindings", "triton", "numpy")


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a section, for `pdx.bench.harness.report.publish`."""

    title: str
    figures: list[Figure]
    details: dict[str, Any] = field(default_factory=dict)


def gpu_facts(gpu: Gpu, bed: str) -> dict[str, Any]:
    """The facts on which GPU figures depend. `bed`: its name, which says whether a GPU was measured at all."""
    return {
        "bed": bed,
        "gpu": gpu.name,
        "gpu_gib": round(gpu.total_bytes / (1 << 30), 1),
        "gpu_has_vmm": gpu.supports_vmm,
        "cuda_driver": driver.call("cuDriverGetVersion"),
        "kernel_driver": _kernel_driver(),
        "torch_cuda": torch.version.cuda or "",
        "gpu_versions": {name: found for name in PACKAGES if (found := installed(name))},
    }


def _kernel_driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return ""


REAL, TOY = "real", "toy"
FLUSH_BYTES = 256 << 20  # more than any L2 cache
COVER_CYCLES = 2_000_000  # a millisecond at 2 GHz: longer than any launch of a bench
TOY_BYTES = 64 << 20


class Bed(ABC):
    """One GPU as torch and the driver see it. `clock`: reads the time of the current stream, for `measure`."""

    name: ClassVar[str]
    device: ClassVar[str]
    clock: Callable[[], Any]

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def noise(self, nbytes: int, seed: int) -> Tensor:
        """Random bytes, drawn from `seed`."""
        source = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self.device, generator=source)

    def zeros(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    @abstractmethod
    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory as torch allocates it."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the current stream has finished its work."""


class Moment:
    """A point on the current stream, read as the clock of a measurement: `later - earlier` waits and returns seconds.

    Each moment runs `flush`, which empties the L2 cache and keeps the stream busy, outside the timed interval. The work
    to be timed is launched meanwhile, so that the result does not include the time of the launch.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._end_of_last = torch.cuda.Event(enable_timing=True)
        self._start_of_next = torch.cuda.Event(enable_timing=True)
        self._end_of_last.record()
        flush()
        self._start_of_next.record()

    def __sub__(self, earlier: Moment) -> float:
        self._end_of_last.synchronize()
        milliseconds: float = earlier._start_of_next.elapsed_time(self._end_of_last)
        return milliseconds / 1e3


class RealBed(Bed):
    """The first GPU that the driver shows."""

    name = REAL
    device = "cuda"

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        torch.cuda.set_device(gpu.ordinal)
        self._other = torch.zeros(FLUSH_BYTES // 8, dtype=torch.int64, device=self.device)
        self._sum = torch.zeros((), dtype=torch.int64, device=self.device)
        self.clock = lambda: Moment(self.flush)

    def flush(self) -> None:
        """Fill the cache with other lines, which need no write-back, and keep the stream busy for `COVER_CYCLES`."""
        torch.sum(self._other, dim=0, out=self._sum)
        torch.cuda._sleep(COVER_CYCLES)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()


class ToyBed(Bed):
    """Host memory; all work is done at once."""

    name = TOY
    device = "cpu"

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.clock = time.perf_counter

    def pinned(self, nbytes: int) -> Tensor:
        return self.zeros(nbytes)

    def wait(self) -> None:
        return None


@contextlib.contextmanager
def bed(name: str) -> Iterator[Bed]:
    """The bed of that name; leaving the context removes the toy's driver. :raises GpuUnavailable: there is no GPU."""
    if name == REAL:
        yield RealBed(Gpu.find("0"))
        return
    import triton  # noqa: F401  # natively: after an import under the interpreter, parts of it cannot be imported
    from fake_cuda import fake_cuda

    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined
    try:
        import pdx.kernels.paged  # noqa: F401
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    from fake_cuda_kernels import install

    install()
    with fake_cuda(gpus=1, nbytes=TOY_BYTES):
        yield ToyBed(Gpu.find("0"))
