"""A conversation that was cut, on a real engine.

In a model of one layer a token's KV depends on the token and its position alone. So what is moved is exact there, and
the answers are those of a plain engine to the prompt that is left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cases import completion, text
from engine_process import Server
from host import Host, hit_tokens
from http_client import post
from pair import plain_answers

from pdx.bench.harness.tiny_llama import make_model
from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

HISTORY = text(500, 2100)
# What is left of it, and how much of that is found: whole chunks of 256 and what leads up to them, without a gap.
CUT = {
    "the beginning is kept": (HISTORY[:64] + HISTORY[701:2048], 64 + 1347),
    "the first token is kept": (HISTORY[:1] + HISTORY[300:2048], 1 + 1748),
    "a chunk is kept": (HISTORY[:256] + HISTORY[512:2048], 256 + 1536),
    "tokens are left out": (HISTORY[:300] + HISTORY[305:800] + HISTORY[1000:2048], 300 + 495 + 1048),
    "parts change places": (HISTORY[:256] + HISTORY[1024:1792] + HISTORY[256:1024], 256 + 2 * 768),
}
NEW = text(501, 40)


def hints(**more: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"pdx_hints": {"version": 1, "reuse": "moved"}, **more}}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "model"
    return make_model(folder, layers=1, hidden=256, heads=4, kv_heads=2, head_dim=64, seed=5)


@pytest.fixture(scope="module")
def plain(one_layer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a plain engine answers."""
    asked = {name: completion(prompt + NEW, max_tokens=24) for name, (prompt, _) in CUT.items()}
    answers = plain_answers(tmp_path_factory.mktemp("p"), one_layer, asked)
    return {name: answer["choices"][0]["text"] for name, answer in answers.items()}


def answer_of(server: Server, prompt: str, **more: Any) -> str:
    answer = post(server.url, *completion(prompt + NEW, max_tokens=24, **more))
    assert answer["http_status"] == 200, answer
    return str(answer["choices"][0]["text"])


def saved(host: Host, server: Server) -> None:
    """The history is in the store."""
    server.wait_ready()
    host.wait_saving(server)
    before = host.sealed()
    post(server.url, *completion(HISTORY, max_tokens=1))
    wait_until(lambda: host.sealed() >= before + 8, timeout_s=60, what="the history is saved")


def test_answers_to_cut_prompts_are_those_of_a_plain_engine(host: Host, one_layer: Path, plain: dict[str, str]) -> None:
    server = host.serve("moved", one_layer, moved=True)
    saved(host, server)
    for name, (prompt, found) in CUT.items():
        hits = hit_tokens(server)
        answer = post(server.url, *completion(prompt + NEW, max_tokens=24, **hints()))
        assert answer["choices"][0]["text"] == plain[name], name
        assert hit_tokens(server) - hits == found, name
        assert answer["kv_transfer_params"]["pdx_hints"]["reuse"].startswith("accepted"), name
    wait_until(lambda: host.status().counters.get("moved_tokens", 0) >= 4 * 1024, what="moved tokens are counted")
    assert not host.status().counters.get("degraded_load_failed"), "what was not loaded was computed"
    for name, (prompt, _) in CUT.items():  # exact requests find what they share with the history, and no more
        hits = hit_tokens(server)
        assert answer_of(server, prompt) == plain[name]
        assert hit_tokens(server) - hits <= 384
    server.stop()


def test_without_the_turn_answers_are_others(
    host: Host, one_layer: Path, plain: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = {
        "kv_connector": "NaiveConnector",
        "kv_connector_module_path": "naive_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": host.address, "arena": "256MiB", "lookup_s": 30.0, "moved": True},
    }
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    server = host.serve("naive", one_layer, "--kv-transfer-config", json.dumps(connector))
    saved(host, server)
    answers = {name: answer_of(server, prompt, **hints()) for name, (prompt, _) in CUT.items()}
    assert not host.status().counters.get("degraded_load_failed")
    same = [name for name in CUT if answers[name] == plain[name]]
    assert len(same) <= 1, same
    server.stop()
