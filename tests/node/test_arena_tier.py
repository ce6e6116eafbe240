"""Several arenas in one node: what is sealed in one is copied to the first, and comes back where it is wanted.

The GPUs are fake ones.
"""

import ctypes
import threading
from pathlib import Path

import pytest
from arenas_stage import LAYERS, SLICE, Stage, key
from fake_cuda import fake_cuda

from pdx.cuda.gpu import Gpu
from pdx.memory.arena import GRANULE_BYTES
from pdx.node.arena_tier import ArenaTier
from pdx.store.hints import Demotions
from pdx.telemetry import trace
from pdx.testing.waiting import wait_until
from pdx.wire.hints import Hints

TRANSFER = "t" * 16


@pytest.fixture
def fake():
    with fake_cuda(gpus=2) as made:
        yield made
        assert made.leftovers() == {}


@pytest.fixture
def stage(fake, tmp_path):
    stage = Stage(tmp_path, gpus=[Gpu.find("0"), Gpu.find("1")])
    yield stage
    stage.assert_idle()
    stage.close()


def forget(stage, numbers, arena):
    """Evict these in one arena."""
    pool = stage.store.pools[arena]
    for chunk in list(stage.store.index.slots[arena].values()):
        if int(chunk.key) in numbers:
            pool.drop(chunk, "forgotten")


def test_what_is_sealed_on_a_gpu_is_copied_to_the_first_arena_and_comes_back(stage):
    stage.save([0, 1, 2])
    assert (stage.hits([0, 1, 2], (1,)), stage.hits([0, 1, 2])) == (3, 3)
    forget(stage, [1, 2], 1)
    assert stage.hits([0, 1, 2], (1,)) == 1
    assert stage.may_come([0, 1, 2, 3], (1,))
    stage.settle()
    assert stage.hits([0, 1, 2, 3], (1,)) == 3
    assert not stage.may_come([0, 1, 2, 3], (1,))
    assert stage.counters["arenas_stored_bytes"] == 5 * GRANULE_BYTES


@pytest.mark.parametrize("numbers", [[0, 1], [1, 0]])
def test_what_is_copied_with_others_keeps_its_own_form(stage, numbers):
    """Else exact chunks would be stored with a loss below the first arena, or the other way round."""
    lossy = stage.reserve([0], hints=Hints("", form="int8:bf16:1x1x1x2x8"))
    slots = {0: lossy, 1: stage.reserve([1])}
    stage.fill([slot for number in numbers for slot in slots[number]])
    stage.settle()
    copied = [chunks[0] for chunks in stage.store.find([key(number) for number in range(2)], 1)]
    assert [chunk.hints.form for chunk in copied] == ["int8:bf16:1x1x1x2x8", ""]


def test_the_shards_of_an_engine_lie_on_its_gpus(stage):
    stage.save([0, 1], arenas=(1, 2))
    assert stage.hits([0, 1], (1, 2)) == 2
    assert len(stage.store.find([key(0), key(1)], 2)) == 2, "both shards are in the first arena, too"
    forget(stage, [0, 1], 2)
    assert stage.hits([0, 1], (1, 2)) == 0, "one shard is not a chunk"
    assert stage.may_come([0, 1], (1, 2))
    stage.settle()
    assert stage.hits([0, 1], (1, 2)) == 2


def test_a_transfer_is_copied_slice_by_slice_while_it_is_filled(stage):
    slots = stage.reserve([0], transfer=TRANSFER)
    stage.fill(slots, [0])
    assert not stage.may_come([0], (2,)), "nobody waits for what another request computes"
    assert stage.may_come([0], (2,), TRANSFER)
    (copy,) = stage.copies.of(stage.tiers.arenas)
    wait_until(lambda: stage.turn() or copy.copied_bytes == SLICE)
    assert stage.hits([0], (2,)) == 0
    stage.fill(slots, [1, 2])
    wait_until(lambda: stage.turn() or copy.copied_bytes == 3 * SLICE)
    assert stage.may_come([0], (2,), TRANSFER)
    stage.fill(slots, [3])
    stage.settle()
    assert stage.hits([0], (2,)) == 1


