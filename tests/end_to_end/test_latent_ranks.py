"""Latent attention on two ranks: both have the same KV, one writes it, and engines of any size read it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forge import Forge
from node_harness import MIB, NodeProcess
from offline_engine import answers

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
PROMPTS = [[random.Random(seed).randrange(200) for _ in range(700)] for seed in (1, 2)]


def ask(folder: Path, ranks: int, node: NodeProcess) -> list[Any]:
    """Tokens that were not computed, and the answer, for each of the prompts."""
    return answers(folder, "deepseek_v2", {"tensor_parallel_size": ranks}, {"node": node.address}, PROMPTS)


def test_what_two_ranks_have_alike_is_stored_once_and_read_by_one(
    start_node: Callable[..., NodeProcess], forge: Forge, tmp_path: Path
) -> None:
    node = start_node(arena_bytes=64 * MIB)
    with forge.engine("deepseek_v2") as plain:
        expected = [plain.generate(prompt, 16)[0] for prompt in PROMPTS]
    first = ask(tmp_path / "model", 2, node)
    assert first == [[0, tokens] for tokens in expected]
    chunks = len(PROMPTS) * 3  # two whole ones and a tail
    node.wait_sealed(chunks)
    assert node.status().chunks == {"sealed": chunks}
    assert ask(tmp_path / "model", 1, node) == [[688, tokens] for tokens in expected]
    assert node.status().chunks == {"sealed": chunks}
