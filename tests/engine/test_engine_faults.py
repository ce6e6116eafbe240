"""Faults of the engine around the halves, and of the halves inside the engine: what was not computed is never whole,
every load is reported once, and the engine goes on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from stream_bed import Bed
from toy_engine import BLOCK, CHUNK, LAYERS, Engines, ForwardFailed, Request, ToyEngine, prefill_of, tokens

from pdx.client.connection import Connection
from pdx.engine import link, worker
from pdx.engine.cpu_copier import CpuCopier
from pdx.engine.scheduler import SchedulerHalf
from pdx.engine.worker import WorkerHalf
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Fill, Hello, Mark

# ---- the forward pass -------------------------------------------------------------------------


def fail_step(bed: Bed, layer: int, *, done: int = 0, lags: bool = True) -> tuple[list[int], Request]:
    """A request of an engine whose forward pass fails in this layer behind `done` tokens, which were computed, and its
    prompt."""
    engine = bed.engine(lags=lags)
    prompt = tokens(500, 2 * CHUNK)
    request = Request("failing", prompt, prefill_of("f" * 20))
    engine.admit(request)
    if done:
        engine.step((request, done))
    engine.fails_at = 0, layer
    with pytest.raises(ForwardFailed):
        engine.step((request, len(prompt) - done))
    engine.fails_at = None
    return prompt, request


@pytest.mark.parametrize(
    ("lags", "layer", "done"), [(False, 0, 0), (False, 2, CHUNK + 3), (True, 1, CHUNK), (True, 2, 0)]
)
def test_a_chunk_of_which_a_layer_was_not_computed_is_never_sealed(bed: Bed, lags: bool, layer: int, done: int) -> None:
    """vLLM ends a step with `wait_for_save` also when its forward pass has raised. Later steps are saved."""
    prompt, request = fail_step(bed, layer, done=done, lags=lags)
    whole = done // CHUNK
    wait_until(lambda: bed.node.status().counters.get("aborted") == 2 - whole, what="the room is given back")
    assert bed.node.status().chunks == ({"sealed": whole} if whole else {})
    other = bed.engine(lags=False)
    assert other.load(prompt) == whole * CHUNK
    engine = bed.made[0][0]
    engine.finish(request)
    bed.node.wait_at_rest()
    engine.finish(engine.save(prompt))  # and it saves again
    bed.node.wait_sealed(2)
    assert engine.load(prompt) == 2 * CHUNK


def test_a_chunk_whose_first_pages_were_not_computed_is_not_sealed_by_its_last_ones(bed: Bed) -> None:
    engine = bed.engine()
    prompt = tokens(501, 2 * CHUNK)
    request = Request("failing", prompt)
    engine.admit(request)
    engine.fails_at = (0, 1)
    with pytest.raises(ForwardFailed):
        engine.step((request, CHUNK + 3))
    engine.fails_at = None
    request.num_computed = CHUNK + 3  # as if the engine took no notice
    engine.step((request, CHUNK - 3))
    engine.streams.synchronize()
    engine.finish(request)
    bed.node.wait_at_rest()
    assert engine.load(prompt) == 0


def test_the_node_is_told_of_no_moment_of_a_failed_step(bed: Bed) -> None:
    """Neither the end of the prompt's computing nor that of its gathering is a moment of the transfer's timeline."""
    _, request = fail_step(bed, LAYERS - 1)
    engine = bed.made[0][0]
    engine.finish(request)
    engine.streams.synchronize()
    bed.node.wait_at_rest()
    assert bed.told(Mark) == []
    assert not any(fill.seal for fill in bed.told(Fill))
    assert bed.told(Abort)


# ---- the hooks --------------------------------------------------------------------------------

SCHEDULER_HOOKS = ("arrived", "matched_tokens", "allocated", "loaded", "plan_step", "finished", "has_unsent_plans")
WORKER_HOOKS = ("begin", "save_layer", "end_forward", "finished_loads")


class Broken(Exception):
    """What nobody has foreseen."""


def break_hook(
    monkeypatch: pytest.MonkeyPatch, half: SchedulerHalf | WorkerHalf, hook: str, call: int, *, is_late: bool
) -> list[str]:
    """From its `call`-th call on, `hook` raises: before it has done anything, or `is_late`, when it has done all."""
    real, calls = getattr(half, hook), []

    def broken(*args: Any) -> Any:
        calls.append(hook)
        result = real(*args) if is_late or len(calls) < call else None
        if len(calls) >= call:
            raise Broken(hook)
        return result

    broken.__name__ = hook
    monkeypatch.setattr(half, hook, broken)
    return calls


def serve(engine: ToyEngine, request: Request) -> None:
    """As vLLM does: what is not loaded is computed, and then the pages are right, whatever PDX did."""
    engine.scheduler_guard.arrived(request)
    engine.admit(request)
    while request.num_computed < request.num_tokens:
        engine.scheduler_guard.has_unsent_plans()
        engine.step((request, min(CHUNK, request.num_tokens - request.num_computed)))
    engine.check_cache(request, request.num_tokens)
    engine.finish(request)
    assert not engine.waiting


@pytest.mark.parametrize(
    ("hook", "is_late", "lags"),
    [
        *((hook, False, False) for hook in (*SCHEDULER_HOOKS, *WORKER_HOOKS)),
        *((hook, True, False) for hook in ("allocated", "plan_step", "finished")),
        *((hook, True, True) for hook in WORKER_HOOKS),
    ],
)
def test_a_hook_that_fails_ends_pdx_and_not_the_engine(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, hook: str, is_late: bool, lags: bool
) -> None:
    """Early: before it has done anything; late: when it has done all, and not at once."""
    shards, call = 1 if lags else 2, 1 + is_late
    other = bed.engine(lags=False, shards=shards)
    there, new = tokens(510, 3 * CHUNK + 3), tokens(511, 2 * CHUNK + 3)
    serve(other, Request("other", there))
    bed.node.wait_sealed(3 * shards)
    engine = bed.engine(lags=lags, shards=shards)
    half = engine.scheduler if hook in SCHEDULER_HOOKS else engine.workers[-1]
    calls = break_hook(monkeypatch, half, hook, call, is_late=is_late)
    for index, prompt in enumerate([new, there, new, there]):
        serve(engine, Request(f"r{index}", prompt))
    assert len(calls) == call, "nothing is asked of a half that is off"
    guards = [engine.scheduler_guard, *engine.worker_guards]
    assert all(guard.is_off for guard in guards)
    wait_until(lambda: bed.node.degraded("hook_failed") == 1, what="counted")
    bed.node.wait_at_rest()
    sealed = bed.node.status().chunks["sealed"]
    assert 3 * shards <= sealed <= 5 * shards
    serve(other, Request("last", new))
    serve(other, Request("very last", there))


def test_a_fault_at_start_up_is_raised(bed: Bed) -> None:
    engine = bed.engine(lags=False)
    with pytest.raises(Exception, match="layers"):
        engine.worker_guards[0].register({}, 1)


def test_loads_under_way_are_waited_for_and_reported_as_what_they_are(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a load has ended it writes into its blocks, so nobody may compute there."""
    prompt = tokens(512, 2 * CHUNK)
    other = bed.engine(lags=False)
    other.finish(other.save(prompt))
    bed.node.wait_sealed(2)
    engine = bed.engine()
    streams = engine.streams
    request = Request("a", prompt)
    external = engine.match(request)
    engine.allocate(request, external)
    with streams.held(streams.loading):
        plan = engine.scheduler_guard.plan_step(lambda half: engine.record({}))
        engine.run_worker(0, plan, {})
        wait_until(lambda: streams.loading.waiting, what="the scatter is queued")
        break_hook(monkeypatch, engine.workers[0], "begin", 1, is_late=False)
        for _ in range(3):
            engine.idle()
        assert engine.worker_guards[0].is_off
        assert engine.waiting == {"a": {0}}
    assert engine.finish_load(request) == set()
    request.num_computed = external
    engine.check_cache(request, external)


