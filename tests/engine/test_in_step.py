"""Loads that a step carries out layer by layer while it computes the rest: no layer is computed before its pages are
there, and what was computed without them counts for nothing, in the engine and in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_toy_engine import at_rest, tokens
from toy_engine import BLOCK, CHUNK, LAYERS, Request, ToyEngine

import pdx
from pdx.engine import loader, scheduler, worker
from pdx.engine.plan import WorkerNews
from pdx.memory.arena import Arena
from pdx.testing.waiting import wait_until

REST = 12  # tokens behind what is loaded


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts as a prompt, and as worth it, where prompts have a few dozen tokens; layers are copied one by one."""
    monkeypatch.setattr(scheduler, "MIN_REST", 8)
    monkeypatch.setattr(worker, "MIN_TOKENS", 8)
    monkeypatch.setattr(loader, "IN_STEP_BYTES", 1)


@pytest.fixture
def warm(engines: Callable[..., ToyEngine]) -> Iterator[Callable[..., tuple[ToyEngine, list[int]]]]:
    """Makes an engine that has seen a prompt, so that it loads in steps, and forgot its blocks."""

    def make(seed: int = 1, **settings: Any) -> tuple[ToyEngine, list[int]]:
        engine = engines(**settings)
        prompt = tokens(seed, 3 * CHUNK + REST)
        first = Request("first", prompt[: 3 * CHUNK])
        assert engine.admit(first) == set()
        engine.step((first, 3 * CHUNK))
        engine.finish(first)
        shards = settings.get("shards", 1)
        wait_until(lambda: engines.node.status().chunks.get("sealed") == 3 * shards, what="three chunks")
        return engine, prompt

    yield make
    wait_until(lambda: at_rest(engines), what="at rest")


@pytest.mark.parametrize("shards", [1, 2])
def test_each_layer_is_computed_when_its_pages_are_there(warm: Any, engines: Any, shards: int) -> None:
    engine, prompt = warm(shards=shards)
    again = Request("again", prompt)
    assert engine.admit_in_step(again) == set()
    assert engine.right == [True] * LAYERS * shards
    engine.check_cache(again, len(prompt))
    wait_until(lambda: not engines.node.status().leases, what="the lease ends with the step, not with the request")
    engine.step((again, 0))
    engine.finish(again)


def test_what_the_step_computes_is_saved_and_found(warm: Any, engines: Any) -> None:
    engine, prompt = warm()
    prompt = prompt + tokens(9, CHUNK - REST)
    again = Request("again", prompt)
    engine.admit_in_step(again)
    engine.finish(again)
    wait_until(lambda: engines.node.status().chunks == {"sealed": 4}, what="the fourth chunk")
    other = engines()
    third = Request("third", [*prompt, 1])
    assert other.admit(third) == set()
    assert third.num_computed == 4 * CHUNK
    other.check_cache(third, 4 * CHUNK)
    other.finish(third)


def test_a_part_of_a_chunk_is_loaded_and_the_whole_of_it_saved(warm: Any, engines: Any) -> None:
    engine, prompt = warm()
    prompt = [*prompt[: 2 * CHUNK + 2 * BLOCK], *tokens(11, 3 * BLOCK)]
    again = Request("again", prompt)
    engine.admit_in_step(again)
    assert engine.right == [True] * LAYERS
    engine.check_cache(again, len(prompt))
    engine.finish(again)
    wait_until(lambda: engines.node.status().chunks == {"sealed": 5}, what="its third chunk, and the block behind")
    other = engines()
    third = Request("third", [*prompt, 1])
    assert other.admit(third) == set()
    other.check_cache(third, 3 * CHUNK)
    other.finish(third)


def test_an_engine_that_was_not_seen_to_wait_loads_before(engines: Any) -> None:
    first, second = engines(), engines()
    prompt = tokens(2, 3 * CHUNK + REST)
    request = Request("first", prompt)
    first.admit(request)
    first.step((request, len(prompt)))
    first.finish(request)
    again = Request("again", prompt)
    second.match(again)
    assert not second.scheduler_guard.in_step
    second.scheduler_guard.finished(again)


