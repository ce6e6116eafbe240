"""vLLM's API through the proxy: what goes whole to one engine, and responses and messages, shared by two."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import MODEL, completion, text
from engine_process import Server
from http_client import post, stream
from pair import ENGINE_ENV, Pair

from pdx.cli.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pooling(workplace: Path, model: Path) -> Iterator[tuple[str, str]]:
    """The URLs of an engine that pools, and of a proxy before it."""
    port, proxy_port = free_ports(2)
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--runner", "pooling", "--served-model-name", MODEL, "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--enforce-eager"]
    engine = Server(command, port, workplace / "pooling.log", ENGINE_ENV)
    command = [sys.executable, "-m", "pdx.cli.main", "proxy", "--port", str(proxy_port), "--decode", engine.url]
    proxy = Server([*command, "--control", f"ipc://{workplace}/pooling.sock"], proxy_port, workplace / "pproxy.log")
    try:
        engine.wait_ready()
        proxy.wait_ready()
        yield engine.url, proxy.url
    finally:
        proxy.stop()
        engine.stop()


def raw(url: str, path: str, body: dict[str, Any] | None) -> tuple[int, str, bytes]:
    """Status, type and body of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", "X-Request-Id": "x"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


TEXTS = {"model": MODEL, "input": ["one text", "and another"]}
POOLING = {
    "/v1/embeddings": TEXTS,
    "/pooling": TEXTS,
    "/v1/embeddings?": {**TEXTS, "encoding_format": "bytes_only"},
    "/score": {"model": MODEL, "text_1": "a", "text_2": ["b", "c"]},
    "/v2/rerank": {"model": MODEL, "query": "a", "documents": ["b", "c"]},
    "/v1/embeddings?unknown": {**TEXTS, "model": "none"},
    "/v1/completions": {"model": MODEL, "prompt": "a"},
}


@pytest.mark.parametrize("path", POOLING)
def test_an_engine_that_pools_answers_as_without_a_proxy(path: str, pooling: tuple[str, str]) -> None:
    engine, proxy = (raw(url, path, POOLING[path]) for url in pooling)
    assert without_ids(*proxy) == without_ids(*engine)


def without_ids(status: int, kind: str, content: bytes) -> Any:
    if kind != "application/json":
        return status, kind, content
    answer = json.loads(content)
    return status, kind, {name: value for name, value in answer.items() if name not in ("id", "created")}


def response(seed: int) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": MODEL, "input": text(seed, 700), "max_output_tokens": 20, "temperature": 0}


def message(seed: int) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text(seed, 700)}]
    return "/v1/messages", {"model": MODEL, "messages": messages, "max_tokens": 20, "temperature": 0}


def said(answer: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """The text and the usage."""
    assert answer.get("http_status", 200) == 200, answer
    parts = answer["content"] if "content" in answer else answer["output"][0]["content"]
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens")
    usage = {name: answer["usage"][name] for name in names if name in answer["usage"]}
    return parts[0]["text"], usage | {"cached": answer["usage"].get("input_tokens_details", {}).get("cached_tokens")}


def computed(server: Server) -> float:
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


@pytest.mark.parametrize("kind", [response, message])
def test_two_engines_share_responses_and_messages(kind: Any, pair: Pair) -> None:
    path, body = kind(4000 + len(kind.__name__))
    before = computed(pair.decode)
    answer = pair.post(path, body)
    assert answer["pdx"]["x-pdx-mode"] == "sampled"
    assert computed(pair.decode) - before <= 2
    words, usage = said(answer)
    assert usage.get("cached") in (0, None)
    assert usage.get("cache_read_input_tokens", 0) == 0
    assert said(post(pair.prefill.url, path, body))[0] == words, "an engine alone"
    events = list(stream(pair.proxy.url, path, body))
    deltas = [
        event["delta"] for event in events if event["type"] in ("response.output_text.delta", "content_block_delta")
    ]
    assert "".join(each if isinstance(each, str) else each["text"] for each in deltas) == words
    assert events[-1]["type"] in ("response.completed", "message_stop")


SEVERAL = {
    # Of one step: vLLM 0.32 on a CPU ends at a seed whose prompt takes more.
    "n": (completion(text(4100, 320), n=3, temperature=0.8, seed=5), 3 * 2),
    "prompts": (completion([text(4101, 700), text(4102, 300)]), 2 * 2),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_decode_engine_computes_no_prompt_for_several_answers(name: str, pair: Pair) -> None:
    (path, body), most = SEVERAL[name]
    before = computed(pair.decode)
    answer = pair.post(path, body)
    assert answer["pdx"]["x-pdx-mode"] == "sampled", answer
    assert computed(pair.decode) - before <= most
    alone = post(pair.prefill.url, path, body)
    for got, want in zip(answer["choices"], alone["choices"], strict=True):
        assert got["text"] == want["text"]
