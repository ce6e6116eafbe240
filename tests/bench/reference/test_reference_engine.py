"""The reference engine by itself and with a node: what it generates depends on the whole prompt and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from node_harness import NodeProcess
from reference_prompts import CHUNK, prompt_of

from pdx.bench.reference.engine import ReferenceEngine, Request
from pdx.testing.waiting import wait_until

MakeEngine = Callable[..., ReferenceEngine]


def outputs(engine: ReferenceEngine, *prompts: list[int], max_tokens: int = 10) -> list[list[int]]:
    """What the engine generates for these prompts, all given at once."""
    requests = [engine.add(f"r{at}-{id(prompt)}", prompt, max_tokens) for at, prompt in enumerate(prompts)]
    engine.run()
    return [request.output for request in requests]


def settled(node: NodeProcess) -> int:
    """The number of sealed chunks; 0 as long as others are filling."""
    chunks = node.status().chunks
    return chunks["sealed"] if set(chunks) == {"sealed"} else 0


def is_sealed(node: NodeProcess, chunks: int) -> Callable[[], bool]:
    return lambda: node.status().chunks == {"sealed": chunks}


@pytest.mark.parametrize("exact", [True, False])
def test_a_prompt_in_pieces_gives_the_same_tokens_as_a_whole_one(make_engine: MakeEngine, exact: bool) -> None:
    prompt = prompt_of(1, 3 * CHUNK + 5)
    (whole,) = outputs(make_engine(exact=False, piece_tokens=1000), prompt)
    for piece_tokens in (16, 40):
        assert outputs(make_engine(exact=exact, piece_tokens=piece_tokens), prompt) == [whole]


@pytest.mark.parametrize("exact", [True, False])
def test_requests_together_give_the_same_tokens_as_each_alone(make_engine: MakeEngine, exact: bool) -> None:
    """Prompts of different lengths, so that steps mix pieces and single tokens; more than the cache holds at once."""
    prompts = [prompt_of(seed, count) for seed, count in enumerate((7, 3 * CHUNK, 1, 50, 12, 2 * CHUNK + 1))]
    alone = [outputs(make_engine(), prompt)[0] for prompt in prompts]
    engine = make_engine(exact=exact, num_blocks=12)
    assert outputs(engine, *prompts) == alone
    assert sorted(engine.free) == list(range(1, 12)), "all blocks are given back"


@pytest.mark.parametrize(("order", "has_hooks"), [("LBHNC", False), ("BLNHC", True)])
def test_a_second_request_loads_what_the_first_has_saved(
    make_engine: MakeEngine, node: NodeProcess, order: str, has_hooks: bool
) -> None:
    """With layer hooks, or without any as where graphs decode: bit for bit what was computed."""
    engine = make_engine(node, order=order)
    if not has_hooks:
        engine._save_layer = lambda layer: None  # type: ignore[method-assign]
    prompt = prompt_of(3, 2 * CHUNK)
    first = engine.add("first", prompt, 3 * CHUNK)

    def step() -> bool:
        engine.step()
        return node.status().chunks.get("sealed", 0) > 2

    wait_until(step, what="the prompt is saved, and a generated chunk")
    engine.run()
    chunks = wait_until(lambda: settled(node), what="what is full is sealed, and the rest given back")
    turn = [*first.all_token_ids, *prompt_of(4, 20)]
    second = engine.add("second", turn, 10)
    engine.run()
    loaded = chunks * CHUNK
    assert (second.stats.loaded_tokens, second.stats.computed_prompt_tokens) == (loaded, len(turn) - loaded)
    for pages in engine.kv.layers:
        assert torch.equal(pages[first.block_ids[: loaded // 16]], pages[second.block_ids[: loaded // 16]])
    assert [second.output] == outputs(make_engine(), turn)


@pytest.mark.parametrize(("rest", "computed"), [(0, 1), (10, 10), (28, 12)])
def test_what_is_computed_behind_a_load_is_equal_bit_for_bit(
    make_engine: MakeEngine, node: NodeProcess, rest: int, computed: int
) -> None:
    """Also where all of the prompt is in the store: then its last token is computed again."""
    engine, prompt = make_engine(node), prompt_of(5, 2 * CHUNK + rest)
    first = engine.add("first", prompt, CHUNK)
    engine.run()
    wait_until(lambda: settled(node) >= 2, what="saved")
    engine.add("other", prompt_of(6, 40), 20)
    second = engine.add("second", prompt, CHUNK)
    engine.run()
    assert (second.stats.loaded_tokens, second.stats.computed_prompt_tokens) == (2 * CHUNK + rest - rest % 16, computed)
    assert second.output == first.output
    blocks = (second.num_tokens - 1) // 16
    for pages in engine.kv.layers:
        assert torch.equal(pages[first.block_ids[:blocks]], pages[second.block_ids[:blocks]])


def test_another_prompt_another_model_and_another_block_size_load_nothing(
    make_engine: MakeEngine, node: NodeProcess
) -> None:
    prompt = prompt_of(6, 2 * CHUNK)
    outputs(make_engine(node), prompt)
    wait_until(is_sealed(node, 2), what="saved")
    other = [(prompt[0] + 1) % 331, *prompt[1:]]
    for settings, tokens in (({}, other), ({"seed": 8}, prompt), ({"block_tokens": 32}, prompt)):
        engine = make_engine(node, **settings)
        request = engine.add("other", tokens, 1)
        engine.run()
        assert (request.stats.loaded_tokens, request.stats.computed_prompt_tokens) == (0, 2 * CHUNK)


@pytest.mark.long
def test_node_killed_while_a_prompt_is_computed(
    make_engine: MakeEngine, node: NodeProcess, start_node: Callable[..., NodeProcess]
) -> None:
    """The same tokens all the same; and the next node gets the next prompt."""
    engine, prompt = make_engine(node), prompt_of(8, 4 * CHUNK)
    request = engine.add("r", prompt, 10)
    while request.num_computed < 2 * CHUNK:
        engine.step()
    node.kill()
    engine.run()
    assert request.stats.computed_prompt_tokens == len(prompt)
    assert [request.output] == outputs(make_engine(), prompt)
    following = start_node()
    wait_until(
        lambda: engine.worker.link.is_attached and engine.scheduler.link.is_attached,
        timeout_s=10,
        what="attached to the next node",
    )
    outputs(engine, prompt)
    wait_until(is_sealed(following, 4), what="saved there")


@pytest.mark.long
def test_node_killed_between_lookup_and_load(
    make_engine: MakeEngine, node: NodeProcess, start_node: Callable[..., NodeProcess]
) -> None:
    """Blocks are allocated and the load is ordered; then they are reported as failed, and computed."""
    engine, prompt = make_engine(node), prompt_of(9, 3 * CHUNK + 4)
    outputs(engine, prompt)
    wait_until(is_sealed(node, 3), what="saved")
    request = engine.add("again", prompt, 10)
    allocated, found = engine.scheduler.allocated, []

    def allocate_and_kill(request: Request, block_ids: list[int], num_external: int) -> None:
        allocated(request, block_ids, num_external)
        found.append(num_external)
        node.kill()
        wait_until(lambda: not engine.worker.link.is_attached, what="the worker knows")

    engine.scheduler.allocated = allocate_and_kill  # type: ignore[method-assign]
    engine.run()
    assert found == [3 * CHUNK]
    assert (request.stats.loaded_tokens, request.stats.computed_prompt_tokens) == (0, len(prompt))
    assert [request.output] == outputs(make_engine(), prompt)
    start_node()  # cleans up


def test_a_step_never_waits_for_a_transfer(make_engine: MakeEngine, node: NodeProcess) -> None:
    """While one request waits for its transfer, another runs to its end."""
    first, second = make_engine(node), make_engine(node)
    transfer: dict[str, Any] = {"transfer_id": "t" * 20}
    prompt = prompt_of(10, 2 * CHUNK + 3)
    prefill = first.add("p", prompt, 1, {"do_remote_decode": True, **transfer})
    while not prefill.num_computed:
        first.step()
    waiting = second.add("d", prompt, 5, {"do_remote_prefill": True, **transfer})
    other = second.add("o", prompt_of(11, 10), 5)
    while not other.stats.finished_ns:
        second.step()
    assert second.waiting == [waiting]
    first.run()
    second.run()
    assert (waiting.stats.loaded_tokens, waiting.stats.computed_prompt_tokens) == (len(prompt), 1)
    assert waiting.output[:1] == prefill.output
