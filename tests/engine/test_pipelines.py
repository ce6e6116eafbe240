"""Engines of other pipelines read each other's chunks, if they cut their layers alike."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from node_harness import NodeProcess, NodeThread
from test_two_nodes import two_nodes
from toy_engine import BLOCK, CHUNK, LAYERS, Request, ToyEngine, tokens
from unequal import check_disk, check_handed_over, check_loaded

from pdx.vllm.step import step_record

WHOLE = (LAYERS,)


class Shape(NamedTuple):
    """The layers of each stage of who writes and of who reads, and of each part; ranks of each, and shards."""

    writer: tuple[int, ...]
    reader: tuple[int, ...]
    cut: tuple[int, ...]
    writers: int = 1
    readers: int = 1
    shards: int = 1

    def engine(self, address: str, name: str, stages: tuple[int, ...], ranks: int, **settings: Any) -> ToyEngine:
        cut = {"heads": self.shards, "ranks": ranks, "stages": stages, "cut": self.cut}
        return ToyEngine(address, name, self.shards, **cut, **settings)

    def write(self, address: str) -> contextlib.closing[ToyEngine]:
        return contextlib.closing(self.engine(address, "writer", self.writer, self.writers))

    def read(self, address: str) -> contextlib.closing[ToyEngine]:
        return contextlib.closing(self.engine(address, "reader", self.reader, self.readers))

    @property
    def per_chunk(self) -> int:
        """Slots that a chunk of the prompt has."""
        return len(self.cut) * self.shards


SHAPES = {
    "1 to 2": Shape(WHOLE, (1, 2), (1, 2)),
    "2 to 1": Shape((1, 2), WHOLE, (1, 2)),
    "2 to 2": Shape((1, 2), (1, 2), (1, 2)),
    "unequal stages": Shape((1, 2), (2, 1), (1, 1, 1)),
    "3 to 2": Shape((1, 1, 1), (2, 1), (1, 1, 1)),
    "2 stages of 2 ranks to 1": Shape((1, 2), WHOLE, (1, 2), writers=2, shards=2),
    "1 to 2 stages of 2 ranks": Shape(WHOLE, (1, 2), (1, 2), readers=2, shards=2),
    "2 stages of 4 ranks with the same heads to 2 ranks": Shape((2, 1), WHOLE, (2, 1), 4, 2, 1),
}
PIPELINES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@PIPELINES
def test_a_prompt_is_loaded_whatever_the_pipeline(start_here: Callable[..., NodeThread], shape: Shape) -> None:
    check_loaded(start_here(), shape, more=1)


@PIPELINES
def test_a_prompt_is_handed_over_between_two_nodes(
    start_node: Callable[..., NodeProcess], place: Path, shape: Shape
) -> None:
    check_handed_over(*two_nodes(start_node, place), shape)


@PIPELINES
def test_a_prompt_is_handed_over_on_one_node(start_here: Callable[..., NodeThread], shape: Shape) -> None:
    node, prompt = start_here(), tokens(4, 2 * CHUNK + 6)
    with shape.write(node.address) as first, shape.read(node.address) as second:
        first.finish(first.save(prompt, {"do_remote_decode": True, "transfer_id": "t" * 16}, step=7))
        decode = Request("d", [*prompt, 7], {"do_remote_prefill": True, "transfer_id": "t" * 16})
        decode.kv_transfer_params["prefill_tokens"] = len(prompt)
        assert second.admit(decode) == set()
        assert decode.num_computed == len(prompt)
        second.check_cache(decode, decode.num_computed)
        second.finish(decode)
        node.wait_at_rest()


@pytest.mark.parametrize("shape", [SHAPES["2 to 1"], SHAPES["unequal stages"]], ids=["2 to 1", "unequal stages"])
def test_the_disk_serves_readers_of_another_pipeline(on_disk: Callable[[], NodeThread], shape: Shape) -> None:
    check_disk(on_disk, shape, more=1)


def test_layers_that_are_cut_otherwise_are_others(start_here: Callable[..., NodeThread]) -> None:
    node, prompt = start_here(), tokens(6, 2 * CHUNK)
    with SHAPES["1 to 2"].write(node.address) as cut, contextlib.closing(ToyEngine(node.address, "whole")) as whole:
        cut.finish(cut.save(prompt))
        assert whole.load(prompt) == 0
        [unshared] = [one.unshared for one in node.status().attached if one.unshared]
    assert "stages '' and '1,2'" in unshared


def test_a_stage_that_fails_leaves_nothing_half(start_here: Callable[..., NodeThread]) -> None:
    node, shape = start_here(), SHAPES["2 to 1"]
    with shape.write(node.address) as writer, shape.read(node.address) as reader:
        writer.fails_at = (1, 2)
        with pytest.raises(Exception, match="layer 2"):
            writer.save(tokens(7, 2 * CHUNK))
        writer.fails_at = None
        assert reader.load(tokens(7, 2 * CHUNK)) == 0


def test_a_worker_of_another_stage_is_awaited(start_here: Callable[..., NodeThread]) -> None:
    """Room is for all stages: without the workers of one of them there is none."""
    node, shape = start_here(), SHAPES["2 to 1"]
    with shape.write(node.address) as writer:
        writer.worker_guards[1].close()
        writer.workers.pop()
        writer.worker_guards.pop()
        writer.by_rank.pop()
        writer.layers.pop()
        writer.finish(writer.save(tokens(8, 2 * CHUNK)))
        assert node.status().chunks == {}


class Overlapping(ToyEngine):
    """Its last stage is a step behind the others, as where an engine plans a step before the last one is over."""

    def __init__(self, address: str, name: str, stages: tuple[int, ...], **settings: Any) -> None:
        super().__init__(address, name, stages=stages, **settings)
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


@pytest.mark.parametrize("step", [7, CHUNK, 1000])
def test_a_stage_may_be_behind_the_one_before_it(start_here: Callable[..., NodeThread], step: int) -> None:
    """Also when a request has ended meanwhile, and its blocks are another's."""
    node, lost, kept = start_here(), tokens(9, 3 * CHUNK + 3), tokens(10, 3 * CHUNK + 3)
    num_blocks = -(-(len(kept) + 64) // BLOCK)  # of one request
    with (
        contextlib.closing(Overlapping(node.address, "writer", (1, 2), num_blocks=num_blocks)) as writer,
        SHAPES["2 to 1"].read(node.address) as reader,
    ):
        writer.finish(writer.save(lost, step=step))
        writer.finish(writer.save(kept, step=step))
        writer.catch_up()
        node.wait_at_rest()
        assert reader.load(kept) == 3 * CHUNK
        reader.load(lost)  # whatever it finds is right
