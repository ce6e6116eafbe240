"""The order in which the load thread takes what is submitted, how it follows what is being filled, and what it says."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import pytest
from toy_engine import PAGE_BYTES, layout

import pdx.engine.loader as loader_module
from pdx.client.connection import Connection
from pdx.engine.copier import Scatter
from pdx.engine.loader import OVERTAKEN, PIECE_BYTES, Loader
from pdx.engine.plan import LoadPlan, PagesPlan
from pdx.memory.arena import NEVER, Arena
from pdx.memory.share import Share
from pdx.memory.slot import Slot
from pdx.testing.waiting import wait_until

LAYERS = layout().num_layers


class Node:
    """What a load sees of its node: an arena whose slots are named by their offsets, and a connection."""

    def __init__(self) -> None:
        self.filled: dict[int, int] = {}  # by offset, where it is not all of them
        self.stale: set[int] = set()
        self.is_alive = True
        self.counted: list[str] = []
        self.looks: list[int] = []
        self.load_s = 0.0

    def is_current(self, slot: Slot) -> bool:
        return slot.offset not in self.stale

    def filled_slices(self, slot: Slot) -> int:
        self.looks.append(slot.offset)
        return self.filled.get(slot.offset, LAYERS)

    def count(self, reason: str, *args: object) -> None:
        self.counted.append(reason)


def load_of(name: str, num_blocks: int, offset: int = 0, *, num_chunks: int = 1) -> LoadPlan:
    """Of no transfer. Chunk number i of it is at `offset + i` and has the blocks [i, i + 1) * num_blocks."""
    return LoadPlan.of(
        name,
        None,
        [
            PagesPlan([Slot(offset + at, 1, 1)], num_blocks, 0, list(range(at * num_blocks, (at + 1) * num_blocks)))
            for at in range(num_chunks)
        ],
    )


class Copies(Scatter):
    """Notes what is copied: for each call the offsets and the layers."""

    def __init__(self, on_copy: Callable[[], object] = lambda: None) -> None:
        self.calls: list[tuple[list[int], range]] = []
        self.closed = 0
        self._on_copy = on_copy

    def copy(self, pages: Sequence[PagesPlan], layers: range) -> list[PagesPlan]:
        self.calls.append(([each.slots[0].offset for each in pages], layers))
        self._on_copy()
        return []

    def close(self) -> None:
        self.closed += 1


class Gate:
    """A loader whose first load waits, so that those behind it are all there when it goes on."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.is_open = threading.Event()
        self.loader = Loader(layout(), Share(0, 1))
        self.submit(("first", 1))

    def submit(self, *sizes: tuple[str, int]) -> None:
        for name, num_blocks in sizes:
            submit(self.loader, load_of(name, num_blocks), Copies(partial(self._copied, name)))

    def _copied(self, name: str) -> None:
        self.began.append(name)
        assert self.is_open.wait(20)

    def run(self) -> list[str]:
        """Everything that was submitted, in the order in which it was loaded."""
        self.is_open.set()
        self.loader.close()
        return self.began


def submit(loader: Loader, load: LoadPlan, copies: Scatter, node: Node | None = None) -> None:
    seen = node or Node()
    loader.submit(load, copies, cast("Connection", seen), cast("Arena", seen))


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


