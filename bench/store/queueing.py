"""What looking ahead in the queue is worth: `python -m pdx.bench.store.queueing FOLDER`, real vLLM, a disk at FOLDER.

One engine that runs two requests at once, and its node, whose memory holds half of what is asked for. A batch of
requests comes at once; the beginning of each lies on the disk, most of them on the disk alone. The same batch, with
other ends, comes to a node that heeds the engine's queue and to one that does not (`look_ahead.SHARE` 0: a stand-in
for a system without it), in turns. The figures are the time until all are answered, and the mean time to the first
token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdx.bench.breakdown.command import make_bed
from pdx.bench.harness.ask import ask, completion, session
from pdx.bench.harness.prompts import Prompts
from pdx.bench.harness.report import SCRATCH, console, show_rows
from pdx.bench.store.history import KIB_PER_TOKEN
from pdx.bench.store.paying import counter
from pdx.bench.systems.baselines import Ports
from pdx.bench.systems.pdx import PdxWith
from pdx.bench.systems.system import Bed, Command

HISTORY, REST, REQUESTS, ROUNDS = 2048, 64, 24, 5
BLIND = "import pdx.node.look_ahead as ahead; ahead.SHARE = 0.0; from pdx.cli.main import main; main()"


class Blind(PdxWith):
    """Its node loads nothing ahead."""

    def store_command(self, bed: Bed, ports: Ports) -> Command:
        command = super().store_command(bed, ports)
        return replace(command, program=(sys.executable, "-P", "-c", BLIND, *command.program[4:]))


@dataclass(frozen=True, slots=True)
class Row:
    """One round of one system."""

    system: str
    turn: int
    all_s: float
    ttft_s: float  # mean
    prefetched: int
    loaded: int  # chunks from the disk


async def measure(systems: dict[str, tuple[str, str]], served_name: str, rounds: int) -> list[Row]:
    """`systems`: URL and node of each."""
    prompts = Prompts(None)
    known = [str(prompts.make(HISTORY, f"history {number}")) for number in range(REQUESTS)]
    rows: list[Row] = []
    async with session() as client:

        async def ttft(url: str, prompt: str, name: str) -> float:
            return (await ask(client, url, completion(served_name, prompt, 4), name)).ttft_ms / 1e3

        for name, (url, _) in systems.items():
            for number, history in enumerate(known):
                await ttft(url, history + str(prompts.make(REST, "first")), f"first-{name}-{number}")
        await asyncio.sleep(5.0)  # all of it is stored
        for turn in range(rounds):
            for name in list(systems) if turn % 2 else [*systems][::-1]:
                url, node = systems[name]
                before = [counter(node, each) for each in ("prefetched_chunks", "disk_loaded")]
                start = time.monotonic()
                ends = [history + str(prompts.make(REST, f"{turn}")) for history in known]
                times = await asyncio.gather(
                    *(ttft(url, prompt, f"{name}-{turn}-{number}") for number, prompt in enumerate(ends))
                )
                all_s = time.monotonic() - start
                after = [counter(node, each) for each in ("prefetched_chunks", "disk_loaded")]
                told: Any = (late - early for late, early in zip(after, before, strict=True))
                rows.append(Row(name, turn, round(all_s, 3), round(statistics.mean(times), 3), *told))
                console.print(rows[-1])
                await asyncio.sleep(3.0)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.queueing", description="Looking ahead.")
    parser.add_argument("folder", help="on the disk")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    flags = ("--no-enable-prefix-caching", "--max-num-seqs", "2")
    bed = make_bed(None, SCRATCH / "bench" / "queueing", flags, longest=HISTORY + REST + 16, together=3)
    bed = replace(bed, arena=f"{HISTORY * REQUESTS * KIB_PER_TOKEN // 2}KiB")
    systems = {
        "ahead": PdxWith("ahead", "looks ahead", {}, ("--disk", f"{chosen.folder}/ahead")),
        "blind": Blind("blind", "does not", {}, ("--disk", f"{chosen.folder}/blind")),
    }
    with ExitStack() as undo:
        asked: dict[str, tuple[str, str]] = {}
        for name, system in systems.items():
            running = system.start(bed)
            undo.callback(running.close)
            asked[name] = running.url, system.node
        rows = asyncio.run(measure(asked, bed.served_name, chosen.rounds))
    show_rows(rows, f"{REQUESTS} requests at once, each with {HISTORY} tokens that lie on a disk")
    figures = {
        f"{name}_{what}": statistics.median(getattr(row, what) for row in rows if row.system == name and row.turn)
        for name in systems
        for what in ("all_s", "ttft_s")
    }
    ratios = {what: round(figures[f"blind_{what}"] / figures[f"ahead_{what}"], 3) for what in ("all_s", "ttft_s")}
    console.print(f"without over with looking ahead, medians without the first round: {ratios}")
    print(json.dumps({"bench": "queueing", **figures, **ratios, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
