"""Real vLLM engines for the benches: a tiny model with 64 KB of KV per token, servers on it, and requests to them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdx.bench.harness.places import SCRATCH
from pdx.bench.harness.report import console
from pdx.bench.systems import server
from pdx.cli.processes import Processes
from pdx.cli.ready import answers_health
from pdx.testing.tiny_llama import make_model

FOLDER = SCRATCH / "bench"
MODEL = "tiny"
KV_BYTES = 64 << 10  # of one token of the model in float32
FLAGS = ("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager", "--disable-uvicorn-access-log")
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
PLAIN_SERVER = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
_LETTERS = "abcdefghijklmnopqrstuvwxyz     "


def say(line: str) -> None:
    """One line of progress."""
    console.print(f"[{time.strftime('%H:%M:%S')}] {line}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def bench_folder() -> Iterator[tuple[Path, Processes]]:
    """The folder with the model in it, and processes that end with this context."""
    os.environ.update({name: os.environ.get(name, value) for name, value in ENV.items()})
    model = FOLDER / "model"
    make_model(model)
    with Processes(FOLDER / "logs") as processes:
        yield model, processes


def start(processes: Processes, name: str, argv: Sequence[str], url: str, env: Mapping[str, str] | None = None) -> None:
    """Start a server and wait until it is ready."""
    say(f"starting {name}")
    process = processes.start(name, argv, is_ready=answers_health(url), env=env)
    server.wait(process, say)


def start_together(processes: Processes, servers: Sequence[tuple[str, Sequence[str], str, Mapping[str, str]]]) -> None:
    """Start servers (name, command, URL, environment) at once and wait until all are ready."""
    say(f"starting {', '.join(name for name, *_ in servers)}")
    started = [processes.start(name, argv, is_ready=answers_health(url), env=env) for name, argv, url, env in servers]
    for process in started:
        server.wait(process, say)


def prompt(tokens: int, seed: int) -> str:
    """A text nobody sent before: one character is one token."""
    draw = random.Random(f"{seed} {os.getpid()} {time.monotonic_ns()}")
    return "".join(draw.choices(_LETTERS, k=tokens))


def complete(url: str, text: str, max_tokens: int) -> str:
    """Continue `text` greedily; returns the transfer's id, empty without PDX."""
    body = {"model": MODEL, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    post = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with server.direct.open(post, timeout=server.ANSWER_S) as response:
        answer = json.load(response)
        transfer: str = response.headers.get("x-pdx-transfer-id", "")
    if answer["usage"]["prompt_tokens"] != len(text) or answer["usage"]["completion_tokens"] != max_tokens:
        raise RuntimeError(f"asked for {max_tokens} tokens after {len(text)}, got {answer['usage']}")
    return transfer


def get(url: str) -> Any:
    """The JSON at `url`."""
    return json.loads(server.get(url))
