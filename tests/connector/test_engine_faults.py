"""Faults of the engine around the halves: what was not computed is never whole, and the engine goes on."""

from __future__ import annotations

from typing import Any

import pytest
from node_harness import wait_until
from stream_bed import Bed, check_loaded, saved, streams_of, tokens
from toy_engine import CHUNK, LAYERS, ForwardFailed, Request

from pdx.messages import Abort, Fill, Mark


def fail_step(bed: Bed, fails_at: tuple[int, int], *, done: int = 0, **settings: Any) -> tuple[list[int], Request]:
    """A request of an engine whose forward pass fails behind `done` tokens, which were computed, and its prompt."""
    engine = bed.engine(**settings)
    prompt = tokens(500, 2 * CHUNK)
    request = Request("failing", prompt, {"do_remote_decode": True, "transfer_id": "f" * 20})
    engine.admit(request)
    if done:
        engine.step((request, done))
    engine.fails_at = fails_at
    with pytest.raises(ForwardFailed):
        engine.step((request, len(prompt) - done))
    engine.fails_at = None
    return prompt, request


@pytest.mark.parametrize("lags", [False, True], ids=["cpu", "streams"])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("done", [0, CHUNK, CHUNK + 3])
def test_a_chunk_of_which_a_layer_was_not_computed_is_never_sealed(bed: Bed, lags: bool, layer: int, done: int) -> None:
    """vLLM ends a step with `wait_for_save` also when its forward pass has raised."""
    prompt, request = fail_step(bed, (0, layer), done=done, lags=lags)
    whole = done // CHUNK
    wait_until(lambda: bed.node.status().counters.get("aborted") == 2 - whole, what="the room is given back")
    assert bed.node.status().chunks == ({"sealed": whole} if whole else {})
    other = bed.engine(lags=False)
    check_loaded(other, prompt, whole * CHUNK)
    bed.made[0][0].finish(request)
    bed.wait_at_rest()


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
    streams_of(engine).synchronize()
    engine.finish(request)
    bed.wait_at_rest()
    check_loaded(engine, prompt, 0)


def test_the_node_is_told_of_no_moment_of_a_failed_step(bed: Bed) -> None:
    """Neither the end of the prompt's computing nor that of its gathering is a moment of the transfer's timeline."""
    _, request = fail_step(bed, (0, LAYERS - 1))
    engine = bed.made[0][0]
    engine.finish(request)
    streams_of(engine).synchronize()
    bed.wait_at_rest()
    assert bed.told(Mark) == []
    assert not any(fill.seal for fill in bed.told(Fill))
    assert bed.told(Abort)


def test_a_rank_whose_forward_pass_fails_spoils_the_chunk_for_all(bed: Bed) -> None:
    prompt, request = fail_step(bed, (1, 1), lags=False, shards=2)
    wait_until(lambda: bed.node.status().chunks == {"sealed": 2}, what="the first rank is done, the second gave up")
    engine = bed.made[0][0]
    check_loaded(engine, prompt, 0)
    engine.finish(request)


@pytest.mark.parametrize("lags", [False, True], ids=["cpu", "streams"])
def test_the_engine_saves_again_after_a_failed_step(bed: Bed, lags: bool) -> None:
    prompt, request = fail_step(bed, (0, 1), lags=lags)
    engine = bed.made[0][0]
    engine.finish(request)
    bed.wait_at_rest()
    engine.finish(saved(engine, prompt))
    bed.wait_sealed(2)
    check_loaded(engine, prompt, 2 * CHUNK)
