"""An engine whose KV cache is unmapped for a while: nothing is copied meanwhile, and nothing of the GPU is held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from fake_cuda import FakeCuda
from stream_bed import Bed
from toy_engine import BLOCK, CHUNK, Request, ToyEngine, tokens

from pdx.engine.cpu_copier import CpuCopier
from pdx.testing.waiting import wait_until

GONE = 0xEE  # what pages hold once they are mapped anew

each_memory = pytest.mark.parametrize("memory", ["cpu", "host", "gpu"])


def bed_of(beds: Callable[..., Bed], memory: str) -> tuple[Bed, Any]:
    """A node with such memory, and the settings of an engine that copies there from a GPU, or from a CPU."""
    return beds(memory == "gpu"), {"lags": memory != "cpu"}


def fall_asleep(engine: ToyEngine) -> None:
    engine.worker_guards[0].unregister()
    engine.caches[0].fill_(GONE)


def wake_up(engine: ToyEngine) -> None:
    assert (engine.caches[0] == GONE).all(), "something was copied into an engine that sleeps"
    engine.worker_guards[0].restore()
    wait_until(lambda: engine.is_attached, what="the worker half has the arena")


@each_memory
def test_an_engine_that_has_slept_finds_what_it_saved_and_saves_again(beds: Callable[..., Bed], memory: str) -> None:
    bed, settings = bed_of(beds, memory)
    engine = bed.engine(**settings)
    prompt, other = tokens(800, 2 * CHUNK), tokens(801, 2 * CHUNK)
    engine.finish(engine.save(prompt))
    for _ in range(2):
        fall_asleep(engine)
        engine.worker_guards[0].unregister()  # an engine that sleeps may be sent to sleep
        wake_up(engine)
        engine.worker_guards[0].restore()
    bed.node.wait_sealed(2)
    assert engine.load(prompt) == 2 * CHUNK
    engine.finish(engine.save(other))
    bed.node.wait_sealed(4)
    assert bed.engine(**settings).load(other) == 2 * CHUNK


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "gpu"])
def test_sleep_waits_for_copies_under_way_and_holds_nothing_of_the_gpu(
    beds: Callable[..., Bed], fake: FakeCuda, on_gpu: bool
) -> None:
    bed = beds(on_gpu)
    engine = bed.engine()
    streams, node = engine.streams, fake.leftovers
    prompt, other = tokens(802, CHUNK), tokens(803, CHUNK)
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(1)
    again = Request("again", prompt)
    engine.allocate(again, engine.match(again))
    with streams.held(streams.gathering, streams.loading):
        engine.run_worker(0, engine.planned(), {})
        saved = engine.save(other)
        sleeping = threading.Thread(target=engine.worker_guards[0].unregister)
        sleeping.start()
        wait_until(lambda: streams.loading.waiting and streams.gathering.waiting, what="both copies are queued")
        assert sleeping.is_alive()
        assert node()
    sleeping.join(20)
    assert not sleeping.is_alive()
    assert node() == {}
    engine.check_cache(again, CHUNK)
    bed.node.wait_sealed(2)
    engine.caches[0].fill_(GONE)
    wake_up(engine)
    assert engine.finish_load(again) == set(), "it was whole before the engine fell asleep"
    for each in (again, saved):
        engine.finish(each)
    assert engine.load(other) == CHUNK


def test_sleep_waits_for_a_piece_of_a_load_that_a_cpu_copies(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bed.engine(lags=False)
    prompt = tokens(804, CHUNK)
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(1)
    begun, may_go, load = threading.Event(), threading.Event(), CpuCopier.load

    def load_late(self: CpuCopier, *args: Any) -> Any:
        begun.set()
        assert may_go.wait(60)
        return load(self, *args)

    monkeypatch.setattr(CpuCopier, "load", load_late)
    request = Request("a", prompt)
    engine.allocate(request, engine.match(request))
    engine.run_worker(0, engine.planned(), {})
    assert begun.wait(60)
    sleeping = threading.Thread(target=engine.worker_guards[0].unregister)
    sleeping.start()
    may_go.set()
    sleeping.join(20)
    assert not sleeping.is_alive()
    engine.check_cache(request, CHUNK)
    engine.caches[0].fill_(GONE)
    wake_up(engine)
    engine.finish_load(request)
    engine.finish(request)


@each_memory
def test_what_an_engine_that_sleeps_is_asked_to_copy_fails_or_is_given_back(
    beds: Callable[..., Bed], memory: str
) -> None:
    """vLLM asks for nothing then; a chunk whose first pages were saved before is never sealed."""
    bed, settings = bed_of(beds, memory)
    engine = bed.engine(**settings)
    prompt, other = tokens(805, CHUNK), tokens(806, CHUNK)
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(1)
    half, again = Request("half", other), Request("again", prompt)
    assert engine.admit(half) == set()
    engine.step((half, CHUNK // 2))
    fall_asleep(engine)
    assert engine.admit(again) == set(again.block_ids[: CHUNK // BLOCK])
    engine.run_worker(0, engine.planned((half, BLOCK)), {})
    wake_up(engine)
    engine.finish(again)
    half.num_computed += BLOCK
    engine.step((half, CHUNK - half.num_computed))
    engine.finish(half)
    bed.node.wait_at_rest()
    assert bed.node.status().chunks == {"sealed": 1}
    assert engine.load(prompt) == CHUNK


@pytest.mark.parametrize("fails", [False, True], ids=["off before", "fails"])
def test_an_engine_falls_asleep_only_when_a_worker_half_that_is_off_copies_nothing_more(bed: Bed, fails: bool) -> None:
    """It is closed in the background."""
    engine = bed.engine()
    streams, guard = engine.streams, engine.worker_guards[0]
    with streams.held(streams.gathering):
        request = engine.save(tokens(807, CHUNK))
        if fails:
            broken = Mock(side_effect=OSError("of a test"), __name__="unregister")
            engine.workers[0].unregister = broken  # type: ignore[method-assign]
        else:
            guard.switch_off("of a test")
        sleeping = threading.Thread(target=guard.unregister)
        sleeping.start()
        wait_until(lambda: guard.is_off and streams.gathering.waiting, what="a copy is under way")
        assert sleeping.is_alive()
    sleeping.join(20)
    assert not sleeping.is_alive()
    assert streams.gathering.is_still
    guard.restore()
    engine.finish(request)


def test_a_node_that_comes_while_an_engine_sleeps_is_used_when_it_has_woken_up(killed_bed: Bed) -> None:
    engine = killed_bed.engine()
    fall_asleep(engine)
    killed_bed.node.kill()
    killed_bed.start_node()
    wait_until(lambda: engine.scheduler.link.is_attached, what="the scheduler half is attached")
    wake_up(engine)
    prompt = tokens(808, CHUNK)
    engine.finish(engine.save(prompt))
    killed_bed.node.wait_sealed(1)
    assert engine.load(prompt) == CHUNK
