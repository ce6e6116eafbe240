"""Both halves of the connector around a toy engine: every page that is loaded is what would have been computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from toy_engine import BLOCK, CHUNK, LAYERS, PAGE_BYTES, Request, ToyEngine

import pdx
from pdx.client.connection import Connection
from pdx.engine import step_save
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Fill

MAX_CHUNK_BYTES = LAYERS * CHUNK // BLOCK * PAGE_BYTES


def tokens(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(count)]


def at_rest(engines: Any) -> bool:
    status = engines.node.status()
    return set(status.chunks) <= {"sealed"} and not status.leases and not status.transfers


@pytest.mark.parametrize(
    ("shards", "step", "skip_hooks"),
    [(1, 1, False), (2, 3, False), (1, 7, True), (2, 16, True), (1, 1000, False), (1, 1000, True)],
)
def test_prompt_computed_once_is_loaded_by_another_engine(
    engines: Callable[..., ToyEngine], shards: int, step: int, skip_hooks: bool
) -> None:
    """In steps of any size, with hooks or (as under a full CUDA graph) without."""
    first, second = engines(shards=shards), engines(shards=shards)
    first.skip_hooks = skip_hooks
    prompt = tokens(1, 3 * CHUNK + 5)
    request = Request("r", prompt)
    assert first.admit(request) == set()
    while request.num_computed < len(prompt):
        first.step((request, min(step, len(prompt) - request.num_computed)))
    first.finish(request)
    wait_until(lambda: engines.node.status().chunks.get("sealed") == 4 * shards, what="three chunks and a block")
    again = Request("again", prompt)
    assert second.admit(again) == set()
    assert again.num_computed == 3 * CHUNK + BLOCK
    second.check_cache(again, 3 * CHUNK + BLOCK)
    second.finish(again)
    wait_until(lambda: at_rest(engines), what="at rest")


@pytest.mark.parametrize(
    ("length", "shards"),
    [
        (1, 1),
        (BLOCK, 2),
        (BLOCK + 1, 1),
        (CHUNK - 1, 1),
        (CHUNK, 2),
        (CHUNK + 1, 1),
        (2 * CHUNK, 1),
        (2 * CHUNK + 7, 2),
    ],
)
def test_handoff_carries_the_tail_and_keeps_its_full_blocks(
    engines: Callable[..., ToyEngine], length: int, shards: int
) -> None:
    first, second = engines(shards=shards), engines(shards=shards)
    prompt = tokens(2, length)
    transfer = {"transfer_id": "transfer-" + "x" * 20}
    request = Request("p", prompt, {"do_remote_decode": True, **transfer})
    first.admit(request)
    first.step((request, length))
    first.finish(request)
    decode = Request("d", [*prompt, 7], {"do_remote_prefill": True, "prefill_tokens": length, **transfer})
    assert second.admit(decode) == set()
    assert decode.num_computed == length
    second.check_cache(decode, length)
    second.finish(decode)
    kept = length // CHUNK + (length % CHUNK >= BLOCK)
    wait_until(
        lambda: engines.node.status().chunks.get("sealed", 0) == kept * shards, what="a part of a block is freed"
    )
    stranger = Request("s", [*prompt, 7], {"do_remote_prefill": True, "transfer_id": "another-" + "x" * 20})
    second.admit(stranger)
    assert stranger.num_computed == length // BLOCK * BLOCK
    second.check_cache(stranger, stranger.num_computed)
    second.finish(stranger)
    wait_until(lambda: at_rest(engines), what="at rest")


def test_blocks_that_vllm_had_cached_are_gathered_in_the_first_step(engines: Callable[..., ToyEngine]) -> None:
    """The store lost a chunk that the engine still has: it is gathered although it is not computed again."""
    engine = engines()
    prompt = tokens(3, 2 * CHUNK + 3)
    request = Request("a", prompt)
    engine.admit(request)
    engine.step((request, len(prompt)))
    with pdx.connect(engines.node.address) as node:
        wait_until(lambda: node.status().chunks.get("sealed") == 2, what="sealed")
        with node.reserve("everything", engines.node.config.arena_bytes) as _:  # evicts them
            assert "sealed" not in node.status().chunks
    cached = Request("b", prompt)
    cached.num_computed = 2 * CHUNK
    assert engine.match(cached, local=2 * CHUNK) == 0
    cached.block_ids = list(request.block_ids)
    engine.scheduler.allocated(cached, [cached.block_ids], 0)
    engine.step((cached, 3))
    wait_until(lambda: engines.node.status().chunks.get("sealed") == 2, what="sealed again")
    engine.scheduler.finished(cached)
    engine.finish(request)


def test_generated_chunks_are_saved_when_full(engines: Callable[..., ToyEngine]) -> None:
    engine = engines()
    request = Request("g", tokens(4, CHUNK - 2))
    engine.admit(request)
    engine.step((request, request.num_tokens))
    generator = random.Random(5)

    def generate() -> bool:
        request.all_token_ids.append(generator.randrange(1000))
        return bool(engine.step((request, 1)).saves)

    wait_until(lambda: engines.node.status().chunks == {"sealed": 1}, what="the prompt's full blocks are kept")
    for count in (1, 2):
        while request.num_tokens < count * CHUNK:
            assert not generate(), "a chunk is saved when it is full"
        wait_until(lambda: engines.node.status().chunks.get("filling") == 1, what="it has room")
        wait_until(generate, what="a step that knows of the room saves it")
        wait_until(lambda count=count: engines.node.status().chunks == {"sealed": count}, what="sealed")
    assert request.num_tokens < 3 * CHUNK
    again = Request("again", request.all_token_ids)
    engine.admit(again)
    engine.check_cache(again, again.num_computed)
    assert again.num_computed == 2 * CHUNK
    engine.finish(again)
    engine.finish(request)


@pytest.mark.parametrize(("by_layer", "group_bytes"), [(False, 1), (True, 1), (True, step_save.GROUP_BYTES)])
def test_a_step_tells_its_node_once_unless_its_slices_are_pushed(
    engines: Callable[..., ToyEngine], monkeypatch: pytest.MonkeyPatch, by_layer: bool, group_bytes: int
) -> None:
    """Whatever the number of layers and of requests; and more often only by bytes that are worth a message."""
    monkeypatch.setattr(step_save, "GROUP_BYTES", group_bytes)
    told: list[Fill] = []

    class Recording(Connection):
        def tell(self, body: Any) -> None:
            if isinstance(body, Fill):
                told.append(body)
            super().tell(body)

    monkeypatch.setattr("pdx.engine.link.Connection", Recording)
    engine = engines()
    requests = [Request("a", tokens(70, 2 * CHUNK)), Request("b", tokens(71, CHUNK))]
    for request in requests:
        engine.admit(request)
        for grant in engine.scheduler.track(request).node.grants:
            grant.by_layer = by_layer
    engine.step(*[(request, request.num_tokens) for request in requests])
    layers = [(layer, 1, False) for layer in range(LAYERS)] if by_layer and group_bytes == 1 else []
    assert [(fill.first_layer, fill.layers, fill.seal) for fill in told] == [*layers, (0, LAYERS, True)]
    assert {len(fill.slots) for fill in told} == {3}
    wait_until(lambda: engines.node.status().chunks == {"sealed": 3}, what="sealed")
    for request in requests:
        engine.finish(request)


def test_chunk_evicted_before_it_is_loaded_is_reported_and_recomputed(engines: Callable[..., ToyEngine]) -> None:
    engine = engines(lease_s=0.001)
    prompt = tokens(7, 3 * CHUNK)
    request = Request("a", prompt)
    engine.admit(request)
    engine.step((request, len(prompt)))
    engine.finish(request)
    wait_until(lambda: engines.node.status().chunks.get("sealed") == 3, what="sealed")
    again = Request("b", prompt)
    external = engine.match(again)
    assert external == 3 * CHUNK
    engine.allocate(again, external)
    wait_until(lambda: not engines.node.status().leases, what="the lease has expired")
    with pdx.connect(engines.node.address) as node, node.reserve("all", engines.node.config.arena_bytes):
        failed = engine.finish_load(again)
        wait_until(lambda: node.why("b").requests[0].hits == 0, what="the node knows that nothing was loaded")
        [reason] = node.why("b").requests[0].reasons
    assert failed == set(again.block_ids[: 3 * CHUNK // BLOCK])
    assert (reason.first, reason.count, reason.is_hit, reason.kind) == (0, 3, False, "failed")
    assert reason.text.startswith("its engine could not load it: evicted before that, never filled, or out of reach; ")
    assert engine.match(again) == 0, "not loaded twice: recomputed"
    engine.finish(again)
    wait_until(lambda: at_rest(engines), what="at rest")


def test_request_that_ends_in_the_middle_of_prefill_gives_its_room_back(engines: Callable[..., ToyEngine]) -> None:
    engine = engines()
    prompt = tokens(8, 4 * CHUNK + 2)
    request = Request("a", prompt, {"do_remote_decode": True, "transfer_id": "y" * 20})
    engine.admit(request)
    engine.step((request, CHUNK + 3))
    wait_until(lambda: engines.node.status().chunks == {"sealed": 1, "filling": 4}, what="one of five is whole")
    engine.finish(request)
    wait_until(lambda: engines.node.status().chunks == {"sealed": 1}, what="only what is whole stays")
    waiting = Request("d", prompt, {"do_remote_prefill": True, "transfer_id": "y" * 20})
    engine.admit(waiting)
    assert waiting.num_computed == CHUNK, "the decoder does not wait for a transfer that was given up"
    engine.finish(waiting)
    wait_until(lambda: at_rest(engines), what="at rest")


def test_prefill_waits_for_room_but_not_forever(engines: Callable[..., ToyEngine]) -> None:
    engine = engines(reserve_wait_s=0.3)
    with pdx.connect(engines.node.address) as node:
        ballast = node.reserve("ballast", engines.node.config.arena_bytes)
        impatient = Request("p", tokens(11, 2 * CHUNK), {"do_remote_decode": True, "transfer_id": "v" * 20})
        assert engine.match(impatient) == 0
        engine.allocate(impatient, 0)
        engine.step((impatient, 2 * CHUNK))
        engine.finish(impatient)
        patient = Request("q", tokens(12, 2 * CHUNK), {"do_remote_decode": True, "transfer_id": "u" * 20})
        assert engine.scheduler.matched_tokens(patient, 0) is None
        ballast.abort()
        engine.admit(patient)
        engine.step((patient, 2 * CHUNK))
        engine.finish(patient)
        wait_until(lambda: node.status().chunks.get("sealed") == 2, what="the patient one found room")
        assert node.status().counters["reserve_full"] >= 1


def test_what_was_done_without_pdx_is_counted(engines: Callable[..., ToyEngine]) -> None:
    """A part of the prompt is saved where not all fits, and the node's counters say that something was missing."""
    engine = engines(reserve_wait_s=0.05)
    with pdx.connect(engines.node.address) as node:
        room = MAX_CHUNK_BYTES + 4096
        ballast = node.reserve("ballast", engines.node.config.arena_bytes - room // 4096 * 4096)
        request = Request("p", tokens(16, 3 * CHUNK), {"do_remote_decode": True, "transfer_id": "s" * 20})
        engine.admit(request)
        engine.step((request, 3 * CHUNK))
        engine.finish(request)
        wait_until(lambda: node.status().counters.get("degraded_no_room") == 1, what="counted")
        wait_until(lambda: node.status().chunks.get("sealed") == 1, what="a part is saved")
        ballast.abort()


def test_node_killed_between_steps_costs_only_the_cache(
    engines_of_killed: Callable[..., ToyEngine], start_node: Any
) -> None:
    engine = engines_of_killed()
    prompt = tokens(13, 3 * CHUNK)
    request = Request("a", prompt, {"do_remote_decode": True, "transfer_id": "t" * 20})
    engine.admit(request)
    engine.step((request, CHUNK))
    engines_of_killed.node.kill()
    engine.step((request, CHUNK))
    lost = Request("b", prompt)
    assert engine.match(lost) == 0
    engine.step((request, CHUNK))
    engine.finish(request)
    engines_of_killed.node = start_node()
    wait_until(lambda: engine.is_attached, what="both halves are attached to the next node")
    again = Request("c", prompt)
    engine.admit(again)
    engine.step((again, len(prompt)))
    wait_until(lambda: engines_of_killed.node.status().chunks.get("sealed") == 3, what="saved in the next node")
    engine.finish(again)


def test_hit_counts_only_where_every_shard_has_it(engines: Callable[..., ToyEngine]) -> None:
    """A worker that dies in the middle leaves chunks of one shard: no hit for anybody."""
    engine = engines(shards=2)
    prompt = tokens(15, 2 * CHUNK)
    request = Request("a", prompt)
    engine.admit(request)
    plan = engine.scheduler.plan_step(engine.record({"a": (request, 2 * CHUNK)}))
    engine.run_worker(0, plan, {"a": (request, 2 * CHUNK)})  # rank 1 never does its part
    wait_until(lambda: engines.node.status().chunks == {"sealed": 2, "filling": 2}, what="one shard is sealed")
    other = Request("b", prompt)
    assert engine.match(other) == 0
    engine.scheduler.finished(other)
    engine.workers[1].close()
    wait_until(lambda: engines.node.status().chunks == {"sealed": 2}, what="the other shard's room is given back")
    assert engine.match(Request("c", prompt)) == 0
