"""What a section of the GPU benches has found, and the machine it has found it on."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from pdx.bench.harness.report import Figure
from pdx.cuda import driver
from pdx.cuda.gpu import Gpu

PACKAGES = ("cuda-bindings", "triton", "numpy", "nixl-cu12", "nixl-cu13")


@dataclass(frozen=True, slots=True)
class Findings:
    """For `pdx.bench.harness.report.publish`."""

    title: str
    figures: list[Figure]
    details: dict[str, Any] = field(default_factory=dict)


def gpu_facts(gpu: Gpu, bed: str) -> dict[str, Any]:
    """What GPU numbers depend on. `bed`: whether they were measured on a GPU at all."""
    return {
        "bed": bed,
        "gpu": gpu.name,
        "gpu_gib": round(gpu.total_bytes / (1 << 30), 1),
        "gpu_has_vmm": gpu.supports_vmm,
        "cuda_driver": driver.call("cuDriverGetVersion"),
        "kernel_driver": _kernel_driver(),
        "torch_cuda": torch.version.cuda or "",
        "gpu_versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _kernel_driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
