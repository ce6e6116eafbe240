"""The systems that benchmarks compare, by name; `pdx.bench.reuse.systems` has more."""

from __future__ import annotations

from pdx.bench.systems.baselines import baselines
from pdx.bench.systems.pdx import PdxAlone, PdxSystem, PdxWith
from pdx.bench.systems.system import Bed, CannotRun, Running, System

__all__ = ["SYSTEMS", "Bed", "CannotRun", "Running", "System"]

CHANNELS = (None, "tcp", "shm", "nixl", "ucx")
ON_GPUS = (PdxSystem(None, gpu="0"), PdxSystem("cuda_ipc", gpu="0,1"))
PDX = (
    *(PdxSystem(channel) for channel in CHANNELS),
    *ON_GPUS,
    PdxAlone(),
    PdxWith("128", "chunks of 128 tokens", {"chunk_tokens": 128}),
)
SYSTEMS: dict[str, System] = {system.name: system for system in (*PDX, *baselines())}
