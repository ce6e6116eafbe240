"""The real UCXX and memory on a fake GPU. Runs beside test_ucx.py, in a process without NIXL's UCX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from cuda_world import two_gpus
from fake_cuda import FakeCuda

from pdx.cuda.memory import DeviceSpan
from pdx.errors import ChannelUnavailable
from pdx.testing.channel_stage import MIB, GpuBlock, HostFile
from pdx.transports.ucx import engine as ucx_engine
from pdx.transports.ucx.region import UcxRegion


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with two_gpus() as fake:
        yield fake


def test_ucxx_sees_device_memory_in_what_it_gets(fake, monkeypatch):
    """The real array type of the library; and regions give it such spans for a GPU's memory alone."""
    array = pytest.importorskip("ucxx._lib.arr").Array
    monkeypatch.setattr(ucx_engine, "UcxEngine", None)
    with closing(GpuBlock(MIB)) as block, closing(HostFile(MIB)) as host:
        for memory, is_cuda in ((block.memory, True), (host.memory, False)):
            region = UcxRegion.__new__(UcxRegion)
            region.memory = memory
            found = array(region.span(4096, 8192))
            assert (found.ptr, found.nbytes, found.cuda) == (memory.address + 4096, 8192, is_cuda)
            assert found.c_contiguous
    assert array(DeviceSpan(1 << 40, 3)).nbytes == 3


def test_ucx_as_it_is_installed_refuses_or_starts(fake):
    """The real library, which has no CUDA driver here: an error of ours, not a crash."""
    if not UcxRegion.availability().is_ok:
        pytest.skip("UCXX is not installed")
    with closing(GpuBlock(MIB)) as block, pytest.raises(ChannelUnavailable, match="cuda_copy"):
        UcxRegion.register(block.memory)
