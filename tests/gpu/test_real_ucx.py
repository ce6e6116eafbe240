"""UCX moves a GPU's memory, and between it and host memory. Not in a process with NIXL, which brings another UCX."""

from __future__ import annotations

from typing import ClassVar

import pytest
from ucx_conformance import LEAVES_A_WORKER, UcxConformance

from pdx.testing.channel_conformance import BetweenKindsOfMemory
from pdx.testing.channel_stage import GpuBlock, HostFile, SideMemory
from pdx.transports.channel import Region
from pdx.transports.ucx.region import UcxRegion

pytestmark = pytest.mark.usefixtures("cuda")


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> None:
    """The check of all tests, but for a few."""
    if not any(name in request.node.name for name in LEAVES_A_WORKER):
        request.getfixturevalue("nothing_leaks")


class OnGpu:
    region: ClassVar[type[Region]] = UcxRegion
    memories: ClassVar[tuple[type[SideMemory], ...]] = (GpuBlock,)


class TestUcx(OnGpu, UcxConformance):
    pass


class TestFromGpuToHost(OnGpu, BetweenKindsOfMemory):
    memories = (GpuBlock, HostFile)


class TestFromHostToGpu(OnGpu, BetweenKindsOfMemory):
    memories = (HostFile, GpuBlock)
