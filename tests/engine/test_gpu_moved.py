"""Tokens that are loaded at other positions by an engine on a GPU, on streams that lag: see `stream_bed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moved_bed import DIM, MOVED, PAGE, ROPE, SHAPE, check_moved, positions, tokens  # noqa: F401
from node_harness import attached
from stream_bed import Bed
from toy_engine import BLOCK, CHUNK, LAYERS, Request, ToyEngine

from pdx.engine import gpu_copier
from pdx.kernels.turned_gpu import PageStrides, TurnedPages
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Delete

STRIDES = PageStrides.of([torch.zeros(256, 1, BLOCK, 2 * DIM)], 256, 1, DIM, torch.float32)
SETTINGS: dict[str, Any] = {
    "page_bytes": PAGE, "shape": SHAPE, "moved": True, "num_blocks": 256,
    "turning": TurnedPages(ROPE, STRIDES, torch.float32),
}  # fmt: skip


def saved(bed: Bed, engine: ToyEngine, prompt: list[int]) -> None:
    """What a request leaves is there."""
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(len(prompt) // CHUNK)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_was_computed_elsewhere_is_turned_behind_what_was_computed_before(
    beds: Callable[..., Bed], on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several launches, since one takes few bytes here; the blocks' last owner still writes when the load begins."""
    monkeypatch.setattr(gpu_copier, "LAUNCH_BYTES", 16 * 2 * DIM * 4)
    bed = beds(on_gpu)
    first, second = bed.engine(**SETTINGS), bed.engine(**SETTINGS)
    history = tokens(1, 6 * CHUNK + 3)
    saved(bed, first, history)
    for number, (kept, lost) in enumerate([(5, CHUNK), (CHUNK + 3, 7)]):
        prompt = [*history[:kept], *history[kept + lost : 6 * CHUNK], *tokens(number, 6)]
        bed.log.clear()
        second.streams.do(lambda: second.caches[0].fill_(0xEE))
        request = second.save(prompt, MOVED)
        assert request.loaded == len(prompt) - 6
        second.streams.synchronize()
        assert check_moved(second, request, len(prompt)) == kept + 6, "the sink, and what is new"
        launches = [entry for entry in bed.log if isinstance(entry, tuple) and entry[0] == "scatter_turned"]
        assert {first for _, first, _ in launches} == set(range(LAYERS)), launches
        second.finish(request)
    exact = [*history[:5], *history[5 + CHUNK : 6 * CHUNK]]
    assert second.load(exact) == BLOCK, "an exact request has its own first block alone"


def test_a_chunk_that_goes_while_it_is_turned_is_reported(bed: Bed) -> None:
    first, second = bed.engine(**SETTINGS), bed.engine(**SETTINGS, lease_s=1.0)
    history = tokens(1, 10 * CHUNK + 3)
    saved(bed, first, history)
    keys = first.scheduler.track(Request("its keys", history)).keys.leading(10)
    prompt = [*history[:5], *history[CHUNK + 5 : 10 * CHUNK], 1]
    request = Request("late", prompt, MOVED)
    external = second.match(request)
    second.allocate(request, external)
    with second.streams.held(second.streams.loading):
        second.run_worker(0, second.planned(), {})
        wait_until(lambda: second.streams.loading.waiting, what="it is queued")
        wait_until(lambda: not bed.node.status().leases, what="the lease has ended")
        with attached(bed.address) as wire:
            assert wire.ask(Delete(keys[9:])).count == 1
    failed = second.finish_load(request)
    assert failed
    request.num_computed = min(request.block_ids.index(block) for block in failed) * BLOCK
    assert 0 < request.num_computed < external
    second.streams.synchronize()
    check_moved(second, request, request.num_computed)
    second.finish(request)
