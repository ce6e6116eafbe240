"""Fixtures of the tests of pdx.cuda: a fake driver in this process, and processes with fakes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fake_cuda import FakeCuda, fake_cuda
from gpu_child import GpuChild

from pdx.cuda import memory
from pdx.cuda.gpu import Gpu


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """Two fake GPUs of 64 MiB; a test gives back all it takes from them."""
    with fake_cuda(gpus=2, nbytes=64 << 20) as driver:
        yield driver
        driver.heal()
        assert (driver.leftovers(), memory.num_mapped()) == ({}, 0)
        assert driver.spoiled == []


@pytest.fixture
def gpu(fake: FakeCuda) -> Gpu:
    return Gpu.find("0")


@pytest.fixture
def spawn() -> Iterator[Callable[..., GpuChild]]:
    """Starts processes with a fake driver of those settings; ends them after the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(GpuChild(settings))


@pytest.fixture
def forget_mapped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """For tests in which the driver refuses to release memory: what still counts as mapped is forgotten after them."""
    monkeypatch.setattr(memory, "_mapped", set())
