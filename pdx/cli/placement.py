"""Which cores or GPUs each engine of one host gets, as environment variables. Pure, but for looking at the host."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile


def gpus() -> list[str]:
    """Indices of this host's NVIDIA GPUs that vLLM may use; empty on a CPU host."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return list(takewhile(lambda gpu: gpu and not gpu.startswith("-"), chosen.split(",")))  # CUDA's rule
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        return []
    return [str(index) for index, line in enumerate(listing.stdout.splitlines()) if line.startswith("GPU ")]


def cores() -> list[int]:
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def place(
    num_engines: int,
    cores: Sequence[int],
    gpus: Sequence[str],
    environ: Mapping[str, str],
    *,
    sees_others: bool = False,
) -> list[dict[str, str]]:
    """Variables for each engine: a GPU of its own, or a share of the cores; what the user has set stays.

    With more engines than GPUs or cores they share; more than one engine on a GPU needs vLLM's
    --gpu-memory-utilization to be set accordingly. `sees_others`: behind its own GPU an engine sees the others,
    because it maps memory of one of them.
    """
    if gpus and sees_others:
        starts = [index % len(gpus) for index in range(num_engines)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join([*gpus[start:], *gpus[:start]])} for start in starts]
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} for index in range(num_engines)]
    if "VLLM_CPU_OMP_THREADS_BIND" in environ:
        return [{} for _ in range(num_engines)]
    share = max(1, len(cores) // num_engines)
    placed = []
    for index in range(num_engines):
        start = index * share % len(cores)
        placed.append({"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[start : start + share]))})
    return placed
