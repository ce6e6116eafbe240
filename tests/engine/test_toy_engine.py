"""Both halves of the connector around a toy engine: every page that is loaded is what would have been computed."""

from __future__ import annotations

from typing import Any

import pytest
from toy_engine import BLOCK, CHUNK, LAYERS, PAGE_BYTES, Engines, Request, decode_of, prefill_of, tokens

from pdx.engine import step_save
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Fill

MAX_CHUNK_BYTES = LAYERS * CHUNK // BLOCK * PAGE_BYTES
TRANSFER = "transfer-" + "x" * 20


@pytest.mark.parametrize(
    ("length", "shards"), [(1, 1), (BLOCK, 2), (CHUNK - 1, 1), (CHUNK, 2), (CHUNK + 1, 1), (2 * CHUNK + 7, 2)]
)
def test_handoff_carries_the_tail_and_keeps_its_full_blocks(engines: Engines, length: int, shards: int) -> None:
    first, second = engines(shards=shards), engines(shards=shards)
    prompt = tokens(2, length)
    first.finish(first.save(prompt, prefill_of(TRANSFER)))
    assert second.load([*prompt, 7], decode_of(TRANSFER, prefill_tokens=length)) == length
    kept = length // CHUNK + (length % CHUNK >= BLOCK)
    engines.node.wait_sealed(kept * shards)  # a part of a block is freed
    assert second.load([*prompt, 7], decode_of("another-" + "x" * 20)) == length // BLOCK * BLOCK
    engines.node.wait_at_rest()


def test_blocks_that_vllm_had_cached_are_gathered_in_the_first_step(engines: Engines) -> None:
    """The store lost a chunk that the engine still has: it is gathered although it is not computed again."""
    engine, prompt = engines(), tokens(3, 2 * CHUNK + 3)
    request = engine.save(prompt)
    engines.node.wait_sealed(2)
    engines.node.forget()
    cached = Request("b", prompt)
    cached.num_computed = 2 * CHUNK
    assert engine.match(cached, local=2 * CHUNK) == 0
    cached.block_ids = list(request.block_ids)
    engine.scheduler.allocated(cached, [cached.block_ids], 0)
    engine.step((cached, 3))
    engines.node.wait_sealed(2)
    engine.scheduler.finished(cached)
    engine.finish(request)


def test_generated_chunks_are_saved_when_full(engines: Engines) -> None:
    engine, node = engines(), engines.node
    request = engine.save(tokens(4, CHUNK - 2))
    generated = iter(tokens(5, 10 * CHUNK))

    def generate() -> bool:
        request.all_token_ids.append(next(generated))
        return bool(engine.step((request, 1)).saves)

    node.wait_sealed(1)  # the prompt's full blocks
    for count in (1, 2):
        while request.num_tokens < count * CHUNK:
            assert not generate(), "a chunk is saved when it is full"
        wait_until(lambda: node.status().chunks.get("filling") == 1, what="it has room")
        wait_until(generate, what="a step that knows of the room saves it")
        node.wait_sealed(count)
    assert request.num_tokens < 3 * CHUNK
    assert engine.load(request.all_token_ids) == 2 * CHUNK
    engine.finish(request)


@pytest.mark.parametrize(("by_layer", "group_bytes"), [(False, 1), (True, step_save.GROUP_BYTES)])
def test_a_step_tells_its_node_once_unless_there_is_much_that_is_pushed(
    engines: Engines, told: list[Any], monkeypatch: pytest.MonkeyPatch, by_layer: bool, group_bytes: int
) -> None:
    """Whatever the number of layers and of requests."""
    monkeypatch.setattr(step_save, "GROUP_BYTES", group_bytes)
    engine = engines()
    requests = [Request("a", tokens(70, 2 * CHUNK)), Request("b", tokens(71, CHUNK))]
    for request in requests:
        engine.admit(request)
        for grant in engine.scheduler.track(request).node.grants:
            grant.by_layer = by_layer
    engine.step(*[(request, request.num_tokens) for request in requests])
    [fill] = [body for body in told if isinstance(body, Fill)]
    assert (fill.first_layer, fill.layers, fill.seal, len(fill.slots)) == (0, LAYERS, True, 3)
    engines.node.wait_sealed(3)
    for request in requests:
        engine.finish(request)


def test_chunks_evicted_before_they_are_loaded_are_reported_recomputed_and_saved(engines: Engines) -> None:
    engine, node = engines(lease_s=0.001), engines.node
    prompt = tokens(7, 3 * CHUNK)
    engine.run(prompt)
    node.wait_sealed(3)
    again = Request("b", prompt)
    assert engine.match(again) == 3 * CHUNK
    engine.allocate(again, 3 * CHUNK)
    wait_until(lambda: not node.status().leases, what="the lease has expired")
    node.forget()
    failed = engine.finish_load(again)
    assert failed == set(again.block_ids[: 3 * CHUNK // BLOCK])
    assert engine.match(again) == 0, "not loaded twice: recomputed"
    engine.allocate(again, 0)
    wait_until(lambda: node.status().chunks == {"filling": 3} or engine.idle(), what="there is room")
    for _ in range(len(prompt)):
        engine.step((again, 1))
    engine.finish(again)
    node.wait_sealed(3)
    with node.client() as client:
        [reason] = client.why("b").requests[0].reasons
    assert (reason.first, reason.count, reason.is_hit, reason.kind) == (0, 3, False, "failed")
    assert reason.text.startswith("its engine could not load it: evicted before that, never filled, or out of reach; ")
    node.wait_at_rest()


def test_request_that_ends_in_the_middle_of_prefill_gives_its_room_back(engines: Engines) -> None:
    engine, node = engines(), engines.node
    prompt = tokens(8, 4 * CHUNK + 2)
    request = Request("a", prompt, prefill_of("y" * 20))
    engine.admit(request)
    engine.step((request, CHUNK + 3))
    wait_until(lambda: node.status().chunks == {"sealed": 1, "filling": 4}, what="one of five is whole")
    engine.finish(request)
    wait_until(lambda: node.status().chunks == {"sealed": 1}, what="only what is whole stays")
    assert engine.load(prompt, decode_of("y" * 20)) == CHUNK, "no decoder waits for a transfer that was given up"
    node.wait_at_rest()


def test_prefill_waits_for_room_but_not_forever(engines: Engines) -> None:
    engine, node = engines(reserve_wait_s=0.3), engines.node
    patient = Request("q", tokens(12, 2 * CHUNK), prefill_of("u" * 20))
    with node.filled():
        assert engine.run(tokens(11, 2 * CHUNK), prefill_of("v" * 20)) == 0
        assert engine.scheduler.matched_tokens(patient, 0) is None
    engine.admit(patient)
    engine.step((patient, 2 * CHUNK))
    engine.finish(patient)
    node.wait_sealed(2)
    assert node.counter("reserve_full") >= 1


def test_where_not_all_fits_a_part_is_saved_and_counted(engines: Engines) -> None:
    engine, node = engines(reserve_wait_s=0.05), engines.node
    room = (MAX_CHUNK_BYTES + 4096) // 4096 * 4096
    with node.client() as client, client.reserve("ballast", node.config.arena_bytes - room):
        engine.run(tokens(16, 3 * CHUNK), prefill_of("s" * 20))
        wait_until(lambda: node.degraded("no_room") == 1, what="counted")
        node.wait_sealed(1)
