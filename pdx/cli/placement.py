"""Assigns cores or GPUs of one host to engines, as environment variables. Pure, except that it inspects the host."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile


def gpus() -> list[str]:
    """Indices of the NVIDIA GPUs that vLLM may use on this host; empty on a CPU host."""
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
    """Environment variables for each engine: a GPU of its own, or a share of the cores. Variables that the user has set
    are kept.

    If there are more engines than GPUs or cores, they share; several engines on a GPU need a suitable value for vLLM's
    --gpu-memory-utilization. `sees_others`: an engine sees the other GPUs after its own, because it maps memory of one
    of them.
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
