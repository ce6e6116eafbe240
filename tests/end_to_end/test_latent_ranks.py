"""Latent attention on two ranks: both have the same KV, one writes it, and engines of any size read it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forge import Forge
from node_harness import MIB, NodeProcess
from pair import ENGINE_ENV

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[1] / "support" / "offline_engine.py"
PROMPTS = [[random.Random(seed).randrange(200) for _ in range(700)] for seed in (1, 2)]


def answers(folder: Path, ranks: int, node: NodeProcess) -> list[Any]:
    """Tokens that were not computed, and the answer, for each of the prompts."""
    command = [sys.executable, str(SCRIPT), str(folder), "deepseek_v2", str(ranks), node.address, json.dumps(PROMPTS)]
    env = {
        **os.environ,
        **ENGINE_ENV,
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        "VLLM_CPU_CI_ENV": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400, check=False)
    found = [json.loads(line.removeprefix("ANSWER ")) for line in done.stdout.splitlines() if "ANSWER" in line]
    assert len(found) == len(PROMPTS), done.stdout[-3000:] + done.stderr[-9000:]
    return found


def test_what_two_ranks_have_alike_is_stored_once_and_read_by_one(
    start_node: Callable[..., NodeProcess], forge: Forge, tmp_path: Path
) -> None:
    node = start_node(arena_bytes=64 * MIB)
    with forge.engine("deepseek_v2") as plain:
        expected = [plain.generate(prompt, 16)[0] for prompt in PROMPTS]
    first = answers(tmp_path / "model", 2, node)
    assert first == [[0, tokens] for tokens in expected]
    chunks = len(PROMPTS) * 3  # two whole ones and a tail
    node.wait_sealed(chunks)
    assert node.status().chunks == {"sealed": chunks}
    assert answers(tmp_path / "model", 1, node) == [[688, tokens] for tokens in expected]
    assert node.status().chunks == {"sealed": chunks}
