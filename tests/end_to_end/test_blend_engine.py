"""A real engine that answers about documents whose KV was blended, against what it answers about the same prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from answers import computed_prompt_tokens
from cases import text
from engine_process import Server
from host import Host
from http_client import post

from pdx.bench.harness.tiny_llama import make_model
from pdx.blend.blender import Blender
from pdx.errors import LayoutError
from pdx.testing.waiting import wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]

DOCUMENTS = [list(text(number, length).encode()) for number, length in ((1, 512), (2, 700), (3, 300))]
QUESTION = list(text(4, 60).encode())


class Asked:
    """One engine beside a node."""

    def __init__(self, host: Host, server: Server) -> None:
        self.host, self.server = host, server

    def __call__(self, tokens: list[int], reuse: str = "", max_tokens: int = 24) -> tuple[str, int]:
        """The answer, and how many of the tokens the engine has computed for it."""
        before = computed_prompt_tokens(self.server)
        body: dict[str, Any] = {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0}
        if reuse:
            body["kv_transfer_params"] = {"pdx_hints": {"version": 1, "reuse": reuse}}
        answer = post(self.server.url, "/v1/completions", body)
        assert answer["http_status"] == 200, answer
        wait_until(lambda: self.host.status().chunks.keys() <= {"sealed"}, what="what was computed is sealed")
        return answer["choices"][0]["text"], computed_prompt_tokens(self.server) - before


@pytest.fixture
def ask(host: Host, model: Path) -> Asked:
    server = host.serve("engine", model)
    host.wait_saving(server)
    return Asked(host, server)


def test_documents_in_any_order_are_answered_about_as_if_they_were_computed(
    ask: Asked, model: Path, tmp_path: Path
) -> None:
    for each in DOCUMENTS:
        ask(each, max_tokens=1)
    orders = [DOCUMENTS, [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]]]
    with Blender.at(ask.host.address, model) as blender:
        for order in orders:
            prompt = sum(order, []) + QUESTION
            made = blender.blend(order, 1.0)
            assert made.found >= 1024
            blended, computed = ask(prompt, made.reuse)
            exact, _ = ask(prompt)
            assert blended == exact
            assert computed == len(prompt) - made.tokens
            nothing, computed = ask(prompt, blender.blend(order, 0.0).reuse)  # the control
            assert nothing != exact
            assert computed == len(prompt) - made.tokens

    another = make_model(tmp_path / "another", seed=7)
    with pytest.raises(LayoutError, match="not those of engine"), Blender.at(ask.host.address, another):
        pass

    files = []
    for number, each in enumerate(orders[1]):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_bytes(bytes(each))
    command = [
        sys.executable,
        "-P",
        "-m",
        "pdx.cli.main",
        "blend",
        *files,
        "--model",
        model,
        "--node",
        ask.host.address,
    ]
    found = subprocess.run([*command, "--share", "1", "--max-tokens", "24"], capture_output=True, text=True, check=True)
    body = json.loads(found.stdout)
    assert "1,280 tokens are there" in found.stderr
    assert body["kv_transfer_params"]["pdx_hints"]["reuse"] == made.reuse
    assert body["prompt"] == sum(orders[1], [])
