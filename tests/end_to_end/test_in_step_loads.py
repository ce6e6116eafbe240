"""A real engine of vLLM loads the beginning of a prompt in the step that computes the rest: the tokens are those of a
plain one, also where such a load fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_step_engine import TURNS
from node_harness import MIB, NodeProcess
from pair import ENGINE_ENV

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("in_step_engine.py")


def run(model: Path, address: str) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, (str(PROGRAM.parent), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, **ENGINE_ENV, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, str(PROGRAM), str(model), address]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_tokens_are_those_of_a_plain_engine(model: Path, start_node: Callable[..., NodeProcess]) -> None:
    node = start_node(arena_bytes=128 * MIB)
    plain, ours = run(model, "plain"), run(model, node.address)
    assert list(ours["answers"]) == list(TURNS)
    assert ours["answers"] == plain["answers"]
    told = ours["told"]
    assert told["first"] == [[], 0]
    assert told["in step"] == [[True], 0]
    assert told["failing"][0] == [True]
    assert told["failing"][1] == 2, "the blocks of the second chunk, which are computed again"
    assert told["after it"] == [[True], 0]
    assert told["together"][1] == 0
    assert len(told["together"][0]) == 2
    assert told["together"][0][0] is True
    counters = node.status().counters
    assert counters["degraded_load_failed"] == 1
    assert "degraded_in_step_missed" not in counters
    assert "degraded_hook_failed" not in counters
