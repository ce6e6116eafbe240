"""Routers that were made for NIXL and know nothing of PDX: vllm-router as published, and others as they are written."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from answers import computed_prompt_tokens, essence
from cases import chat, completion, text
from engine_process import Server
from http_client import post, stream

from pdx.bench.proxy.example_proxy import NIXL_PREFILL
from pdx.cli.ports import free_ports
from pdx.testing.waiting import wait_until

PACKAGE = "vllm-router==0.1.17"


@contextmanager
def vllm_router(folder: Path, prefill: str, decode: str) -> Iterator[Server]:
    """vllm-router before these two engines; it and its log are in `folder`. Skips where pip does not get it."""
    site = folder / "vllm-router"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    fetched = subprocess.run(
        [*command, "--target", site, PACKAGE, "orjson"], capture_output=True, text=True, timeout=300
    )
    if fetched.returncode != 0:
        pytest.skip(f"pip does not get {PACKAGE}: {fetched.stderr.strip()[-300:]}")
    port, metrics_port = free_ports(2)
    command = [sys.executable, "-m", "vllm_router.launch_router", "--port", str(port), "--policy", "round_robin"]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill, "--decode", decode]
    command += ["--prometheus-port", str(metrics_port)]
    router = Server(command, port, folder / "vllm-router.log", {"PYTHONPATH": str(site)})
    try:
        wait_until(router.is_healthy, timeout_s=60, what="vllm-router serves")
        yield router
    finally:
        router.stop()


@contextmanager
def example_proxy(folder: Path, prefill: str, decode: str) -> Iterator[Server]:
    """vLLM's example proxy, as it is written in `bench/proxy`, before these two engines."""
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "pdx.bench.proxy.example_proxy", "--port", str(port)]
    router = Server([*command, "--prefill", prefill, "--decode", decode], port, folder / "example-proxy.log")
    try:
        wait_until(router.is_healthy, timeout_s=60, what="the example proxy serves")
        yield router
    finally:
        router.stop()


def llmd_sidecar(prefill: str, decode: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The legs of llm-d's sidecar with `--kv-connector=nixlv2`, written from its protocol: all limits of the API are 1,
    both legs have its own X-Request-Id, and the decode leg what the prefill engine's answer has, be it null."""
    limits = ("max_tokens", "max_completion_tokens")
    leg = {**body, **dict.fromkeys(limits, 1), "stream": False, "kv_transfer_params": NIXL_PREFILL}
    leg.pop("stream_options", None)
    name = {"x-request-id": str(uuid.uuid1())}
    told = post(prefill, path, leg, **name)
    assert told["http_status"] == 200
    return post(decode, path, {**body, "kv_transfer_params": told.get("kv_transfer_params")}, **name)


def check_handed_over(router: str, prefill: Server, decode: Server, first: int) -> None:
    """Answers through `router` (empty: by the legs of llm-d's sidecar) are those of the decode engine alone, which
    computes one token of each prompt at most. `first`: the number of the first prompt."""
    for number, make in enumerate((completion, completion, completion, chat), first):
        path, body = make(text(number, (300, 700, 1500, 900)[number - first]))
        before = computed_prompt_tokens(decode)
        answer = post(router, path, body) if router else llmd_sidecar(prefill.url, decode.url, path, body)
        assert computed_prompt_tokens(decode) - before <= 1, (path, number)
        alone = essence(post(decode.url, path, {**body, "cache_salt": uuid.uuid4().hex}))
        assert essence(answer) == alone
        if router:
            streamed = [event["choices"][0] for event in stream(router, path, body) if event["choices"]]
            pieces = [each.get("text") or each.get("delta", {}).get("content") or "" for each in streamed]
            assert "".join(pieces) == alone[0][0][0]
