"""Prefill on one vLLM engine, decode on another, through PDX; every token compared with vLLM alone.

One command, one machine, no GPU needed, everything of it under .demo/. The last line is a JSON summary. Exit status
1: a token differs, or the decoder computed a prompt itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import plain
import server
import workload
from rich.console import Console
from rich.table import Table
from workload import Request

from pdx.cli import placement
from pdx.cli.processes import Processes
from pdx.cli.ready import answers_health
from pdx.client import connect
from pdx.config import runtime_folder
from pdx.errors import PdxError
from pdx.testing import tiny_llama

FOLDER = Path(__file__).resolve().parent.parent / ".demo"
FLAGS = ("--served-model-name", workload.MODEL, "--dtype", "float32", "--max-model-len", "6000", "--enforce-eager")
ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
SHARED_GPU = ("--gpu-memory-utilization", "0.3")  # where there is a GPU, two engines may have to share it
KV_BYTES = 64 << 10  # of one token of this model
BLOCK_TOKENS = 128  # of vLLM on CPUs; the largest of all devices
SETTLE_S = 5.0  # nodes report moments every second
COMPUTED = re.compile(rb'^vllm:prompt_tokens_by_source_total\{.*source="local_compute".*\} (\S+)$', re.MULTILINE)
PROMPTS = re.compile(rb"^vllm:prompt_tokens_total\{.*\} (\S+)$", re.MULTILINE)

console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@dataclass(slots=True)
class Row:
    """One request's outcome."""

    request: Request
    is_same: bool
    prompt_tokens: int
    recomputed: float  # by the decoder; a mean for requests sent together
    timeline: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str) -> float | None:
        """One number of the timeline's breakdown."""
        value: float | None = self.timeline["breakdown"][name]
        return value


def say(line: str) -> None:
    """One line of progress."""
    console.print(f"[{time.monotonic() - STARTED_AT:4.0f} s] {line}", markup=False, soft_wrap=True)


def make_model() -> Path:
    """The model, from an earlier run if the code that makes it is the same."""
    source = Path(tiny_llama.__file__).read_bytes()
    folder = FOLDER / f"model-{plain.digest(source)}"
    if not folder.exists():
        say("making a model with random weights")
        tiny_llama.make_model(folder.with_suffix(".partial")).rename(folder)
    return folder


def start_pdx(processes: Processes, model: Path, port: int, flags: Sequence[str]) -> None:
    """Run `pdx up` and wait until it is ready."""
    logs = FOLDER / "logs"
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "up", str(model), "--port", str(port), "--arena", "2GiB"]
    up = processes.start(
        "pdx-up",
        [*command, "--logs", str(logs), "--", *flags],
        is_ready=answers_health(f"http://127.0.0.1:{port}"),
    )
    server.wait(up, say)


