"""A model of which every other layer attends to a window: two cache groups, behind the proxy.

Runs behind the tests that end the engines of one node: there are never more than two at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from pair import Pair, plain_answers
from test_pair_answers import computed_prompt_tokens, essence
from tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

WINDOW = 200  # less than a chunk, and no multiple of a block: its edge is inside of what is handed over
NAMES = ["length-300", "length-1000", "length-3000", "many-tokens", "chat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    """What a plain engine answers, which keeps the KV of windows in a group of its own."""
    model = make_tiny(folder / "model", seed=0, window=WINDOW)
    return plain_answers(folder, model, {name: CASES[name] for name in NAMES})


@pytest.fixture(scope="module")
def windowed(folder: Path, answers: dict[str, Any]) -> Iterator[Pair]:
    pair = Pair(folder, folder / "model")
    try:
        pair.wait_ready()
        yield pair
    finally:
        pair.close()


def test_the_model_has_windows_whose_blocks_vllm_keeps_by_themselves(folder: Path, windowed: Pair) -> None:
    said = "Hybrid KV cache manager is disabled for this hybrid model"
    for log in (windowed.decode.log, folder / "plain.log"):
        assert said not in log.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_a_plain_engines_and_the_decoder_computes_nothing_of_the_prompt(
    name: str, windowed: Pair, answers: dict[str, Any]
) -> None:
    before = computed_prompt_tokens(windowed.decode)
    assert essence(windowed.post(*CASES[name])) == essence(answers[name])
    assert computed_prompt_tokens(windowed.decode) - before <= 2
