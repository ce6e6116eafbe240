"""Decode legs that come when their transfers are over: all that was prefilled is there for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import NodeProcess
from test_two_nodes import Pair, numbers, two_nodes
from toy_engine import BLOCK, CHUNK, decode_of, prefill_of

LENGTHS = [1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + BLOCK + 1]


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def pair(request: Any, place: Path, start_node: Callable[..., NodeProcess]) -> Iterator[Pair]:
    nodes = two_nodes(start_node, place, arena_bytes=1 << 20) if request.param == 2 else [start_node(name="one")]
    with contextlib.closing(Pair(nodes)) as made:
        yield made


def transfer(number: int) -> str:
    return f"transfer-{number:020d}"


def prefilled(pair: Pair, number: int, length: int) -> list[int]:
    """A prompt whose prefill leg is over."""
    prompt = numbers(10_000 * number, length)
    node = {"decode_node": "two"} if len(pair.nodes) > 1 else {}
    pair.first.finish(pair.first.save(prompt, prefill_of(transfer(number), **node), step=CHUNK))
    return prompt


def decoded(pair: Pair, number: int, prompt: list[int], **params: Any) -> int:
    """How many tokens of the prompt its decode leg loads."""
    named = {"prefill_node": "one"} if len(pair.nodes) > 1 else {}
    return pair.second.load(prompt, decode_of(transfer(number), **named, **params))


@pytest.mark.parametrize("is_early", [False, True])
def test_a_leg_that_comes_late_loads_all(pair: Pair, is_early: bool) -> None:
    params = {"is_early": True} if is_early else {}
    for number, length in enumerate(LENGTHS):
        prompt = prefilled(pair, number, length)
        assert decoded(pair, number, prompt, **params) == length


@pytest.mark.parametrize("is_early", [False, True])
def test_of_several_at_once_each_loads_all(pair: Pair, is_early: bool) -> None:
    params = {"is_early": True} if is_early else {}
    prompts = [prefilled(pair, number, LENGTHS[number % len(LENGTHS)]) for number in range(16)]
    found = [decoded(pair, number, prompt, **params) for number, prompt in enumerate(prompts)]
    assert found == [len(prompt) for prompt in prompts]
