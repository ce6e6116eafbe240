"""What looking ahead in the queue is worth: `python -m pdx.bench.store.queueing FOLDER`, real vLLM, a disk at FOLDER.

Engines that run two requests at once, each with a node, are busy with two long answers when a batch of requests comes.
The beginning of each request lies on the disk alone, and the node's memory has room for all of them. The same batch,
with other ends, comes in turns to:

- `ahead`: PDX as it is,
- `early`: a node that does not heed the queue (`look_ahead.SHARE` 0); the first requests of a queue still ask when they
  come,
- `turn`: the same, and every request asks at its turn alone (`StoreLookup.begin` is `expect`), as in a system without a
  prefetch.

The figures are the time until all are answered, from when the engine is free for them and from when they came, and the
mean time to the first token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack, suppress
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
from pdx.client.api import connect
from pdx.errors import ArenaFull

HISTORY, REST, REQUESTS, ROUNDS, BUSY = 2048, 64, 24, 5, 320
FILLER_BYTES = 8 << 20
BLIND = "import pdx.node.look_ahead as ahead; ahead.SHARE = 0.0; from pdx.cli.main import main; main()"
AT_ITS_TURN = "from pdx.engine.store_lookup import StoreLookup; StoreLookup.begin = StoreLookup.expect"


class Blind(PdxWith):
    """Its node loads nothing ahead."""

    def store_command(self, bed: Bed, ports: Ports) -> Command:
        command = super().store_command(bed, ports)
        return replace(command, program=(sys.executable, "-P", "-c", BLIND, *command.program[4:]))


class AtItsTurn(Blind):
    """Nor does its engine ask for anything before a request's turn: each of its processes begins with `AT_ITS_TURN`."""

    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        folder = bed.logs / self.name / "site"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(AT_ITS_TURN)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return [
            replace(command, env={**command.env, "PYTHONPATH": path}) for command in super().engine_commands(bed, ports)
        ]


@dataclass(frozen=True, slots=True)
class Row:
    """One round of one system."""

    system: str
    turn: int
    free_s: float  # from the end of what kept the engine busy until all are answered
    all_s: float  # from when they came
    ttft_s: float  # mean
    busy_s: float  # from when they came until the engine was free
    prefetched: int
    loaded: int  # chunks from the disk


def forget(node: str) -> None:
    """Once all is on the disk, something else takes the room of whatever is in memory, and leaves it."""
    with connect(node, timeout_s=30.0) as attached:
        while any(tier.copies for tier in attached.status().tiers):
            time.sleep(0.1)
        with ExitStack() as undo, suppress(ArenaFull):  # until no more of them has room
            for number in itertools.count():
                undo.enter_context(attached.reserve(f"filler {number}", FILLER_BYTES))


async def measure(systems: dict[str, tuple[str, str]], served_name: str, rounds: int, busy_tokens: int) -> list[Row]:
    """`systems`: URL and node of each. `busy_tokens`: how long the answers are that keep the engine busy."""
    prompts = Prompts(None)
    known = [str(prompts.make(HISTORY, f"history {number}")) for number in range(REQUESTS)]
    rows: list[Row] = []
    async with session() as client:

        async def ttft(url: str, prompt: str, name: str) -> float:
            return (await ask(client, url, completion(served_name, prompt, 4), name)).ttft_ms / 1e3

        async def occupy(url: str, name: str) -> None:
            await ask(client, url, completion(served_name, str(prompts.make(REST, name)), busy_tokens), name)

        for name, (url, node) in systems.items():
            for number, history in enumerate(known):
                await ttft(url, history + str(prompts.make(REST, "first")), f"first-{name}-{number}")
            await asyncio.to_thread(forget, node)
        for turn in range(rounds):
            for name in list(systems) if turn % 2 else [*systems][::-1]:
                url, node = systems[name]
                before = [counter(node, each) for each in ("prefetched_chunks", "disk_loaded")]
                keeping = [asyncio.create_task(occupy(url, f"busy-{name}-{turn}-{number}")) for number in range(2)]
                await asyncio.sleep(0.5)  # both run
                start = time.monotonic()
                ends = [history + str(prompts.make(REST, f"{turn}")) for history in known]
                asked = [
                    asyncio.create_task(ttft(url, prompt, f"{name}-{turn}-{number}"))
                    for number, prompt in enumerate(ends)
                ]
                await asyncio.gather(*keeping)
                busy_s = time.monotonic() - start
                times = await asyncio.gather(*asked)
                all_s = time.monotonic() - start
                after = [counter(node, each) for each in ("prefetched_chunks", "disk_loaded")]
                told: Any = (late - early for late, early in zip(after, before, strict=True))
                figures: Any = (all_s - busy_s, all_s, statistics.mean(times), busy_s)
                rows.append(Row(name, turn, *(round(figure, 3) for figure in figures), *told))
                console.print(rows[-1])
                await asyncio.to_thread(forget, node)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.queueing", description="Looking ahead.")
    parser.add_argument("folder", help="on the disk")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--busy", type=int, default=BUSY, help="tokens of two answers before; default: %(default)s")
    chosen = parser.parse_args(arguments)
    flags = ("--no-enable-prefix-caching", "--max-num-seqs", "2")
    bed = make_bed(None, SCRATCH / "bench" / "queueing", flags, longest=HISTORY + REST + 16, together=3)
    bed = replace(bed, arena=f"{(HISTORY + 2 * REST) * (REQUESTS + 2) * KIB_PER_TOKEN}KiB")
    systems = {
        name: kind(name, title, {}, ("--disk", f"{chosen.folder}/{name}", "--disk-limit", "24GiB"))
        for name, title, kind in (
            ("ahead", "as it is", PdxWith),
            ("early", "a node that does not heed the queue", Blind),
            ("turn", "each request asks at its turn", AtItsTurn),
        )
    }
    with ExitStack() as undo:
        asked: dict[str, tuple[str, str]] = {}
        for name, system in systems.items():
            running = system.start(bed)
            undo.callback(running.close)
            asked[name] = running.url, system.node
        rows = asyncio.run(measure(asked, bed.served_name, chosen.rounds, chosen.busy))
    show_rows(rows, f"{REQUESTS} requests at once, each with {HISTORY} tokens that lie on a disk")
    whats = ("free_s", "all_s", "ttft_s")
    figures = {
        f"{name}_{what}": statistics.median(getattr(row, what) for row in rows if row.system == name)
        for name in systems
        for what in whats
    }
    ratios = {
        f"{name}_{what}_ratio": round(figures[f"{name}_{what}"] / figures[f"ahead_{what}"], 3)
        for name in ("early", "turn")
        for what in whats
    }
    console.print(f"over PDX as it is, medians: {ratios}")
    print(json.dumps({"bench": "queueing", **figures, **ratios, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