class Pair:
    """The running prefill and decode engine behind their proxy."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        with connect(f"ipc://{runtime_folder()}/up-{port}/node.sock") as node:
            attached = node.status().attached
        self._decoder = next(one.url for one in attached if one.role == "decode" and one.url)

    def run(self, requests: Sequence[Request], reference: plain.Reference) -> list[Row]:
        """Send `requests` together, and see what the decoder computed for them."""
        computed, prompts = self._counters()
        answers = server.ask_at_once(self.url, requests)
        rows = []
        total = sum(answer.prompt_tokens for answer in answers)
        self._until(lambda: self._counters()[1] - prompts >= total)
        recomputed = (self._counters()[0] - computed) / len(requests)
        for request, answer in zip(requests, answers, strict=True):
            is_same = answer.text == reference[request] and len(answer.text) == workload.ANSWER_TOKENS
            rows.append(Row(request, is_same, answer.prompt_tokens, recomputed, self._timeline(answer.transfer)))
        return rows

    def _counters(self) -> tuple[float, float]:
        """Prompt tokens that the decoder has computed, and all its prompt tokens."""
        text = server.get(f"{self._decoder}/metrics")
        return sum(map(float, COMPUTED.findall(text))), sum(map(float, PROMPTS.findall(text)))

    def _timeline(self, transfer: str) -> dict[str, Any]:
        timeline: dict[str, Any] = {}

        def is_complete() -> bool:
            timeline.update(json.loads(server.get(f"{self.url}/pdx/requests/{transfer}")))
            return timeline["breakdown"]["handoff_ms"] is not None and timeline["breakdown"]["moved_bytes"] > 0

        self._until(is_complete)
        return timeline

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)


def run_all(pair: Pair, reference: plain.Reference) -> list[Row]:
    """All requests, one after the other but for the last eight."""
    first = workload.first_turn()
    rounds = [[request] for request in [*workload.cold(), first, workload.second_turn(reference[first])]]
    rounds.append(workload.at_once())
    rows = []
    for together in rounds:
        say(f"  {together[0].name if len(together) == 1 else f'{len(together)} at once'}")
        rows += pair.run(together, reference)
    return rows


def show(rows: Sequence[Row]) -> None:
    """The table."""
    table = Table(title="through PDX: prefill on one engine, decode on another", title_justify="left")
    names = ("prompt\ntokens", "reused\ntokens", "pushed\ntokens", "pushed\nMB", "moved when\nprefill ended")
    times = ("prefill\nms", "handoff\nms", "first decode\nms", "recomputed\nby decoder", "same\nanswer")
    table.add_column("request")
    for name in names + times:
        table.add_column(name, justify="right")
    for row in rows:
        reused = int(row.part("reused_tokens") or 0)
        table.add_row(
            row.request.name,
            f"{row.prompt_tokens:,}",
            f"{reused:,}",
            f"{min(row.prompt_tokens - reused, int(row.part('moved_bytes') or 0) // KV_BYTES):,}",
            _number((row.part("moved_bytes") or 0) / 1e6),
            _number(row.part("hidden_share"), "{:.0%}"),
            *(_number(row.part(name)) for name in ("prefill_ms", "handoff_ms", "first_decode_ms")),
            _number(row.recomputed),
            "yes" if row.is_same else "NO",
        )
    console.print(table)


def _number(value: float | None, form: str = "{:,.1f}") -> str:
    return "-" if value is None else form.format(value)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The last line."""
    moved = sum(row.part("moved_bytes") or 0 for row in rows)
    hidden = sum((row.part("hidden_share") or 0) * (row.part("moved_bytes") or 0) for row in rows)
    handoffs = [value for row in rows if (value := row.part("handoff_ms")) is not None]
    return {
        "identical": all(row.is_same for row in rows),
        "requests": len(rows),
        "reused_tokens": int(sum(row.part("reused_tokens") or 0 for row in rows)),
        "moved_mb": round(moved / 1e6, 1),
        "hidden_share": round(hidden / moved, 3) if moved else None,
        "handoff_ms_p50": round(statistics.median(handoffs), 1) if handoffs else None,
    }


def complaints(rows: Sequence[Row], changes: Sequence[int | None]) -> list[str]:
    """What must not be."""
    found = [f"{row.request.name}: the answer differs from plain vLLM's" for row in rows if not row.is_same]
    found += [
        f"{row.request.name}: the decoder computed {row.recomputed:.0f} prompt tokens itself"
        for row in rows
        if row.recomputed > BLOCK_TOKENS + 1
    ]
    if None in changes:
        found.append("the model does not depend on its whole prompt, so the same answers prove nothing")
    return found


def main() -> int:
    """The whole demo; its exit status."""
    FOLDER.mkdir(exist_ok=True)
    os.environ.update({name: os.environ.get(name, value) for name, value in ENGINE_ENV.items()})
    model = make_model()
    say("asking plain vLLM, without PDX, for the answers to compare with")
    flags = [*FLAGS, *(SHARED_GPU if placement.gpus() else ())]
    reference = plain.reference(FOLDER, model, flags, say)
    if reference.is_kept:
        say("  they are kept from an earlier run of the same model, vLLM and requests; `make clean` forgets them")
    changes = reference.changes(workload.cold())
    for request, change in zip(workload.cold(), changes, strict=True):
        effect = "changes nothing!" if change is None else f"changes the answer from its token {change + 1} on"
        say(f"  {request.name}: another token at position {workload.CHANGED_AT} {effect}")
    say("starting PDX: a node, a prefill engine, a decode engine and the proxy (up to a minute)")
    with Processes(FOLDER / "logs") as processes:
        port = server.free_port()
        start_pdx(processes, model, port, flags)
        say("PDX is ready and answers")
        rows = run_all(Pair(port), reference)
        say("stopping")
    show(rows)
    wrong = complaints(rows, changes)
    for line in wrong:
        say(line)
    print(json.dumps(summary(rows)))
    return 1 if wrong else 0


def _on_signal(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


STARTED_AT = time.monotonic()

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _on_signal)
    try:
        status = main()
    except (server.Failed, PdxError, OSError) as error:
        say(f"the demo failed: {error}; all logs are in {FOLDER / 'logs'}")
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
