"""The worker half on streams that lag: nobody is told, overwrites or lets go before the copies behind it have ended.

Streams are LaggingStreams, the driver is the fake one: on a node in host memory, page-locked, or on one with its arena
on the fake GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_cuda import FakeCuda
from stream_bed import Bed
from toy_engine import BLOCK, CHUNK, LAYERS, PAGE_BYTES, Request, decode_of, prefill_of, tokens

from pdx.cuda.memory import num_mapped
from pdx.engine import gpu_copier, step_save
from pdx.engine.streams import Streams
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Fill, Mark

PREFILL = prefill_of("x" * 20)


# ---- both kinds of node ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_gpu", "step", "mode"),
    [(False, 1000, "hooks"), (True, 3, "hooks"), (False, 7, "no hooks"), (True, 1000, "no hooks"), (True, 5, "graphs")],
)
def test_prompt_computed_once_is_loaded_by_another_engine(
    beds: Callable[..., Bed], on_gpu: bool, step: int, mode: str
) -> None:
    bed = beds(on_gpu)
    first, second = bed.engine(graphs=mode == "graphs"), bed.engine()
    first.skip_hooks = mode == "no hooks"
    prompt = tokens(1, 3 * CHUNK + 3)
    first.finish(first.save(prompt, step=step))
    bed.node.wait_sealed(3)
    assert second.load(prompt) == 3 * CHUNK
    bed.node.wait_at_rest()
    assert num_mapped() == 2 * on_gpu, "one mapping for each worker"


# ---- saving: who waits for a gather -----------------------------------------------------------


def test_blocks_of_a_preempted_request_may_be_computed_anew_at_once(bed: Bed) -> None:
    engine = bed.engine()
    prompt, other = tokens(5, 2 * CHUNK), tokens(6, 2 * CHUNK)
    with engine.streams.held(engine.streams.gathering):
        request = engine.save(prompt)
        request.num_preemptions += 1
        engine.free = [*request.block_ids, *engine.free]
        blocks, request.block_ids, request.num_computed = request.block_ids, [], 0
        thief = engine.save(other)
        assert thief.block_ids == blocks
    bed.node.wait_sealed(4)
    for each in (prompt, other):
        assert bed.engine().load(each) == 2 * CHUNK
    engine.finish(thief)
    engine.scheduler.finished(request)


def test_a_prefill_leg_that_generates_more_than_a_token_keeps_its_transfer(bed: Bed) -> None:
    """It ends while its prompt is being copied, and before it has heard of room for what it has generated."""
    prefill, decode = bed.engine(), bed.engine()
    prompt = tokens(14, 2 * CHUNK - 1)
    waiting = Request("d", [*prompt, 7], decode_of("x" * 20, prefill_tokens=len(prompt)))
    with prefill.streams.held(prefill.streams.gathering):
        request = prefill.save(prompt, PREFILL)
        assert decode.scheduler.matched_tokens(waiting, 0) is None
        request.all_token_ids.append(7)
        prefill.step((request, 1))
        prefill.finish(request)
        wait_until(lambda: bed.node.counter("aborted"), what="the room is given back")
    assert decode.match(waiting) == len(prompt)
    decode.scheduler.finished(waiting)


def test_a_page_is_gathered_after_its_layer_was_computed(bed: Bed) -> None:
    engine = bed.engine()
    prompt = tokens(7, CHUNK)
    with engine.streams.held(engine.streams.compute()):
        engine.finish(engine.save(prompt))
        wait_until(lambda: engine.streams.gathering.is_still, what="nothing can go on")
        assert bed.log == [], "nothing is computed yet"
    bed.node.wait_sealed(1)
    assert bed.engine().load(prompt) == CHUNK


def test_the_node_hears_of_layers_and_seals_when_they_are_gathered(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_save, "GROUP_BYTES", 1)
    engine = bed.engine(lag_s=0.02)
    engine.finish(engine.save(tokens(8, CHUNK), PREFILL))  # of a transfer it wants to know
    bed.node.wait_sealed(1)
    log = [entry for entry in bed.log if isinstance(entry, tuple | Fill)]
    gathers = [log.index(("gather", layer, 1)) for layer in range(LAYERS)]
    fills = [log.index(fill) for fill in bed.told(Fill)]
    assert [(fill.first_layer, fill.layers, fill.seal) for fill in bed.told(Fill)] == [
        *((layer, 1, False) for layer in range(LAYERS)),
        (0, LAYERS, True),
    ]
    assert all(gather < fill for gather, fill in zip(gathers, fills, strict=False))


def test_a_slot_is_let_go_of_when_nothing_writes_it_any_more(bed: Bed) -> None:
    engine = bed.engine()
    with engine.streams.held(engine.streams.gathering):
        request = Request("a", tokens(10, 2 * CHUNK), PREFILL)
        engine.admit(request)
        engine.step((request, CHUNK + BLOCK))
        engine.finish(request)
        assert bed.told(Abort) == []
    wait_until(lambda: bed.told(Abort), what="the second chunk is aborted")
    log = [entry for entry in bed.log if isinstance(entry, tuple | Abort)]
    assert log[-1:] == bed.told(Abort)
    assert len(log) == LAYERS + 1
    bed.node.wait_at_rest()


def test_what_was_gathered_by_the_end_of_prefill_is_told(bed: Bed) -> None:
    engine = bed.engine(lag_s=0)
    streams = engine.streams
    request = Request("a", tokens(12, CHUNK), PREFILL)
    engine.admit(request)
    plan = engine.planned((request, CHUNK))
    worker = engine.workers[0]
    worker.begin(plan)
    for layer in range(LAYERS):
        engine.compute(0, layer, request, 0, CHUNK)
        worker.save_layer(f"layer.{layer}")
        if layer == 0:
            streams.synchronize()
            streams.gathering.gate.clear()
    worker.end_forward()
    wait_until(lambda: bed.told(Mark), what="the end of prefill is told")
    streams.gathering.gate.set()
    assert bed.told(Mark)[0].nbytes == CHUNK // BLOCK * PAGE_BYTES, "one layer"
    engine.finish(request)
    bed.node.wait_sealed(1)


def test_a_slot_that_is_lost_before_its_copy_has_ended_is_not_sealed(bed: Bed) -> None:
    engine = bed.engine()
    request = Request("a", tokens(13, CHUNK))
    engine.admit(request)
    lost = [slot for grant in engine.scheduler.track(request).node.grants for slot in grant.slots]
    with engine.streams.held(engine.streams.gathering):
        engine.step((request, CHUNK))
        engine.workers[0].link.connection.call(Abort(lost), 10)
    wait_until(lambda: bed.node.degraded("save_lost") == 1, what="counted")
    assert bed.told(Fill) == []
    engine.finish(request)
    assert bed.node.status().chunks == {}


# ---- loading ----------------------------------------------------------------------------------


def test_a_load_waits_for_what_was_computed_before_it(bed: Bed) -> None:
    """Whoever had the blocks before may still be at work on them."""
    engine = bed.engine()
    prompt = tokens(15, 2 * CHUNK)
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(2)
    again = Request("again", prompt)
    assert engine.match(again) == 2 * CHUNK
    engine.allocate(again, 2 * CHUNK)
    with engine.streams.held(engine.streams.compute()):
        engine.overwrite(again.block_ids)
        engine.run_worker(0, engine.planned(), {})
    assert engine.finish_load(again) == set()
    engine.check_cache(again, 2 * CHUNK)
    assert ("scatter", 0, LAYERS) in bed.log, "one launch"
    engine.finish(again)


def test_a_chunk_evicted_before_it_is_loaded_is_reported(bed: Bed) -> None:
    engine = bed.engine(lease_s=1.0)
    prompt = tokens(17, 2 * CHUNK)
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(2)
    again = Request("again", prompt)
    external = engine.match(again)
    engine.allocate(again, external)
    with engine.streams.held(engine.streams.loading):
        engine.run_worker(0, engine.planned(), {})
        wait_until(lambda: engine.streams.loading.waiting, what="the copy is queued")
        wait_until(lambda: not bed.node.status().leases, what="the lease has ended")
        bed.node.forget()
    assert engine.finish_load(again) == set(again.block_ids[: 2 * CHUNK // BLOCK])
    wait_until(lambda: bed.node.degraded("load_failed") == 1, what="counted")
    engine.finish(again)


@pytest.mark.parametrize("hooks", [True, False], ids=["layer by layer", "at once"])
def test_a_large_save_to_memory_of_a_gpu_is_several_launches(
    gpu_bed: Bed, monkeypatch: pytest.MonkeyPatch, hooks: bool
) -> None:
    monkeypatch.setattr(gpu_copier, "LAUNCH_BYTES", 6 * PAGE_BYTES)
    engine = gpu_bed.engine()
    engine.skip_hooks = not hooks
    prompt = tokens(44, 2 * CHUNK)  # eight pages of each layer
    engine.finish(engine.save(prompt))
    gpu_bed.node.wait_sealed(2)
    launches = [entry[1:] for entry in gpu_bed.log if isinstance(entry, tuple) and entry[0] == "gather"]
    assert sorted(launches) == sorted([(layer, 1) for layer in range(LAYERS)] * 2)
    assert engine.load(prompt) == 2 * CHUNK


@pytest.mark.parametrize(("lags", "longest_s"), [(True, 0.002), (False, 0.03)])
def test_an_idle_step_waits_for_a_load_only_as_long_as_that_needs_the_core(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, lags: bool, longest_s: float
) -> None:
    """A new request is not looked at before the step has ended."""
    engine = bed.engine(lags=lags)
    waits: list[float] = []
    monkeypatch.setattr(engine.workers[0]._loader, "wait", waits.append)  # noqa: SLF001
    engine.idle()
    request = Request("a", tokens(40, 3))
    engine.admit(request)
    waits.clear()
    engine.step((request, 3))
    assert waits == [], "there was something to do"
    engine.idle()
    assert waits == [longest_s]


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "gpu"])
def test_nothing_of_ours_spoils_a_capture_under_way(beds: Callable[..., Bed], fake: FakeCuda, on_gpu: bool) -> None:
    """A graph is captured while a thread sleeps behind copies. Before the capture ends, the thread wakes and tells the
    node, the node dies, its memory is let go of, and the next node's is mapped or page-locked."""
    bed = beds(on_gpu, is_killed=True)
    engine = bed.engine()
    streams = engine.streams
    with streams.held(streams.gathering):
        engine.finish(engine.save(tokens(44, CHUNK)))
        streams.captured = []
    bed.node.wait_sealed(1)
    bed.node.kill()
    wait_until(lambda: not num_mapped() and not fake.counts()["registered"], what="the dead node's memory is let go of")
    bed.start_node()
    wait_until(lambda: num_mapped() or fake.counts()["registered"], what="the next node's memory is reached")
    wait_until(lambda: engine.is_attached, what="attached to the next node")
    assert fake.spoiled == []
    streams.captured = None
    engine.finish(engine.save(tokens(45, CHUNK)))
    bed.node.wait_sealed(1)


def test_the_gpu_is_the_one_of_torchs_number(fake: FakeCuda) -> None:
    """Not of torch's UUID, which need not be the driver's where a GPU is partitioned."""
    assert [Streams(torch.device("cuda", index)).gpu().ordinal for index in (0, 1)] == [0, 1]
