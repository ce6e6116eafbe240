"""Reference engines of this process, and two processes with one each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pdx.bench.reference.pair import EngineProcess


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Equal sums: the number of threads decides in which order they are added."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    """Two engine processes in which each test opens what it needs."""
    started = [EngineProcess() for _ in range(2)]
    for process in started:
        process.do("close")  # it is up
    yield started
    for process in started:
        process.close()