@pytest.mark.parametrize(
    ("running", "load_s", "chunk_s", "is_in_step"),
    [
        (False, 0.0, 0.0, True),
        (False, 100.0, 1.0, True),
        (True, 0.0, 1.0, False),  # not measured
        (True, 1.0, 0.0, False),
        (True, 1.0, 5.0, True),  # 3 chunks against 12 of 16 tokens
        (True, 1.0, 3.9, False),
    ],
)
def test_others_do_not_wait_for_a_load(
    warm: Any, running: bool, load_s: float, chunk_s: float, is_in_step: bool
) -> None:
    engine, prompt = warm()
    engine.scheduler.heard([WorkerNews(waits=True, load_s=load_s, chunk_s=chunk_s)])
    other = Request("other", tokens(5, 20))
    if running:
        engine.admit(other)
    again = Request("again", prompt)
    assert engine.match(again) == 3 * CHUNK
    assert engine.scheduler_guard.in_step is is_in_step
    if running:
        engine.finish(other)
        engine.match(again)
        assert engine.scheduler_guard.in_step
    engine.finish(again)


def test_too_little_is_left_to_compute(warm: Any) -> None:
    engine, prompt = warm()
    for count, in_step in ((7, False), (8, True)):
        again = Request(f"again-{count}", prompt[: 3 * CHUNK + count])
        assert engine.match(again) == 3 * CHUNK
        assert engine.scheduler_guard.in_step is in_step
        engine.finish(again)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_chunk_that_went_is_computed_and_nothing_of_the_step_is_saved(
    warm: Any, engines: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Not even the engine's other requests of that step, and of the next one, that was planned before it was known."""
    engine, prompt = warm()
    is_current = Arena.is_current
    again, other = Request("again", prompt), Request("other", tokens(6, CHUNK))
    engine.match(again)
    gone = engine.scheduler.track(again).hit_slots[at][0]
    monkeypatch.setattr(Arena, "is_current", lambda self, slot: slot != gone and is_current(self, slot))
    engine.admit(other)
    external = engine.match(again)
    engine.scheduler.heard([WorkerNews(waits=True, load_s=1e-9, chunk_s=1.0)])  # others run
    assert engine.match(again) == external
    engine.allocate(again, external, in_step=True)
    again.num_computed = external
    first = engine.scheduler_guard.plan_step(lambda half: engine.record({"again": (again, REST), "other": (other, 8)}))
    again.num_computed, other.num_computed = external + REST, 8
    second = engine.scheduler_guard.plan_step(lambda half: engine.record({"other": (other, 8)}))
    again.num_computed, other.num_computed = external, 0
    failed = engine.run_worker(0, first, {"again": (again, REST), "other": (other, 8)})[1]
    assert failed == set(again.block_ids[at * CHUNK // BLOCK : (at + 1) * CHUNK // BLOCK])
    other.num_computed = 8
    assert engine.run_worker(0, second, {"other": (other, 8)})[1] == set()
    other.num_computed = 16
    engine.scheduler_guard.not_loaded(failed)
    engine.scheduler_guard.heard([engine.worker_guards[0].take_news()])
    monkeypatch.undo()
    again.num_computed = at * CHUNK
    engine.step((again, len(prompt) - at * CHUNK))
    engine.check_cache(again, len(prompt))
    engine.finish(again)
    engine.finish(other)
    wait_until(lambda: at_rest(engines), what="at rest")
    assert engines.node.status().chunks["sealed"] <= 4, "of the other request nothing"
    third = Request("third", other.all_token_ids)
    assert engine.match(third) == 0
    engine.finish(third)
    wait_until(lambda: engines.node.status().counters.get("degraded_load_failed") == 1, what="the node is told")
    with pdx.connect(engines.node.address) as node:
        assert node.why("again").requests[0].hits == at, "of what the node gave, so much was loaded"


def test_what_is_computed_behind_a_failed_load_is_saved_when_it_is_known(
    warm: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = warm()
    is_current = Arena.is_current
    again = Request("again", prompt)
    engine.match(again)
    gone = engine.scheduler.track(again).hit_slots[1][0]
    monkeypatch.setattr(Arena, "is_current", lambda self, slot: slot != gone and is_current(self, slot))
    failed = engine.admit_in_step(again)
    assert failed == set(again.block_ids[CHUNK // BLOCK : 2 * CHUNK // BLOCK])
    monkeypatch.undo()
    engine.step((again, len(prompt) - CHUNK))
    engine.finish(again)
    fresh = Request("fresh", tokens(7, 2 * CHUNK))
    engine.admit(fresh)
    engine.step((fresh, 2 * CHUNK))
    engine.finish(fresh)
    other = engines()
    once_more = Request("once more", fresh.all_token_ids)
    wait_until(lambda: at_rest(engines), what="at rest")
    other.admit(once_more)
    assert once_more.num_computed == 2 * CHUNK
    other.check_cache(once_more, 2 * CHUNK)
    other.finish(once_more)


def test_an_engine_that_does_not_wait_is_found_out(warm: Any, engines: Any) -> None:
    """As one whose steps become graphs without hooks: the pages may have been there in time, which nobody knows."""
    engine, prompt = warm()
    engine.skip_hooks = True
    again = Request("again", prompt)
    assert engine.admit_in_step(again) == set(again.block_ids[: 3 * CHUNK // BLOCK])
    engine.step((again, len(prompt)))
    engine.check_cache(again, len(prompt))
    engine.finish(again)
    wait_until(lambda: engines.node.status().counters.get("degraded_in_step_missed") == 1, what="the node is told")
    engine.skip_hooks = False
    third = Request("third", prompt)
    assert engine.admit(third) == set()
    engine.check_cache(third, third.num_computed)
    engine.finish(third)


def test_the_node_dies_before_the_step(warm: Any, engines: Any, start_node: Any) -> None:
    engine, prompt = warm()
    again = Request("again", prompt)
    external = engine.match(again)
    engine.allocate(again, external, in_step=True)
    engines.node.kill()
    wait_until(lambda: not engine.workers[0].is_attached, what="the worker knows")
    again.num_computed = external
    engine.step((again, REST))
    assert engine.failed == set(again.block_ids[: external // BLOCK])
    again.num_computed = 0
    engine.step((again, len(prompt)))
    engine.check_cache(again, len(prompt))
    engine.finish(again)
    engine.close()
    start_node()  # cleans up


@pytest.mark.parametrize("hook", ["wait_layer", "begin", "end_forward", "finished_loads"])
def test_a_hook_that_fails_reports_the_blocks_in_the_same_step(
    warm: Any, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    engine, prompt = warm()

    def fails(*args: Any) -> None:
        raise RuntimeError("asked to")

    again = Request("again", prompt)
    external = engine.match(again)
    monkeypatch.setattr(engine.workers[0], hook, fails)
    engine.allocate(again, external, in_step=True)
    again.num_computed = external
    engine.step((again, REST))
    assert engine.failed == set(again.block_ids[: external // BLOCK])
    assert engine.worker_guards[0].is_off
    assert engine.worker_guards[0].finished_loads() == (set(), set()), "vLLM ends where it hears of one that runs"


def test_a_plan_that_fails_reports_the_blocks_in_the_same_step(warm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = warm()
    again = Request("again", prompt)
    external = engine.match(again)
    engine.allocate(again, external, in_step=True)
    monkeypatch.setattr(engine.scheduler, "plan_step", lambda record: 1 / 0)
    again.num_computed = external
    engine.step((again, REST))
    assert engine.failed == set(again.block_ids[: external // BLOCK])


def test_a_request_that_ends_with_its_step_leaves_nothing(warm: Any, engines: Any) -> None:
    engine, prompt = warm()
    again = Request("again", prompt)
    external = engine.match(again)
    engine.allocate(again, external, in_step=True)
    again.num_computed = external
    plan = engine.scheduler_guard.plan_step(lambda half: engine.record({"again": (again, REST)}))
    engine.scheduler_guard.finished(again)
    engine.run_worker(0, plan, {"again": (again, REST)})
    engine.scheduler_guard.heard([engine.worker_guards[0].take_news()])
    engine.idle()
    wait_until(lambda: not engines.node.status().leases, what="its lease is over")
