"""The order in which the load thread takes what is submitted, and what it says of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from toy_engine import layout

from pdx.client.connection import Connection
from pdx.engine.loader import OVERTAKEN, Loader
from pdx.engine.plan import LoadPlan, PagesPlan
from pdx.memory.slot import Slot

NOBODY = cast("Connection", SimpleNamespace(count=lambda *args: None))  # the loads are of no transfer


def load_of(name: str, num_blocks: int) -> LoadPlan:
    return LoadPlan.of(name, None, [PagesPlan([Slot(0, 0, 1)], num_blocks, 0, list(range(num_blocks)))])


class Gate:
    """A loader whose first load waits, so that those behind it are all there when it goes on."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.is_open = threading.Event()
        self.loader = Loader(layout())
        self.loader.submit(load_of("first", 1), self.scatter, NOBODY)

    def scatter(self, load: LoadPlan) -> list[PagesPlan]:
        self.began.append(load.request_id)
        assert self.is_open.wait(20)
        return []

    def submit(self, *sizes: tuple[str, int]) -> None:
        for name, num_blocks in sizes:
            self.loader.submit(load_of(name, num_blocks), self.scatter, NOBODY)

    def run(self) -> list[str]:
        """Everything that was submitted, in the order in which it was loaded."""
        self.is_open.set()
        self.loader.close()
        return self.began


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.run()


def test_a_small_load_overtakes_large_ones_that_have_not_begun(gate: Gate) -> None:
    gate.submit(("large", 1000), ("larger", 2000), ("small", 1), ("smaller", 0))
    assert gate.run() == ["first", "smaller", "small", "large", "larger"]
    finished, failed = gate.loader.take_finished()
    assert finished == {"first", "large", "larger", "small", "smaller"}
    assert failed == set()


def test_loads_of_one_size_keep_their_order(gate: Gate) -> None:
    names = [f"{index}" for index in range(20)]
    gate.submit(*((name, 7) for name in names))
    assert gate.run() == ["first", *names]


def test_a_large_load_is_overtaken_by_a_bounded_number_of_blocks(gate: Gate) -> None:
    """However many small ones come."""
    gate.submit(("large", 100), *((f"{index}", 10) for index in range(1000)))
    began = gate.run()
    assert 0 < began.index("large") - 1 <= OVERTAKEN * 100 / 10


def test_what_fails_in_its_turn_is_reported(gate: Gate) -> None:
    def broken(load: LoadPlan) -> Any:
        raise RuntimeError("out of memory")

    gate.loader.submit(load_of("broken", 3), broken, NOBODY)
    gate.submit(("whole", 2))
    gate.run()
    assert gate.loader.take_finished() == ({"first", "broken", "whole"}, {0, 1, 2})
