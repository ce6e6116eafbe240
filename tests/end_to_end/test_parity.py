"""`pdx parity` on real engines: a plain one, recorded first, and a pair behind the proxy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cases import MODEL
from engine_process import Server
from pair import ENGINE_ENV, ENGINE_FLAGS, Pair

from pdx.cli.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

REQUESTS = 200
SEEDS = (1, 2)


def parity(*words: object) -> str:
    """What the command says; it must find nothing."""
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "parity", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def recorded(workplace: Path, model: Path) -> dict[int, Path]:
    """What an engine without PDX answers, by seed."""
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), *ENGINE_FLAGS]
    engine = Server(command, port, workplace / "parity.log", ENGINE_ENV)
    files = {seed: workplace / f"parity-{seed}.json" for seed in SEEDS}
    try:
        engine.wait_ready()
        for seed, file in files.items():
            parity(engine.url, "--record", file, "--requests", REQUESTS, "--seed", seed, "--model", MODEL)
    finally:
        engine.stop()
    return files


@pytest.mark.parametrize("seed", SEEDS)
def test_the_proxy_answers_as_an_engine_does(seed: int, recorded: dict[int, Path], pair: Pair) -> None:
    said = parity(recorded[seed], pair.proxy.url)
    assert f"0 of {REQUESTS} answers differ without a reason" in said
    pair.wait_at_rest()