def test_a_load_that_no_worker_has_heard_of_is_reported_as_failed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(513, 3 * CHUNK)
    other = bed.engine(lags=False)
    other.finish(other.save(prompt))
    bed.node.wait_sealed(3)
    engine = bed.engine(lags=False)
    break_hook(monkeypatch, engine.scheduler, "allocated", 1, is_late=False)
    request = Request("a", prompt)
    external = engine.match(request, local=CHUNK)
    assert external == 2 * CHUNK
    engine.allocate(request, external)
    assert engine.finish_load(request) == set(request.block_ids[CHUNK // BLOCK : 3 * CHUNK // BLOCK])
    assert engine.match(Request("b", prompt)) == 0
    bed.node.wait_at_rest()


def test_room_that_was_promised_before_a_worker_had_mapped_the_arena_is_given_back(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it should have saved, and of what was aborted: it is the writer, whom the node waits for."""
    attached, mapped, use = threading.Event(), threading.Event(), CpuCopier.use

    def use_late(self: CpuCopier, arena: Any) -> None:
        if arena is not None:
            attached.set()
            assert mapped.wait(60)
        use(self, arena)

    monkeypatch.setattr(CpuCopier, "use", use_late)
    monkeypatch.setattr(worker, "START_UP_S", 0.0)
    engine = engines()
    node = engines.node
    try:
        assert attached.wait(60)
        for number, is_aborted in enumerate((False, True)):
            request = Request(f"{number}", tokens(510 + number, 2 * CHUNK))
            engine.admit(request)
            assert len(engine.scheduler.track(request).node.grants) == 2
            if is_aborted:
                engine.finish(request)
            engine.step(*(() if is_aborted else [(request, 2 * CHUNK)]))
            wait_until(lambda: engine.idle() or node.status().chunks == {}, what="its room is given back")
            if not is_aborted:
                engine.finish(request)
    finally:
        mapped.set()


def test_room_that_was_promised_before_a_worker_knew_that_it_is_attached_is_given_back(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine has nothing more to do, so that no later step tells of it."""
    attached, known = threading.Event(), threading.Event()

    class Late(Connection):
        def __init__(self, address: str, hello: Hello) -> None:
            super().__init__(address, hello)
            self.kind = hello.kind

        def attach(self, timeout_s: float) -> bool:
            is_attached = super().attach(timeout_s)
            if is_attached and self.kind == "worker":
                attached.set()
                return known.wait(60)
            return is_attached

    monkeypatch.setattr(link, "Connection", Late)
    monkeypatch.setattr(worker, "START_UP_S", 0.0)
    engine = engines()
    node = engines.node
    try:
        assert attached.wait(60)
        request = Request("a", tokens(512, 2 * CHUNK))
        engine.admit(request)
        assert len(engine.scheduler.track(request).node.grants) == 2
        engine.step((request, 2 * CHUNK))
        engine.finish(request)
        engine.step()
        assert node.status().chunks == {"filling": 2}
    finally:
        known.set()
    wait_until(lambda: node.status().chunks == {}, what="its room is given back")
