"""The worker half on streams that lag, when nodes die, drivers refuse and engines end in the middle of copies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import FakeCuda
from node_harness import MIB
from stream_bed import Bed, LaggingEvent, LaggingStream, LaggingStreams
from toy_engine import BLOCK, CHUNK, LAYERS, Request, ToyEngine, prefill_of, tokens

from pdx.cuda import memory
from pdx.cuda.memory import num_mapped
from pdx.cuda.page_lock import PageLock
from pdx.engine import gpu_copier
from pdx.errors import GpuError
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Fill

RELEASES = {False: ("cuMemHostUnregister",), True: ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease")}  # by `on_gpu`
PREFILL = prefill_of("x" * 20)


@pytest.mark.parametrize(("during", "flags"), [("gather", ()), ("scatter", ()), ("scatter", ("--no-vmm",))])
def test_node_killed_in_the_middle_of_a_copy(beds: Callable[..., Bed], during: str, flags: tuple[str, ...]) -> None:
    """The mapping stays until the copy has ended, and not longer; the engine goes on, also with the next node."""
    bed = beds(True, *flags)
    engine = bed.engine()
    streams = engine.streams
    prompt = tokens(18, 2 * CHUNK)
    if during == "scatter":
        engine.finish(engine.save(prompt))
        bed.node.wait_sealed(2)
    request = Request("a", prompt)
    external = engine.match(request)
    assert external == (2 * CHUNK if during == "scatter" else 0)
    engine.allocate(request, external)
    with streams.held(streams.gathering, streams.loading):
        if external:
            engine.run_worker(0, engine.planned(), {})
            wait_until(lambda: streams.loading.waiting, what="the scatter is queued")
        else:
            engine.step((request, 2 * CHUNK))
        bed.node.kill()
        wait_until(lambda: engine.workers[0].link._connection is None, what="the link has noticed")
        other = Request("b", tokens(19, CHUNK))
        assert engine.match(other) == 0
        engine.allocate(other, 0)
        engine.step((other, CHUNK))
        assert num_mapped() == 1, "a copy is under way"
    if external:
        failed = engine.finish_load(request)
        assert failed == (set(request.block_ids[: 2 * CHUNK // BLOCK]) if flags else set())
        if not failed:
            engine.check_cache(request, external)
    wait_until(lambda: num_mapped() == 0, what="the dead node's memory is let go")
    engine.finish(request)
    engine.finish(other)
    bed.start_node(*flags)
    wait_until(lambda: engine.is_attached, what="attached to the next node")
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(2)
    assert bed.engine().load(prompt) == 2 * CHUNK


def test_page_lock_refused_costs_only_the_cache(bed: Bed, fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """What others saved cannot be loaded, nothing can be saved; both are counted, and the fix is in the log."""
    fake.fail("cuMemHostRegister", error="NOT_PERMITTED")
    on_cpu, engine = bed.engine(lags=False), bed.engine()
    prompt = tokens(20, CHUNK)
    on_cpu.finish(on_cpu.save(prompt))
    bed.node.wait_sealed(1)
    wait_until(lambda: bed.node.degraded("page_lock_refused") == 1, what="counted")
    request = Request("a", prompt)
    failed = engine.admit(request)
    assert failed == set(request.block_ids[: CHUNK // BLOCK])
    assert request.num_computed == 0
    engine.step((request, CHUNK))
    engine.check_cache(request, CHUNK)
    engine.finish(request)
    engine.finish(engine.save(tokens(21, CHUNK)))
    another = Request("b", prompt)
    assert engine.admit(another)
    engine.finish(another)
    wait_until(lambda: (bed.node.degraded("save_skipped"), bed.node.degraded("load_failed")) == (1, 2), what="counted")
    bed.node.wait_at_rest()
    assert bed.node.status().chunks == {"sealed": 1}
    for once in ("ulimit -l", "not loaded", "not saved"):
        assert sum(record.levelname != "DEBUG" and once in record.message for record in caplog.records) == 1


class SlowPageLock(PageLock):
    """Covers nothing until it is told to."""

    is_slow = True

    def covers(self, offset: int, nbytes: int) -> bool:
        return not self.is_slow and super().covers(offset, nbytes)


def wait_page_locked(engine: ToyEngine) -> None:
    """It is in the background, and until then nothing is copied."""
    wait_until(lambda: engine.workers[0]._copier._mapped._page_lock.covers(0, MIB), what="page-locked")  # noqa: SLF001


def test_what_is_not_page_locked_yet_is_skipped_as_a_whole(killed_bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose first pages were skipped is never sealed, also if the others could be saved."""
    monkeypatch.setattr("pdx.engine.gpu_copier.PageLock", SlowPageLock)
    engine = killed_bed.engine()
    prompt = tokens(22, CHUNK)
    request = Request("a", prompt)
    engine.admit(request)
    killed_bed.node.signal(signal.SIGSTOP)  # it frees nothing meanwhile
    engine.step((request, CHUNK // 2))
    monkeypatch.setattr(SlowPageLock, "is_slow", False)
    wait_page_locked(engine)
    engine.step((request, CHUNK - CHUNK // 2))
    killed_bed.node.signal(signal.SIGCONT)
    engine.finish(request)
    wait_until(lambda: len(killed_bed.told(Abort)) == 2 or killed_bed.told(Fill), what="both steps are told of")
    assert killed_bed.told(Fill) == []
    killed_bed.node.wait_at_rest()
    assert killed_bed.node.status().chunks == {}
    engine.finish(engine.save(prompt))
    killed_bed.node.wait_sealed(1)
    other = killed_bed.engine()
    wait_page_locked(other)
    assert other.load(prompt) == CHUNK


def test_copies_that_fail_end_all_saving_and_loading(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    """After such an error CUDA does nothing any more for this process. What was under way stays reserved and mapped
    until it ends: nobody knows what still writes there."""
    engine = bed.engine()
    engine.finish(engine.save(tokens(30, CHUNK)))
    bed.node.wait_sealed(1)
    copier, is_through = engine.workers[0]._copier, threading.Event()  # noqa: SLF001
    copier.after_copies(is_through.set)
    assert is_through.wait(20), "behind the seal it waits for more events of this step"
    told = len(bed.told(Fill)), len(bed.told(Abort))
    window = copier._mapped
    engine.streams.fault = "an illegal memory access was encountered"
    prompts = [tokens(seed, CHUNK) for seed in (31, 32, 33)]
    engine.finish(engine.save(prompts[0]))
    wait_until(lambda: bed.node.degraded("copies_failed") == 1, what="counted")
    for prompt in prompts[1:]:
        engine.finish(engine.save(prompt))
    wait_until(lambda: bed.node.degraded("save_skipped") == 2, what="nothing is copied any more")
    again = Request("again", tokens(30, CHUNK))
    assert engine.admit(again) == set(again.block_ids[: CHUNK // BLOCK])
    engine.finish(again)
    engine.workers[0].close()
    assert (len(bed.told(Fill)), len(bed.told(Abort))) == told
    assert sum("illegal memory access" in record.message for record in caplog.records) == 1
    wait_until(lambda: bed.node.status().chunks == {"sealed": 1}, what="with the worker, its slots are free")
    assert window.hold(), "the copy's own hold has not ended"
    wait_until(lambda: all(stream.is_still for stream in engine.streams.made), what="no copy is under way")
    window.release()
    window.release()
    assert not window.hold()


@pytest.mark.parametrize(
    ("on_gpu", "counted", "words"),
    [
        (False, "kernels_unavailable", ("copy kernels", "gcc", "C compiler")),  # a slim image has no C compiler
        (True, "arena_unreachable", ("cuMemImportFromShareableHandle",)),
    ],
)
def test_kernels_or_memory_that_are_out_of_reach_cost_only_the_cache(
    beds: Callable[..., Bed],
    fake: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_gpu: bool,
    counted: str,
    words: tuple[str, ...],
) -> None:
    """The engine starts, and says so once."""

    def fails(pages: Any) -> None:
        raise FileNotFoundError("gcc")

    bed = beds(on_gpu)
    if on_gpu:
        fake.fail("cuMemImportFromShareableHandle")
    else:
        monkeypatch.setattr(gpu_copier, "warm_up", fails)
    engine = bed.engine()
    wait_until(lambda: bed.node.degraded(counted) == 1, what="counted")
    engine.finish(engine.save(tokens(40, CHUNK)))
    wait_until(lambda: bed.node.degraded("save_skipped") == 1, what="counted")
    bed.node.wait_at_rest()
    assert bed.node.status().chunks == {}
    assert fake.calls["cuMemHostRegister"] == 0, "memory is page-locked that no kernel will reach"
    [record] = [each for each in caplog.records if words[0] in each.message]
    assert all(word in record.message for word in words)


@pytest.mark.parametrize("refused", ["a launch in a hook", "a launch at the end", "a copy"])
def test_what_cuda_refuses_in_a_step_costs_the_step_alone(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """It has no memory for it, say. Nothing of that step is sealed; the engine goes on, the next step is saved."""
    engine = bed.engine()
    engine.skip_hooks = refused == "a launch at the end"
    last = int(refused == "a launch in a hook")  # the second layer's
    launch, launches = LaggingStreams.launch, iter(range(100))

    def refuse_launch(self: LaggingStreams, *args: Any, **settings: Any) -> None:
        if next(launches) == last:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        launch(self, *args, **settings)

    def refuse_copy(*args: Any) -> None:
        raise GpuError("cuMemcpyBatchAsync failed")

    with monkeypatch.context() as patched:
        if refused == "a copy":
            patched.setattr(LaggingStreams, "copy", refuse_copy)
        else:
            patched.setattr(LaggingStreams, "launch", refuse_launch)
        lost = engine.save(tokens(41, CHUNK), PREFILL)
    assert refused == "a copy" or next(launches) == 1 + last, "the first refusal is the last launch of the step"
    engine.finish(lost)
    wait_until(lambda: bed.node.degraded("launch_refused") == 1 == bed.node.degraded("save_skipped"), what="counted")
    bed.node.wait_at_rest()
    assert bed.node.status().chunks == {}
    prompt = tokens(42, CHUNK)
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(1)
    assert engine.load(prompt) == CHUNK


def test_a_load_is_over_when_all_of_its_kernels_are_also_if_cuda_has_refused_one(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine computes its blocks then, and has others write to them."""
    engine, prompt = bed.engine(shards=2, ranks=1), tokens(43, CHUNK)
    engine.finish(engine.save(prompt))
    bed.node.wait_sealed(2)
    request = Request("a", prompt)
    engine.allocate(request, engine.match(request))
    launch, launches, synchronize = LaggingStreams.launch, iter(range(100)), LaggingEvent.synchronize

    def launch_one(self: LaggingStreams, stream: LaggingStream, *args: Any, **settings: Any) -> None:
        if next(launches):
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        stream.gate.clear()  # it ends when it is waited for
        launch(self, stream, *args, **settings)

    def wait(self: LaggingEvent) -> None:
        engine.streams.loading.gate.set()
        synchronize(self)

    with monkeypatch.context() as patched:
        patched.setattr(LaggingStreams, "launch", launch_one)
        patched.setattr(LaggingEvent, "synchronize", wait)
        assert engine.finish_load(request) == set(request.block_ids[: CHUNK // BLOCK])
    assert next(launches) == 2, "two shards, the second of which is refused"
    assert bed.log.count(("scatter", 0, LAYERS)) == 1
    engine.finish(request)
    caplog.clear()  # an exception in a record keeps the node's arena
    assert engine.load(prompt) == CHUNK


@pytest.mark.timeout(300)  # some forty engines
@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "gpu"])
def test_whatever_call_of_the_driver_fails_the_engine_goes_on(
    beds: Callable[..., Bed],
    fake: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_gpu: bool,
) -> None:
    """Each call that an engine makes behind the look at its GPU fails once: what it computes is right, and all is given
    back, but for what the driver itself did not take.

    Which call is the n-th is up to the threads in part; each that gives something back is named, too.
    """
    monkeypatch.setattr(memory, "_mapped", set())
    bed = beds(on_gpu)
    failed: list[str] = []
    last = 50  # more than any engine makes
    ways = [*(("", number) for number in range(9, 1 + last)), *((function, 0) for function in RELEASES[on_gpu])]
    for number, (function, after) in enumerate(ways):
        name = f"toy-{number}"
        fake.fail(function, after=after)
        streams = LaggingStreams(0.0)
        streams.log = bed.log
        engine = ToyEngine(bed.address, name, streams=streams)
        if function == "cuMemHostUnregister":
            wait_page_locked(engine)
        prompt = tokens(number, CHUNK)
        engine.finish(engine.save(prompt))
        again = Request("again", prompt)
        engine.admit(again)
        engine.check_cache(again, again.num_computed)
        engine.finish(again)
        engine.close()
        streams.close()
        fake.heal()
        if len(fake.failed) == len(failed):
            assert not function, "it gives nothing back that way"
            continue
        assert after < last, "engines make more calls than are tried"
        failed.append(fake.failed[-1])
        caplog.clear()  # an exception in a record keeps the node's arena
        if failed[-1] in RELEASES[on_gpu]:
            for address, _ in fake.host.spans():
                fake.host.forget(address)
            fake.memory.close()
        assert fake.leftovers() == {}, failed
        assert fake.spoiled == []
    memory._mapped.clear()  # noqa: SLF001