def test_a_writer_that_gives_up_ends_the_copies_of_its_chunks(stage):
    slots = stage.reserve([0, 1], transfer=TRANSFER)
    stage.fill(slots, [0, 1])
    assert stage.may_come([0, 1], (2,), TRANSFER)
    chunks = [stage.store.at(slot) for slot in slots]
    stage.store.abort(chunks)
    stage.store.let_go(chunks)
    stage.changed(chunks)
    stage.settle()
    assert [pool.free_bytes for pool in stage.store.pools] == [16 * GRANULE_BYTES] * 3
    assert not stage.may_come([0, 1], (2,), TRANSFER)


def test_an_arena_without_room_gets_the_beginning(stage):
    stage.save(list(range(16)))
    held = stage.reserve(list(range(100, 112)), (2,))
    assert stage.may_come(list(range(16)), (2,))
    stage.settle()
    assert stage.hits(list(range(16)), (2,)) == 4
    assert not stage.may_come(list(range(16)), (2,))
    stage.store.let_go([stage.store.at(slot) for slot in held])


def test_without_host_memory_no_gpu_is_filled_with_what_others_seal(stage, monkeypatch):
    monkeypatch.setattr(stage.tiers.storing, "spills", False)
    stage.save([0, 1])
    assert (stage.hits([0, 1], (1,)), stage.hits([0, 1])) == (2, 0)
    assert stage.may_come([0, 1], (2,)), "what another GPU wants is copied to it all the same"
    stage.settle()
    assert stage.hits([0, 1], (2,)) == 2


