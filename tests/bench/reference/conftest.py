"""Reference engines of this process, and two processes with one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from node_harness import NodeProcess
from reference_prompts import SETTINGS, SHAPES, connector_to

from pdx.bench.reference.engine import ReferenceEngine
from pdx.bench.reference.pair import EngineProcess


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Equal sums: the number of threads decides in which order they are added."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., ReferenceEngine]]:
    """Makes tiny engines, attached to `node` where one is given; closes them after the test."""
    made: list[ReferenceEngine] = []

    def make(node: NodeProcess | None = None, **settings: Any) -> ReferenceEngine:
        connector = connector_to(node.address) if node is not None else None
        made.append(ReferenceEngine(SHAPES, connector=connector, **{**SETTINGS, **settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    """Two engine processes in which each test opens what it needs."""
    started = [EngineProcess() for _ in range(2)]
    for process in started:
        process.do("close")  # it is up
    yield started
    for process in started:
        process.close()
