"""Prefill on one vLLM engine, decode on another, through PDX; every token compared with vLLM alone.

One command, one machine, no GPU needed, everything of it under .demo/. The last line is a JSON summary. Exit status
1: a token differs, or the decoder computed a prompt itself. With --pair CHANNEL each engine has a node of its own, and
the nodes are joined by that channel; then another channel, or none, is a failure, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from pdx.bench.demo import plain, server, workload
from pdx.bench.demo.outcome import AUTO, Row, Wire, complaints, summary, table
from pdx.bench.demo.workload import Request
from pdx.bench.harness import tiny_llama, web
from pdx.bench.harness.report import SCRATCH
from pdx.cli import placement
from pdx.cli.doctor import examine_channel
from pdx.cli.node import check_channels
from pdx.cli.ports import free_ports
from pdx.cli.processes import Processes
from pdx.cli.ready import knows_nodes
from pdx.client.api import connect
from pdx.config import runtime_folder
from pdx.errors import PdxError
from pdx.testing.waiting import came_true
from pdx.wire.status import NodeStatus, PeerStatus

FOLDER = SCRATCH
FLAGS = ("--served-model-name", workload.MODEL, "--dtype", "float32", "--max-model-len", "6000", "--enforce-eager")
ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
SHARED_GPU = ("--gpu-memory-utilization", "0.3")  # where there is a GPU, two engines may have to share it
TRIAL_BYTES, TRIAL_S = 4 << 20, 30.0  # one transfer before everything else, so that a missing library is said at once
SETTLE_S = 5.0  # nodes report moments every second
COMPUTED = re.compile(rb'^vllm:prompt_tokens_by_source_total\{.*source="local_compute".*\} (\S+)$', re.MULTILINE)
PROMPTS = re.compile(rb"^vllm:prompt_tokens_total\{.*\} (\S+)$", re.MULTILINE)

console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


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


def check_pair(pair: str) -> dict[str, float]:
    """GB/s of that channel in a trial; empty with AUTO, where the nodes measure by themselves.

    :raises Failed: that channel does not work on this machine; the text says what would help.
    """
    if pair == AUTO:
        return {}
    check_channels([pair])
    trial = examine_channel(pair, TRIAL_BYTES, TRIAL_S).trial
    if trial.state != "ok":
        raise server.Failed(f"channel {pair} does not work here: {trial.why}\n{trial.fix}".strip())
    return {} if trial.rate is None else {pair: trial.rate.median_gb_s}


def start_pdx(
    processes: Processes, model: Path, port: int, admin_port: int, flags: Sequence[str], pair: str | None
) -> None:
    """Run `pdx up` and wait until it is ready."""
    logs = FOLDER / "logs"
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "up", str(model), "--port", str(port), "--arena", "2GiB"]
    command += ["--admin", f"127.0.0.1:{admin_port}", "--debug-headers"]
    if pair is not None:
        command += ["--channel", pair]
    num_nodes = 1 if pair is None else 2
    up = processes.start(
        "pdx-up",
        [*command, "--logs", str(logs), "--", *flags],
        is_ready=knows_nodes(f"http://127.0.0.1:{port}", num_nodes),
    )
    server.wait(up, say)


class Pair:
    """The running prefill and decode engine behind their proxy. `tried`: GB/s of the channel before they ran."""

    def __init__(self, port: int, admin_port: int, pair: str | None, tried: Mapping[str, float]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._admin_url = f"http://127.0.0.1:{admin_port}"
        self._folder = runtime_folder() / f"up-{port}"
        self._pair = pair
        self._tried = tried
        attached = self._status("decode" if pair else "node").attached
        self._decoder = next(one.url for one in attached if one.role == "decode" and one.url)

    def wire(self) -> Wire | None:
        """What went over it; None where there is one node."""
        if self._pair is None:
            return None
        there, here = self._peer("prefill", "decode"), self._peer("decode", "prefill")
        # Nodes that were told one channel have nothing to choose, so they measure nothing.
        rates = there.rates or dict(self._tried)
        return Wire(there.channel, there.sent_bytes, here.landed_bytes, there.landed_bytes, rates)

    def _status(self, node: str) -> NodeStatus:
        with connect(f"ipc://{self._folder}/{node}.sock") as attached:
            return attached.status()

    def _peer(self, node: str, peer: str) -> PeerStatus:
        """What `node` says of its `peer`."""
        for status in self._status(node).peers:
            if status.name == peer:
                return status
        raise server.Failed(f"node {node} knows nothing of {peer}")

    def run(self, requests: Sequence[Request], reference: plain.Reference) -> list[Row]:
        """Send `requests` together, and see what the decoder computed for them."""
        computed, prompts = self._counters()
        answers = server.ask_at_once(self.url, requests)
        rows = []
        total = sum(answer.prompt_tokens for answer in answers)
        came_true(lambda: self._counters()[1] - prompts >= total, SETTLE_S, pause_s=0.1)
        recomputed = (self._counters()[0] - computed) / len(requests)
        for request, answer in zip(requests, answers, strict=True):
            is_same = answer.text == reference[request] and len(answer.text) == workload.ANSWER_TOKENS
            timeline, is_wired = self._timeline(answer.transfer), self._pair is not None
            rows.append(Row(request, is_same, answer.prompt_tokens, recomputed, is_wired, timeline))
        return rows

    def _counters(self) -> tuple[float, float]:
        """Prompt tokens that the decoder has computed, and all its prompt tokens."""
        text = web.get(f"{self._decoder}/metrics")
        return sum(map(float, COMPUTED.findall(text))), sum(map(float, PROMPTS.findall(text)))

    def _timeline(self, transfer: str) -> dict[str, Any]:
        timeline: dict[str, Any] = {}

        def is_complete() -> bool:
            timeline.update(json.loads(web.get(f"{self._admin_url}/pdx/requests/{transfer}")))
            if timeline["mode"] == "alone":
                return bool(timeline["outcome"])  # nothing moves
            parts = timeline["breakdown"]
            has_moved = parts["moved_bytes"] > 0 and (self._pair is None or parts["pushed_bytes"] > 0)
            return parts["handoff_ms"] is not None and has_moved

        came_true(is_complete, SETTLE_S, pause_s=0.1)
        return timeline


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


def main() -> int:
    """The whole demo; its exit status."""
    pair = arguments().pair or None
    FOLDER.mkdir(exist_ok=True)
    os.environ.update({name: os.environ.get(name, value) for name, value in ENGINE_ENV.items()})
    tried: dict[str, float] = {}
    if pair is not None:
        say(f"trying channel {pair} between two processes")
        tried = check_pair(pair)
    model = make_model()
    flags = [*FLAGS, *(SHARED_GPU if placement.gpus() else ())]
    reference, changes = plain_answers(model, flags)
    nodes = "a node" if pair is None else f"two nodes joined by {pair}"
    say(f"starting PDX: {nodes}, a prefill engine, a decode engine and the proxy (up to a minute)")
    with Processes(FOLDER / "logs") as processes:
        port, admin_port = free_ports(2)
        start_pdx(processes, model, port, admin_port, flags, pair)
        say("PDX is ready and answers")
        engines = Pair(port, admin_port, pair, tried)
        rows = run_all(engines, reference)
        wire = engines.wire()
        say("stopping")
    console.print(table(rows, wire))
    wrong = complaints(rows, changes, pair, wire)
    for line in wrong:
        say(line)
    print(json.dumps(summary(rows, wire)))
    return 1 if wrong else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pair", default="", metavar="CHANNEL", help=f"two nodes and this channel; {AUTO}: the fastest"
    )
    return parser.parse_args()


def plain_answers(model: Path, flags: Sequence[str]) -> tuple[plain.Reference, list[int | None]]:
    """What to compare with, and which of its tokens one changed token of each cold prompt changes."""
    say("asking plain vLLM, without PDX, for the answers to compare with")
    reference = plain.reference(FOLDER, model, flags, say)
    if reference.is_kept:
        say("  they are kept from an earlier run of the same model, vLLM and requests; `make clean` forgets them")
    changes = reference.changes(workload.cold())
    for request, change in zip(workload.cold(), changes, strict=True):
        effect = "changes nothing!" if change is None else f"changes the answer from its token {change + 1} on"
        say(f"  {request.name}: another token at position {workload.CHANGED_AT} {effect}")
    return reference, changes


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