def test_a_thread_that_meets_a_bug_goes_on(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    stage = Stage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", broken)
        stage.save([0])
    assert (stage.hits([0], (1,)), stage.hits([0])) == (1, 0)
    assert stage.counters["jobs_failed"] == 1
    stage.save([1])
    assert stage.hits([1]) == 1
    stage.assert_idle()
    stage.close()


def test_a_copy_that_outlives_the_tier_has_its_memory(tmp_path, monkeypatch):
    """A GPU may hang for longer than the tier waits: what comes then must not write where nothing is mapped."""
    stage = Stage(tmp_path)
    began, go_on = threading.Event(), threading.Event()
    moves = []

    def slow(to, at, nbytes):
        began.set()
        assert go_on.wait(60)
        moves.append(all(str(arena.path) in Path("/proc/self/maps").read_text() for arena in stage.arenas[:2]))

    monkeypatch.setattr(ctypes, "memmove", slow)
    monkeypatch.setattr("pdx.node.arena_tier.JOIN_S", 0.0)
    stage.fill(stage.reserve([0]))
    assert began.wait(60)
    stage.fill(stage.reserve([1]))
    stage.tiers.close()
    for arena in stage.arenas:
        arena.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "pdx-arenas":
            thread.join(60)
    assert moves == [True], "the next copy is not begun"
    stage.mailbox.close()


def locked(stage):
    wait_until(lambda: stage.tier._page_lock.covers(0, stage.arenas[0].nbytes))


def calls(fake):
    return {name: fake.calls[name] for name in ("cuMemcpyBatchAsync", "cuMemcpyAsync", "cuEventSynchronize")}


def test_a_job_is_one_call_of_the_driver(fake, stage):
    """To host memory, from it, and from GPU to GPU."""
    locked(stage)
    slots = stage.reserve([0, 1, 2])
    before = calls(fake)
    stage.fill(slots)
    stage.settle()
    for to in (1, 2):
        forget(stage, [0, 1, 2], to)
        assert stage.may_come([0, 1, 2], (to,))
        stage.settle()
    assert [stage.hits([0, 1, 2], arenas) for arenas in ((), (1,), (2,))] == [3, 3, 3]
    after = calls(fake)
    expected = {"cuMemcpyBatchAsync": 3, "cuMemcpyAsync": 0, "cuEventSynchronize": 3}
    assert {name: after[name] - before[name] for name in after} == expected


def test_what_goes_between_arenas_is_counted_and_has_spans(tmp_path):
    spans = tmp_path / "spans"
    spans.mkdir(mode=0o700)
    trace.switch(spans, True)
    with trace.Tracer(spans, "a") as tracer:
        stage = Stage(tmp_path, tracer=tracer)
        stage.save([0, 1, 2])
    stage.assert_idle()
    found = trace.read(spans)
    assert {(span.lane, span.first_layer, span.num_layers) for span in found} == {(trace.Lane.ARENAS, 0, LAYERS)}
    assert sum(span.nbytes for span in found) == stage.counters["arenas_stored_bytes"] == 3 * GRANULE_BYTES
    assert sum(span.end_ns - span.start_ns for span in found) == stage.counters["arenas_stored_ns"] > 0
    stage.close()


def test_a_job_is_bounded(fake, stage, monkeypatch):
    """Copies that are queued behind a job wait for all of it."""
    monkeypatch.setattr(ArenaTier, "max_job_bytes", 2 * GRANULE_BYTES)
    locked(stage)
    stage.save(list(range(4)))  # as many as may be held for a store at once
    assert stage.hits(list(range(4))) == 4
    assert (fake.calls["cuMemcpyBatchAsync"], fake.calls["cuMemcpyAsync"]) == (2, 0)


def test_memory_that_may_not_be_page_locked_is_copied_slice_by_slice_and_counted(tmp_path):
    with fake_cuda(gpus=2, lock_limit=0) as fake:
        stage = Stage(tmp_path, gpus=[Gpu.find("0"), Gpu.find("1")])
        wait_until(lambda: stage.turn() or stage.counters["page_lock_refused"])
        stage.save([0, 1, 2])
        assert stage.hits([0, 1, 2]) == 3
        assert calls(fake) == {"cuMemcpyBatchAsync": 0, "cuMemcpyAsync": 3, "cuEventSynchronize": 1}
        stage.assert_idle()
        stage.close()
        assert stage.counters["page_lock_refused"] == 1
        assert fake.leftovers() == {}


@pytest.mark.parametrize("without", [{"peer_access": False}, {"vmm": False}], ids=["peer access", "vmm"])
def test_a_gpu_that_does_not_reach_another_is_copied_to_by_way_of_host_memory(tmp_path, without):
    with fake_cuda(gpus=2, **without) as fake:
        stage = Stage(tmp_path, gpus=[Gpu.find("0"), Gpu.find("1")])
        stage.save([0, 1])
        stage.tiers.storing.spills = False
        forget(stage, [0, 1], 0)
        assert stage.may_come([0, 1], (2,))
        stage.settle()
        assert [stage.hits([0, 1], arenas) for arenas in ((), (1,), (2,))] == [0, 2, 2]
        stage.assert_idle()
        stage.close()
        assert fake.leftovers() == {}


def test_a_chunk_that_begins_alike_comes_from_another_arena(stage):
    names, parent = b"a" * 16 + b"b" * 16, b"p" * 16
    stage.fill(stage.reserve([1], (1,), blocks=names, chunk_blocks=2, parent=parent))
    stage.settle()
    forget(stage, [1], 1)
    asked = names[:16] + b"x" * 16
    assert list(stage.tiers.parts(parent, asked, 1)) == [(key(1), 1)]
    assert stage.may_come([1], (2,))
    stage.settle()
    assert list(stage.tiers.parts(parent, asked, 1)) == [(key(1), 1)], "a copy does not say itself what its blocks are"
    chunks, blocks = stage.store.part(parent, asked, 1, (2,))
    assert (chunks[0].slot.arena, blocks) == (2, 1)


def test_what_is_demoted_in_the_arena_of_a_gpu_leaves_it_for_host_memory(stage):
    demotions = Demotions(stage.store, stage.tiers, stage.env, within_s=10.0)
    slots = stage.reserve([1, 2])
    assert demotions.add([key(1)], 1, (1,)) == 1
    demotions.tick()
    stage.fill(slots)
    demotions.tick()
    assert stage.hits([1], (1,)) == 1, "it is read for the copy"
    stage.settle()
    demotions.tick()
    assert [stage.hits([number], arenas) for number in (1, 2) for arenas in ((), (1,))] == [1, 0, 1, 1]
    assert demotions.add([key(1)], 1, ()) == 0, "there is nothing below host memory"
