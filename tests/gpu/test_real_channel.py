"""CUDA IPC passes the conformance suite on a real GPU; what differs with other kinds of memory, too."""

from __future__ import annotations

from typing import ClassVar

import pytest

from pdx.testing.channel_conformance import BetweenKindsOfMemory, BetweenProcesses, ChannelConformance
from pdx.testing.channel_stage import GpuBlock, HostFile, LegacyGpuBlock, SecondGpuBlock, SideMemory
from pdx.transports.channel import Region
from pdx.transports.cuda_ipc import CudaIpcRegion


class OnGpu:
    region: ClassVar[type[Region]] = CudaIpcRegion
    memories: ClassVar[tuple[type[SideMemory], ...]] = (GpuBlock,)
    death_s: ClassVar[float] = 40.0


class TestCudaIpc(OnGpu, ChannelConformance):
    pass


class TestLegacyHandles(OnGpu, BetweenProcesses):
    """No process opens its own handles."""

    memories = (LegacyGpuBlock,)


class TestFromGpuToHost(OnGpu, BetweenKindsOfMemory):
    memories = (GpuBlock, HostFile)


class TestFromHostToGpu(OnGpu, BetweenKindsOfMemory):
    memories = (HostFile, GpuBlock)


@pytest.mark.usefixtures("peer_gpu")
class TestFromGpuToGpu(OnGpu, BetweenKindsOfMemory):
    memories = (GpuBlock, SecondGpuBlock)
