"""Real engines: what only has a name is not what chunks are found by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import completion, text
from engine_process import Server
from http_client import open_request, post
from test_reuse import Host

from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = text(600, 600)
CHUNKS = len(PROMPT) // 256


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("n")
    folder.chmod(0o700)
    host = Host(folder)
    yield host
    host.close()


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter that changes every answer of the model."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, rank, drawn = shape["hidden_size"], 8, torch.Generator().manual_seed(seed)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for module in config["target_modules"]:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora"
            weights[f"{name}_A.weight"] = torch.randn(rank, hidden, generator=drawn) / hidden**0.5
            weights[f"{name}_B.weight"] = torch.randn(hidden, rank, generator=drawn)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


class Adapters:
    """Adapters of one engine, and what it answers with them."""

    def __init__(self, host: Host, server: Server) -> None:
        self.host, self.server = host, server

    def load(self, name: str, path: Path, **more: Any) -> None:
        self._post("load", {"lora_name": name, "lora_path": str(path), **more})

    def unload(self, name: str) -> None:
        self._post("unload", {"lora_name": name})

    def ask(self, name: str, **more: Any) -> tuple[str, int]:
        """The answer, and the chunks that were found."""
        before = self.host.status().counters.get("hit_chunks", 0)
        path, body = completion(PROMPT, **more)
        answer = post(self.server.url, path, body | {"model": name})
        assert answer["http_status"] == 200, answer
        wait_until(lambda: self.host.status().chunks.keys() <= {"sealed"}, what="what was computed is sealed")
        return answer["choices"][0]["text"], self.host.status().counters.get("hit_chunks", 0) - before

    def _post(self, verb: str, body: dict[str, Any]) -> None:
        connection = open_request(self.server.url, f"/v1/{verb}_lora_adapter", body)
        try:
            assert connection.getresponse().status == 200
        finally:
            connection.close()


def test_an_adapter_is_its_weights_and_neither_its_name_nor_its_path(
    host: Host, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    server = host.serve("lora", model, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    host.wait_saving(server)
    adapters, path = Adapters(host, server), make_adapter(tmp_path / "a", model, seed=1)
    plain, _ = adapters.ask("tiny")
    adapters.load("sql", path)
    monday, hits = adapters.ask("sql")
    assert hits == 0
    assert monday != plain
    assert adapters.ask("sql") == (monday, CHUNKS)
    # Trained again, at the same path: unloaded and loaded, and in place.
    adapters.unload("sql")
    make_adapter(path, model, seed=2)
    adapters.load("sql", path)
    tuesday, hits = adapters.ask("sql")
    assert hits == 0
    assert tuesday != monday
    assert adapters.ask("sql", cache_salt="alone") == (tuesday, 0)
    make_adapter(path, model, seed=3)
    adapters.load("sql", path, load_inplace=True)
    wednesday, hits = adapters.ask("sql")
    assert hits == 0
    assert wednesday not in (monday, tuesday)
    # Others at another path and under another name.
    adapters.load("old", make_adapter(tmp_path / "b", model, seed=1))
    assert adapters.ask("old") == (monday, CHUNKS)
    adapters.unload("old")
    adapters.load("old", make_adapter(tmp_path / "b", model, seed=2))
    assert adapters.ask("old") == (tuesday, CHUNKS)
    assert not [name for name in host.status().counters if "unnamed" in name or "adapter" in name]
