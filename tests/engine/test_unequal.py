"""Engines of other tensor parallel sizes and pipelines read each other's chunks, if they cut heads and layers alike."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from node_harness import MIB, NodeThread
from stream_bed import Bed
from toy_engine import BLOCK, CHUNK, LAYERS, Engines, Request, ToyEngine, layout, tokens
from two_nodes_bed import DECODE, LENGTH, PREFILL, two_nodes

from pdx.config import ConnectorConfig
from pdx.engine.worker import WorkerHalf
from pdx.errors import LayoutError
from pdx.memory.share import Share
from pdx.testing.waiting import wait_until
from pdx.vllm.step import step_record

WHOLE = (LAYERS,)


class Shape(NamedTuple):
    """Ranks that write, ranks that read, the model's heads, and into how many shards its chunks are cut; the layers of
    each stage of who writes and of who reads, and of each part."""

    writers: int = 1
    readers: int = 1
    heads: int = 1
    shards: int = 1
    writer: tuple[int, ...] = WHOLE
    reader: tuple[int, ...] = WHOLE
    cut: tuple[int, ...] = WHOLE

    def engine(self, address: str, ranks: int, stages: tuple[int, ...] = WHOLE) -> contextlib.closing[ToyEngine]:
        settings = {"heads": self.heads, "page_bytes": 64 * self.heads // self.shards}
        made = ToyEngine(address, "", self.shards, ranks=ranks, stages=stages, cut=self.cut, **settings)
        return contextlib.closing(made)

    def write(self, address: str) -> contextlib.closing[ToyEngine]:
        return self.engine(address, self.writers, self.writer)

    def read(self, address: str) -> contextlib.closing[ToyEngine]:
        return self.engine(address, self.readers, self.reader)

    @property
    def per_chunk(self) -> int:
        """Slots that a chunk of the prompt has."""
        return len(self.cut) * self.shards


SHAPES = {
    "4 ranks to 2": Shape(4, 2, 4, 4),
    "2 to 2 in four shards": Shape(2, 2, 8, 4),
    "more ranks than heads, to 1": Shape(4, 1, 2, 2),
    "latent attention, 1 to 4": Shape(1, 4, 1, 1),
    "2 stages to 1": Shape(writer=(1, 2), cut=(1, 2)),
    "unequal stages": Shape(writer=(1, 2), reader=(2, 1), cut=(1, 1, 1)),
    "1 to 2 stages of 2 ranks": Shape(1, 2, 2, 2, reader=(1, 2), cut=(1, 2)),
    "2 stages of 4 ranks with the same heads to 2 ranks": Shape(4, 2, 1, 1, writer=(2, 1), cut=(2, 1)),
}


def shapes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shape", [SHAPES[name] for name in names], ids=names)


@shapes(*SHAPES)
def test_each_finds_what_the_other_one_has_saved(start_here: Callable[..., NodeThread], shape: Shape) -> None:
    node, prompt, other = start_here(), tokens(1, 3 * CHUNK + 3), tokens(2, 2 * CHUNK + 1)
    with shape.write(node.address) as writer, shape.read(node.address) as reader:
        writer.finish(writer.save(prompt, step=7))
        node.wait_sealed(3 * shape.per_chunk)
        assert reader.load(prompt) == 3 * CHUNK
        reader.finish(reader.save(other))
        node.wait_sealed(5 * shape.per_chunk)
        assert writer.load(other) == 2 * CHUNK
        node.wait_at_rest()
        assert node.status().chunks == {"sealed": 5 * shape.per_chunk}, "of ranks with the same heads one writes them"


@pytest.mark.parametrize("num_nodes", [1, 2])
@shapes("more ranks than heads, to 1", "unequal stages", "1 to 2 stages of 2 ranks")
def test_a_prompt_is_handed_over(
    start_here: Callable[..., NodeThread], place: Path, shape: Shape, num_nodes: int
) -> None:
    nodes = two_nodes(start_here, place) if num_nodes == 2 else [start_here(name="one")]
    params = PREFILL if num_nodes == 2 else {**PREFILL, "decode_node": ""}
    with shape.write(nodes[0].address) as first, shape.read(nodes[-1].address) as second:
        prompt = tokens(3, LENGTH)
        first.finish(first.save(prompt, params, step=CHUNK))
        decode = Request("d", [*prompt, 7], {**DECODE, "prefill_tokens": len(prompt)})
        assert second.admit(decode) == set()
        assert decode.num_computed >= LENGTH // BLOCK * BLOCK
        second.check_cache(decode, decode.num_computed)
        second.finish(decode)
        for node in nodes:
            node.wait_at_rest()


@shapes("2 to 2 in four shards", "unequal stages")
def test_the_next_node_finds_what_the_one_before_has_left_on_the_disk(
    on_disk: Callable[[], NodeThread], shape: Shape
) -> None:
    prompt, node = tokens(4, 3 * CHUNK + 1), on_disk()
    with shape.write(node.address) as writer:
        writer.finish(writer.save(prompt))
        node.wait_stored(3 * shape.per_chunk)
    node.close()
    node = on_disk()
    with shape.read(node.address) as reader:
        assert reader.load(prompt) == 3 * CHUNK
        node.wait_at_rest()


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (Shape(heads=2), Shape(heads=2, shards=2), ""),
        (Shape(cut=(1, 2)), Shape(), "stages '' and '1,2'"),
    ],
)
def test_what_is_cut_otherwise_is_another(engines: Engines, one: Shape, other: Shape, said: str) -> None:
    node, prompt = engines.node, tokens(7, 2 * CHUNK)
    with one.write(node.address) as first, other.write(node.address) as second:
        first.finish(first.save(prompt))
        assert second.load(prompt) == 0
        assert any(each.unshared and said in each.unshared for each in node.status().attached)


# ---- GPUs: streams are LaggingStreams, the driver is the fake one ------------------------------------------------


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host node", "GPU node"])
def test_a_gpu_cuts_pages_as_well(beds: Callable[..., Bed], on_gpu: bool) -> None:
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


@pytest.mark.parametrize("shards", [1, 2])
def test_shards_of_one_gpu_go_to_two(beds: Callable[..., Bed], shards: int) -> None:
    """Of one shard, ranks on several GPUs find what one of them has written."""
    bed = beds(True, "--gpus", "2", gpu="", more_gpus=["0", "1"], gpu_arena_bytes=MIB)
    prompt, settings = tokens(9, 3 * CHUNK + 3), {"heads": shards**2, "page_bytes": 64 * shards, "shards": shards}
    two = bed.engine(gpus=("0", "1"), ranks=2, **settings)
    one = bed.engine(gpus=("0",), ranks=1, **settings) if shards > 1 else two
    one.finish(one.save(prompt))
    bed.node.wait_sealed(12 if shards > 1 else 3)  # two shards of three chunks are on the GPU and in host memory
    assert two.load(prompt) == 3 * CHUNK
    bed.node.wait_at_rest()
    assert "load_failed" not in bed.node.status().counters


# ---- ranks ---------------------------------------------------------------------------------------------------------


def test_ranks_that_write_nothing_do_not_hide_what_computing_takes(start_here: Callable[..., NodeThread]) -> None:
    node, prompt = start_here(), tokens(10, 6 * CHUNK)
    with Shape(2, 1).write(node.address) as engine:
        engine.finish(engine.save(prompt))
        node.wait_sealed(6)
        assert engine.load(prompt) == 6 * CHUNK
        assert engine.scheduler._times.news.chunk_s > 0


@pytest.mark.parametrize(
    ("rank", "ranks", "shards", "expected"),
    [
        (0, 1, 1, Share(0, 1)),
        (1, 2, 8, Share(4, 4)),
        (1, 4, 2, Share(0, 1, writes=False)),
        (2, 4, 2, Share(1, 1)),
    ],
)
def test_which_shards_a_rank_has(rank: int, ranks: int, shards: int, expected: Share) -> None:
    assert Share.of(rank, ranks, shards) == expected


def test_what_cannot_be_cut_is_refused(place: Path) -> None:
    with pytest.raises(LayoutError, match="3 shards of 2 ranks"):
        Share.of(0, 2, 3)
    cut = layout(num_shards=2, num_heads=2, page_bytes=64)
    half = WorkerHalf(ConnectorConfig(node=f"ipc://{place}/none", start_node=False), cut, "e", 0, ranks=1)
    with contextlib.closing(half), pytest.raises(LayoutError, match=r"shape \(128,\) cannot be cut into 2 shards of 2"):
        half.register({str(at): torch.zeros(4, 128, dtype=torch.uint8) for at in range(LAYERS)}, 4)


# ---- stages --------------------------------------------------------------------------------------------------------


def test_a_stage_that_fails_leaves_nothing_half(start_here: Callable[..., NodeThread]) -> None:
    node, shape = start_here(), SHAPES["2 stages to 1"]
    with shape.write(node.address) as writer, shape.read(node.address) as reader:
        writer.fails_at = (1, 2)
        with pytest.raises(Exception, match="layer 2"):
            writer.save(tokens(7, 2 * CHUNK))
        writer.fails_at = None
        assert reader.load(tokens(7, 2 * CHUNK)) == 0


def test_a_worker_of_another_stage_is_awaited(start_here: Callable[..., NodeThread]) -> None:
    """Room is for all stages: without the workers of one of them there is none."""
    node, shape = start_here(), SHAPES["2 stages to 1"]
    with shape.write(node.address) as writer:
        writer.worker_guards[1].close()
        wait_until(
            lambda: [each.kind for each in node.status().attached].count("worker") == 1, what="the node has heard of it"
        )
        for of_worker in (writer.workers, writer.worker_guards, writer.by_rank, writer.layers):
            of_worker.pop()
        writer.finish(writer.save(tokens(8, 2 * CHUNK)))
        assert node.status().chunks == {}


class Overlapping(ToyEngine):
    """Its last stage is a step behind the others, as where an engine plans a step before the last one is over."""

    def __init__(self, address: str, **settings: Any) -> None:
        super().__init__(address, **settings)
        self._behind: deque[tuple[Any, Any]] = deque()

    def step(self, *work: tuple[Request, int]) -> Any:
        scheduled = {request.request_id: (SimpleNamespace(**vars(request)), count) for request, count in work}
        plan = self.scheduler_guard.plan_step(partial(step_record, self.output(scheduled)))
        *first, _ = range(len(self.workers))
        for worker in first:
            self.run_worker(worker, plan, scheduled)
        self.catch_up(1)
        self._behind.append((plan, scheduled))
        for request, count in work:
            request.num_computed += count
        return plan

    def catch_up(self, left: int = 0) -> None:
        """Until the last stage is so many steps behind."""
        while len(self._behind) > left:
            self.run_worker(len(self.workers) - 1, *self._behind.popleft())


@pytest.mark.parametrize("step", [7, 1000])
def test_a_stage_may_be_behind_the_one_before_it(start_here: Callable[..., NodeThread], step: int) -> None:
    """Also when a request has ended meanwhile, and its blocks are another's."""
    node, lost, kept = start_here(), tokens(9, 3 * CHUNK + 3), tokens(10, 3 * CHUNK + 3)
    num_blocks = -(-(len(kept) + 64) // BLOCK)  # of one request
    with (
        contextlib.closing(Overlapping(node.address, stages=(1, 2), num_blocks=num_blocks)) as writer,
        SHAPES["2 stages to 1"].read(node.address) as reader,
    ):
        writer.finish(writer.save(lost, step=step))
        writer.finish(writer.save(kept, step=step))
        writer.catch_up()
        node.wait_at_rest()
        assert reader.load(kept) == 3 * CHUNK
        reader.load(lost)  # whatever it finds is right