def test_a_small_load_does_not_stand_behind_a_large_one_that_has_begun(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large one goes on behind it, and is over when all of it is copied."""
    wait_until(lambda: gate.began == ["first"], what="it is under way")
    monkeypatch.setattr(loader_module, "PIECE_S", 0.0)  # a piece has the least that a piece has
    copied: list[tuple[str, int]] = []

    def load(name: str, num_chunks: int) -> Copies:
        copies = Copies(lambda: copied.append((name, len(copies.calls[-1][0]))))
        submit(gate.loader, load_of(name, PIECE_BYTES // PAGE_BYTES // LAYERS // 2 + 1, num_chunks=num_chunks), copies)
        return copies

    large = load("large", 50)
    copy = large.copy

    def then_a_small_one(pages: Sequence[PagesPlan], layers: range) -> list[PagesPlan]:
        lost = copy(pages, layers)
        if len(large.calls) == 2:
            load("small", 2)
        return lost

    large.copy = then_a_small_one  # type: ignore[method-assign]
    gate.run()
    assert copied == [("large", 2), ("large", 2), ("small", 2), *[("large", 2)] * 23]
    assert gate.loader.take_finished() == ({"first", "large", "small"}, set())
    assert [offset for offsets, _ in large.calls for offset in offsets] == [*range(50)], "each once"


def test_a_large_load_is_overtaken_by_a_bounded_number_of_blocks(gate: Gate) -> None:
    """However many small ones come."""
    gate.submit(("large", 100), *((f"{index}", 10) for index in range(1000)))
    began = gate.run()
    assert 0 < began.index("large") - 1 <= OVERTAKEN * 100 / 10


def test_what_fails_in_its_turn_is_reported(gate: Gate) -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    copies = Copies(broken)
    submit(gate.loader, load_of("broken", 3), copies)
    gate.submit(("whole", 2))
    gate.run()
    assert gate.loader.take_finished() == ({"first", "broken", "whole"}, {0, 1, 2})
    assert copies.closed == 1


# ---- what is still being filled ----------------------------------------------------------------


@pytest.fixture
def loader() -> Iterator[Loader]:
    made = Loader(layout(), Share(0, 1))
    yield made
    made.close()


def test_slices_are_copied_as_they_are_filled_and_each_once(loader: Loader) -> None:
    node, copies = Node(), Copies()

    def copied() -> Counter[tuple[int, int]]:
        return Counter((offset, layer) for offsets, layers in copies.calls for offset in offsets for layer in layers)

    node.filled = {1: 1, 2: 0}
    submit(loader, load_of("a", 2, num_chunks=4), copies, node)
    wait_until(lambda: copied() == Counter([*itertools.product((0, 3), range(LAYERS)), (1, 0)]), what="what is there")
    assert copies.calls[0] == ([0, 3], range(LAYERS)), "at once, what is alike"
    assert loader.take_finished() == (set(), set())
    node.filled = {1: 2, 2: 2}
    wait_until(lambda: sum(copied().values()) == 2 * LAYERS + 4, what="what was filled meanwhile, too")
    node.filled = {}
    wait_until(lambda: loader.take_finished() == ({"a"}, set()), what="the load is over")
    assert copied() == Counter(itertools.product(range(4), range(LAYERS)))
    assert copies.closed == 1


def test_a_look_costs_the_same_for_any_number_of_chunks(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred loads of long prompts wait beside the engine's own thread."""
    monkeypatch.setattr(loader_module, "LOOK_AT_ALL_S", 1000.0)
    node = Node()
    node.filled = dict.fromkeys(range(1000), 1)
    submit(loader, load_of("a", 1, num_chunks=1000), Copies(), node)
    wait_until(lambda: len(node.looks) > 1000 + 20, what="it looks again")
    assert node.looks[:1000] == [*range(1000)]
    assert set(node.looks[1000:]) == {0}
    node.filled = {}
    wait_until(lambda: loader.take_finished() == ({"a"}, set()), what="the load is over")


def test_a_chunk_that_is_filled_before_those_before_it_is_seen(loader: Loader) -> None:
    node, copies = Node(), Copies()
    node.filled = {0: 0, 1: 0}
    submit(loader, load_of("a", 1, num_chunks=2), copies, node)
    wait_until(lambda: len(node.looks) > 4, what="it waits")
    node.filled = {0: 0}
    wait_until(lambda: copies.calls == [([1], range(LAYERS))], what="the second one is copied")
    node.filled = {}


def test_others_are_loaded_while_one_is_being_filled(loader: Loader) -> None:
    node = Node()
    node.filled = {0: 0}
    submit(loader, load_of("slow", 1), Copies(), node)
    for name in ("b", "c"):
        submit(loader, load_of(name, 500), Copies())
        wait_until(lambda: name in loader.take_finished()[0], what=name)  # noqa: B023
    node.filled = {}
    wait_until(lambda: loader.take_finished() == ({"slow"}, set()), what="its turn has come")


@pytest.mark.parametrize("end", ["never", "stale"])
def test_a_chunk_that_will_never_be_whole_fails_alone(loader: Loader, end: str) -> None:
    """Also what was copied of it: the engine computes its blocks again."""
    node, copies = Node(), Copies()
    node.filled = {1: 1}
    submit(loader, load_of("a", 2, num_chunks=2), copies, node)
    wait_until(lambda: len(copies.calls) == 2, what="a part is copied")
    if end == "never":
        node.filled = {1: NEVER}
    else:
        node.stale = {1}
    wait_until(lambda: loader.take_finished() == ({"a"}, {2, 3}), what="its blocks have failed")
    assert node.counted == ["load_failed"]


def test_a_load_ends_with_its_node(loader: Loader) -> None:
    node = Node()
    node.filled = {0: 1}
    submit(loader, load_of("a", 2), Copies(), node)
    node.is_alive = False
    wait_until(lambda: loader.take_finished() == ({"a"}, {0, 1}), what="it has failed")


def test_a_load_that_nothing_comes_of_has_a_deadline() -> None:
    loader, node = Loader(layout(), Share(0, 1), patience_s=0.1), Node()
    node.filled = {0: 1}
    submit(loader, load_of("a", 2), Copies(), node)
    wait_until(lambda: loader.take_finished() == ({"a"}, {0, 1}), what="it has failed")
    assert node.counted == ["load_late", "load_failed"]
    loader.close()


def test_what_is_still_being_filled_when_the_loader_closes_has_failed(loader: Loader) -> None:
    node, copies = Node(), Copies()
    node.filled = {1: 1}
    submit(loader, load_of("a", 2, num_chunks=2), copies, node)
    wait_until(lambda: len(copies.calls) == 2, what="what is there is copied")
    loader.close()
    assert loader.take_finished() == ({"a"}, {2, 3})
    assert copies.closed == 1


def test_how_long_a_chunk_takes_is_told_once_bytes_were_copied(loader: Loader) -> None:
    """A rate of nothing would be infinite, and the heartbeat that tells it no message."""
    node = Node()
    submit(loader, load_of("nothing", 0), Copies(), node)
    wait_until(lambda: loader.take_finished()[0], what="loaded")
    assert node.load_s == 0
    submit(loader, load_of("a", 4), Copies(), node)
    wait_until(lambda: loader.take_finished()[0], what="loaded")
    assert 0 < node.load_s < 60
