"""CUDA IPC passes the suite on a fake driver: on one GPU all of it, with other kinds of memory what differs there, as
all else is that of shm."""

from __future__ import annotations

import pytest
from cuda_world import one_gpu, two_gpus

from pdx.testing.channel_conformance import BetweenKindsOfMemory, BetweenProcesses, ChannelConformance, ChannelSetting
from pdx.testing.channel_stage import GpuBlock, HostFile, LegacyGpuBlock, SecondGpuBlock
from pdx.testing.channel_writes import Writes
from pdx.transports.cuda_ipc import CudaIpcRegion


@pytest.mark.long
class TestCudaIpc(ChannelConformance):
    region = CudaIpcRegion
    memories = (GpuBlock,)
    world = one_gpu


@pytest.mark.long
class TestLegacyHandles(BetweenProcesses):
    """No process opens its own handles. The memory goes with its process."""

    region = CudaIpcRegion
    memories = (LegacyGpuBlock,)
    world = one_gpu


class TestFromGpuToHost(BetweenKindsOfMemory):
    region = CudaIpcRegion
    memories = (GpuBlock, HostFile)
    world = one_gpu


@pytest.mark.long
class TestFromHostToGpu(BetweenKindsOfMemory):
    region = CudaIpcRegion
    memories = (HostFile, GpuBlock)
    world = one_gpu


class TestFromGpuToGpu(ChannelSetting):
    region = CudaIpcRegion
    memories = (GpuBlock, SecondGpuBlock)
    world = two_gpus

    test_both_directions_at_once = Writes.test_both_directions_at_once
    test_to_and_from_another_process = Writes.test_to_and_from_another_process
