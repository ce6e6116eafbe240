"""NIXL moves a GPU's memory, and between it and host memory. Not in a process with UCXX, which brings another UCX."""

from __future__ import annotations

from typing import ClassVar

import pytest
from ucx_conformance import UcxConformance

from pdx.testing.channel_conformance import BetweenKindsOfMemory
from pdx.testing.channel_stage import GpuBlock, HostFile, SideMemory
from pdx.transports.channel import Region
from pdx.transports.nixl.region import NixlRegion

pytestmark = pytest.mark.usefixtures("cuda")


class OnGpu:
    region: ClassVar[type[Region]] = NixlRegion
    memories: ClassVar[tuple[type[SideMemory], ...]] = (GpuBlock,)


class TestNixl(OnGpu, UcxConformance):
    pass


class TestFromGpuToHost(OnGpu, BetweenKindsOfMemory):
    memories = (GpuBlock, HostFile)


class TestFromHostToGpu(OnGpu, BetweenKindsOfMemory):
    memories = (HostFile, GpuBlock)
