"""A pipeline of two stages, and engines without one: what one has computed the other loads, and answers as plain vLLM
does. On CPUs vLLM's later stages want a patch (`pipeline_buffers`), or that the model is compiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from forge import Forge
from node_harness import MIB, NodeProcess
from offline_engine import answers

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
EAGER = {"pipeline_parallel_size": 2, "worker_extension_cls": "pipeline_buffers.Buffers"}
COMPILED = {"pipeline_parallel_size": 2, "enforce_eager": False}
PROMPTS = [[random.Random(seed).randrange(200) for _ in range(700)] for seed in (1, 2)]


@pytest.mark.parametrize(
    ("family", "stages"),
    [("llama", EAGER), ("gptoss", EAGER), ("llama", COMPILED)],
    ids=["llama", "gptoss", "llama-compiled"],
)
def test_a_pipeline_and_an_engine_without_one_share_chunks(
    start_node: Callable[..., NodeProcess], forge: Forge, tmp_path: Path, family: str, stages: dict[str, Any]
) -> None:
    """Of one cache group, and of two. Without a setting a pipeline is cut where its stages are."""
    node = start_node(arena_bytes=128 * MIB)
    with forge.engine(family) as plain:
        one, two = [plain.generate(prompt, 16)[0] for prompt in PROMPTS]
    has, cut = {"node": node.address}, {"node": node.address, "stages": 2}

    def ask(options: dict[str, Any], settings: dict[str, Any], *prompts: list[int]) -> list[Any]:
        return answers(tmp_path / "model", family, options, settings, prompts)

    first, second = PROMPTS
    assert ask(stages, has, first) == [[0, one]]
    per_prompt = 4 * len(FAMILIES[family].groups)  # two chunks of each part of each group
    node.wait_sealed(per_prompt)
    assert ask({}, cut, first, second) == [[512, one], [0, two]]
    node.wait_sealed(2 * per_prompt)
    assert ask(stages, cut, second) == [[512, two]]
