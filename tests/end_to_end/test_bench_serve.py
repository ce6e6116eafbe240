"""`pdx bench serve` against a real `pdx up`: conversations, and what is kept of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import Server
from pair import ENGINE_ENV, ENGINE_FLAGS

from pdx.bench.harness.tiny_llama import make_model
from pdx.cli.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(400)]
PDX = [sys.executable, "-P", "-m", "pdx.cli.main"]


@pytest.fixture(scope="module")
def service(workplace: Path) -> Iterator[Server]:
    """`pdx up` with a model of two layers."""
    model = make_model(workplace / "small", layers=2, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128)
    port, admin_port = free_ports(2)
    command = [*PDX, "up", str(model), "--port", str(port), "--admin", f"127.0.0.1:{admin_port}"]
    command += ["--arena", "128MiB", "--logs", str(workplace / "up-logs"), "--", *ENGINE_FLAGS]
    server = Server(command, port, workplace / "up.log", ENGINE_ENV, admin_port=admin_port)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_two_conversations_of_two_rounds(service: Server, workplace: Path) -> None:
    out = workplace / "bench"
    argv = ["--url", service.url, "--admin", service.admin_url]
    argv += ["--workload", "chat", "--requests", "4", "--rounds", "2", "--input-len", "400"]
    argv += ["--message-len", "50", "--output-len", "20", "--rate", "4", "--slo", "ttft=60s,itl=60s"]
    done = subprocess.run(
        [*PDX, "bench", "serve", *argv, "--label", "pdx", "--out", str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "serve-pdx.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 80)
    assert result["model_id"].endswith("small")
    assert all(len(text) == 20 for text in result["generated_texts"])
    ours = result["pdx"]
    assert ours["is_complete"]
    assert ours["goodput"]["good"] == 4
    assert list(ours["ttft_by_round_ms"]) == ["0", "1"]
    first, second = sorted(result["input_lens"])[:2], sorted(result["input_lens"])[2:]
    assert min(second) > max(first) + 20 + 40  # the answer and the second message
    assert ours["client_cpu_share_of_a_core"] > 0
    found = ours["found_tokens"]["engines"].values()
    assert len(found) == 2
    assert any(each["external"] > 0 for each in found)
    assert service.metric("pdx_proxy_requests_total", mode="sampled") >= 4
