"""Routers that were made for NIXL and know nothing of PDX: vllm-router as published, and legs as others send them."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cases import chat, completion, text
from engine_process import Server
from http_client import post, stream
from test_pair_answers import computed_prompt_tokens, essence

from pdx.cli.ports import free_ports
from pdx.testing.waiting import wait_until

PACKAGE = "vllm-router==0.1.17"
NIXL_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


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


def in_two_legs(prefill: str, decode: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's example proxy does, and llm-d's sidecar: one token of the first engine, whose answer says what the
    second one is to be told."""
    leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": NIXL_PREFILL}
    told = post(prefill, path, leg)["kv_transfer_params"]
    return post(decode, path, {**body, "kv_transfer_params": told})


def check_handed_over(router: str, prefill: Server, decode: Server, first: int) -> None:
    """Answers through `router` (empty: by legs as others send them) are those of the decode engine alone, which
    computes one token of each prompt at most. `first`: the number of the first prompt."""
    for number, make in enumerate((completion, completion, completion, chat), first):
        path, body = make(text(number, (300, 700, 1500, 900)[number - first]))
        before = computed_prompt_tokens(decode)
        answer = post(router, path, body) if router else in_two_legs(prefill.url, decode.url, path, body)
        assert computed_prompt_tokens(decode) - before <= 1, (path, number)
        alone = essence(post(decode.url, path, {**body, "cache_salt": uuid.uuid4().hex}))
        assert essence(answer) == alone
        if router:
            streamed = [event["choices"][0] for event in stream(router, path, body) if event["choices"]]
            pieces = [each.get("text") or each.get("delta", {}).get("content") or "" for each in streamed]
            assert "".join(pieces) == alone[0][0][0]
