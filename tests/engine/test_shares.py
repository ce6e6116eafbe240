"""Engines of other tensor parallel sizes read each other's chunks, if they cut them into as many shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from node_harness import MIB, NodeProcess, NodeThread
from stream_bed import Bed
from test_two_nodes import two_nodes
from toy_engine import CHUNK, LAYERS, ToyEngine, layout, tokens
from unequal import check_disk, check_handed_over, check_loaded

from pdx.config import ConnectorConfig
from pdx.engine.worker import WorkerHalf
from pdx.errors import LayoutError
from pdx.memory.share import Share


class Shape(NamedTuple):
    """Ranks that write, ranks that read, the model's heads, and into how many shards its chunks are cut."""

    writers: int
    readers: int
    heads: int
    shards: int

    def engine(self, address: str, name: str, ranks: int, **settings: Any) -> ToyEngine:
        page_bytes = 64 * self.heads // self.shards
        return ToyEngine(address, name, self.shards, ranks=ranks, heads=self.heads, page_bytes=page_bytes, **settings)

    def write(self, address: str) -> contextlib.closing[ToyEngine]:
        return contextlib.closing(self.engine(address, "writer", self.writers))

    def read(self, address: str) -> contextlib.closing[ToyEngine]:
        return contextlib.closing(self.engine(address, "reader", self.readers))

    @property
    def per_chunk(self) -> int:
        return self.shards


SHAPES = {
    "1 to 2": Shape(1, 2, 4, 2),
    "2 to 1": Shape(2, 1, 4, 2),
    "4 to 2": Shape(4, 2, 4, 4),
    "2 to 8": Shape(2, 8, 8, 8),
    "2 to 2 in four shards": Shape(2, 2, 8, 4),
    "more ranks than heads, to 1": Shape(4, 1, 2, 2),
    "1 to more ranks than heads": Shape(1, 4, 2, 2),
    "latent attention, 2 to 1": Shape(2, 1, 1, 1),
    "latent attention, 1 to 4": Shape(1, 4, 1, 1),
}
UNEQUAL = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@UNEQUAL
def test_a_prompt_is_loaded_whatever_the_number_of_ranks(start_here: Callable[..., NodeThread], shape: Shape) -> None:
    check_loaded(start_here(), shape)


@UNEQUAL
def test_a_prompt_is_handed_over_between_two_nodes(
    start_node: Callable[..., NodeProcess], place: Path, shape: Shape
) -> None:
    check_handed_over(*two_nodes(start_node, place), shape)


@pytest.mark.parametrize("shape", [SHAPES["2 to 1"], SHAPES["1 to 2"]], ids=["2 to 1", "1 to 2"])
def test_the_disk_serves_readers_of_another_size(on_disk: Callable[[], NodeThread], shape: Shape) -> None:
    check_disk(on_disk, shape)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host node", "GPU node"])
def test_a_gpu_cuts_pages_as_well(beds: Callable[..., Bed], on_gpu: bool) -> None:
    """Streams are LaggingStreams, the driver is the fake one."""
    bed, prompt = beds(on_gpu), tokens(5, 3 * CHUNK + 3)
    settings = {"heads": 4, "page_bytes": 128}
    one = bed.engine(ranks=1, shards=2, **settings)
    two = bed.engine(gpus=("0", "1"), ranks=2, **settings)
    one.finish(one.save(prompt, step=7))
    bed.node.wait_sealed(6)
    assert two.load(prompt) == 3 * CHUNK
    other = tokens(6, 2 * CHUNK)
    two.finish(two.save(other))
    bed.node.wait_sealed(10)
    assert one.load(other) == 2 * CHUNK
    bed.node.wait_at_rest()


@pytest.fixture
def on_two(beds: Callable[..., Bed]) -> Bed:
    """A node with host memory and an arena on each of two GPUs."""
    return beds(True, "--gpus", "2", gpu="", more_gpus=["0", "1"], gpu_arena_bytes=MIB)


def test_ranks_on_several_gpus_find_what_one_of_them_has_written(on_two: Bed) -> None:
    prompt = tokens(8, 3 * CHUNK + 3)
    engine = on_two.engine(gpus=("0", "1"), ranks=2, shards=1)
    engine.finish(engine.save(prompt))
    on_two.node.wait_sealed(3)
    assert engine.load(prompt) == 3 * CHUNK
    assert "load_failed" not in on_two.node.status().counters


def test_shards_of_one_gpu_go_to_two(on_two: Bed) -> None:
    prompt, settings = tokens(9, 3 * CHUNK + 3), {"heads": 4, "page_bytes": 128, "shards": 2}
    one = on_two.engine(gpus=("0",), ranks=1, **settings)
    two = on_two.engine(gpus=("0", "1"), ranks=2, **settings)
    one.finish(one.save(prompt))
    on_two.node.wait_sealed(12)  # two shards of three chunks, on the GPU and in host memory
    assert two.load(prompt) == 3 * CHUNK
    on_two.node.wait_at_rest()


def test_ranks_that_write_nothing_do_not_hide_what_computing_takes(start_here: Callable[..., NodeThread]) -> None:
    node, prompt = start_here(), tokens(10, 6 * CHUNK)
    with contextlib.closing(SHAPES["latent attention, 2 to 1"].engine(node.address, "e", 2)) as engine:
        engine.finish(engine.save(prompt))
        node.wait_sealed(6)
        assert engine.load(prompt) == 6 * CHUNK
        assert engine.scheduler._times.news.chunk_s > 0


def test_a_chunk_that_is_cut_otherwise_is_another(start_here: Callable[..., NodeThread]) -> None:
    node, prompt = start_here(), tokens(7, 2 * CHUNK)
    with (
        contextlib.closing(Shape(1, 1, 2, 1).engine(node.address, "whole", 1)) as whole,
        contextlib.closing(Shape(1, 1, 2, 2).engine(node.address, "cut", 1)) as cut,
    ):
        whole.finish(whole.save(prompt))
        assert cut.load(prompt) == 0


@pytest.mark.parametrize(
    ("rank", "ranks", "shards", "expected"),
    [
        (0, 1, 1, Share(0, 1)),
        (1, 2, 2, Share(1, 1)),
        (1, 2, 8, Share(4, 4)),
        (0, 4, 2, Share(0, 1)),
        (1, 4, 2, Share(0, 1, writes=False)),
        (2, 4, 2, Share(1, 1)),
        (3, 4, 1, Share(0, 1, writes=False)),
    ],
)
def test_which_shards_a_rank_has(rank: int, ranks: int, shards: int, expected: Share) -> None:
    assert Share.of(rank, ranks, shards) == expected


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match="3 shards of 2 ranks"):
        Share.of(0, 2, 3)


def test_pages_that_do_not_show_their_heads_cannot_be_cut(place: Path) -> None:
    cut = layout(num_shards=2, num_heads=2, page_bytes=64)
    half = WorkerHalf(ConnectorConfig(node=f"ipc://{place}/none", start_node=False), cut, "e", 0, ranks=1)
    with contextlib.closing(half), pytest.raises(LayoutError, match=r"shape \(128,\) cannot be cut into 2 shards of 2"):
        half.register({str(at): torch.zeros(4, 128, dtype=torch.uint8) for at in range(LAYERS)}, 4)
