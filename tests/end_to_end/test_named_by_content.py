"""Real engines: what only has a name is not what chunks are found by."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from answers import computed_prompt_tokens
from cases import chat, completion, text
from engine_process import Server
from host import Host
from http_client import open_request, post
from pair import ENGINE_FLAGS, Pair
from tiny_vision import SIDE, make_tiny_vision

from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

PROMPT = text(600, 600)
CHUNKS = len(PROMPT) // 256


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
        # With a step's output the workers tell what they have loaded.
        path_, body = completion("step", max_tokens=1)
        assert post(self.server.url, path_, body)["http_status"] == 200

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


# ---- pictures --------------------------------------------------------------------------------

USERS = 12
NO_CACHES = ["--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"]  # vLLM counts media then: none has a digest


def shown(number: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """A question about a picture of one colour, in words that all users have in common."""
    from PIL import Image

    picture, file = Image.new("RGB", (SIDE, SIDE), (number * 20, 30, 250 - number * 20)), io.BytesIO()
    picture.save(file, "PNG")
    url = {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
    image = {"type": "image_url", "image_url": url, **more.pop("picture", {})}
    path, body = chat("", **more)
    body["messages"] = [{"role": "user", "content": [image, {"type": "text", "text": PROMPT}]}]
    return path, body


def said(answer: dict[str, Any]) -> str:
    assert answer["http_status"] == 200, answer
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


@pytest.mark.timeout(600)  # two engines that read pictures, and 26 answers
def test_each_of_twelve_users_is_answered_about_the_own_picture(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair whose engines name media by a counter, each from the beginning."""
    monkeypatch.setattr("pair.ENGINE_FLAGS", [*ENGINE_FLAGS, *NO_CACHES])
    model = make_tiny_vision(tmp_path / "eyes")
    place = workplace / "eyes"
    place.mkdir(mode=0o700)
    pair = Pair(place, model, deadlines={})  # a prompt waits behind those of eleven others, on a busy machine for long
    try:
        pair.wait_ready()
        alone = [said(post(pair.decode.url, *shown(n, cache_salt=f"alone {n}"))) for n in range(USERS)]
        assert len(set(alone)) == USERS
        before = computed_prompt_tokens(pair.decode)
        assert [said(each) for each in pair.post_all([shown(n) for n in range(USERS)])] == alone
        computed = computed_prompt_tokens(pair.decode) - before
        counters = pair.status().counters
        assert computed <= 24 * USERS, f"each computes its last tokens, and the rest was handed over: {counters}"
        # A client's name for two pictures, and the prefiller by itself: it finds what it has of each.
        for number in (3, 4):
            assert said(post(pair.prefill.url, *shown(number, picture={"uuid": "same"}))) == alone[number]
        assert not [name for name in pair.status().counters if "unnamed" in name]
    finally:
        pair.close()


# ---- models without prefixes -----------------------------------------------------------------


def test_a_text_is_embedded_twice_by_a_model_that_needs_all_of_it(host: Host, model: Path) -> None:
    """Mean pooling: found chunks ended the engine ("partial prefill is not supported")."""
    pooling = json.dumps({"pooling_type": "MEAN"})
    flags = [
        "--runner",
        "pooling",
        "--convert",
        "embed",
        "--pooler-config",
        pooling,
        "--max-num-batched-tokens",
        "4096",
    ]
    server = host.serve("embed", model, *flags)
    server.wait_ready()
    wait_until(lambda: host.workers() == 1, timeout_s=60, what="the engine is attached")
    answers = [post(server.url, "/v1/embeddings", {"model": "tiny", "input": PROMPT}) for _ in range(3)]
    assert [each["http_status"] for each in answers] == [200] * 3
    assert answers[0]["data"][0]["embedding"] == answers[2]["data"][0]["embedding"]
    status = host.status()
    assert not status.chunks
    assert not status.counters.get("looked_up_chunks")
