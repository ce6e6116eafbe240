"""What a history that is already known is worth: `python -m pdx.bench.store.history`, real vLLM, nothing simulated.

Two engines, each with a node of its own: one loads what is known before its step, the other one while the step
computes the rest, layer by layer (`load_in_step`). For each history and rest, in turns: a new prompt is computed, and
then another rest behind its history is asked for. The figures are
times to the first token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from pdx.bench.breakdown.command import make_bed
from pdx.bench.harness.ask import ask, completion, session
from pdx.bench.harness.prompts import Prompts
from pdx.bench.harness.report import SCRATCH, console, show_rows
from pdx.bench.systems.pdx import PdxWith
from pdx.bench.systems.system import Running

POINTS = ((1024, 128), (1024, 1024), (4096, 128), (4096, 1024), (4096, 4096))
TURNS = 5
PAUSE_S = 1.0  # what was computed is saved, and a heartbeat tells how fast that was
SYSTEMS = {
    "before": PdxWith("before", "loads before the step", {"load_in_step": "never"}),
    "in step": PdxWith("in-step", "loads in the step", {"load_in_step": "auto"}),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Times to the first token in milliseconds, medians of the turns."""

    history: int  # tokens
    rest: int
    computing_ms: float
    before_ms: float
    in_step_ms: float
    in_step: float  # share of the better one of the others, in each turn; above 1: faster than both


async def measure(urls: dict[str, str], served_name: str, points: list[tuple[int, int]], turns: int) -> list[Row]:
    """A row for each point."""
    prompts = Prompts(None)
    rows: list[Row] = []
    async with session() as client:
        number = 0

        async def ttft(name: str, prompt: Any) -> float:
            nonlocal number
            number += 1
            body = completion(served_name, prompt, 1)
            found = (await ask(client, urls[name], body, f"history-{number}")).ttft_ms
            await asyncio.sleep(PAUSE_S)
            return found

        for name in urls:
            for each in range(2):
                await ttft(name, prompts.make(1024, f"warm-up {each}"))
                await ttft(name, prompts.make(1024, f"warm-up {each}"))
        for history, rest in points:
            found: list[tuple[float, float, float]] = []
            for turn in range(turns):
                times: dict[str, float] = {}
                for name in list(urls) if turn % 2 else [*urls][::-1]:
                    known = str(prompts.make(history, f"history {turn} {rest}"))
                    computing = await ttft(name, known + str(prompts.make(rest, f"first {turn}")))
                    times["computing"] = min(computing, times.get("computing", computing))
                    times[name] = await ttft(name, known + str(prompts.make(rest, f"second {turn}")))
                found.append((times["computing"], times["before"], times["in step"]))
            computing, before, in_step = (round(statistics.median(each), 1) for each in zip(*found, strict=True))
            share = statistics.median(min(each[:2]) / each[2] for each in found)
            rows.append(Row(history, rest, computing, before, in_step, round(share, 3)))
            console.print(rows[-1])
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.history", description="Loads beside computing.")
    points = ",".join(f"{history}+{rest}" for history, rest in POINTS)
    parser.add_argument("--points", default=points, help="tokens of history and rest; default: %(default)s")
    parser.add_argument("--turns", type=int, default=TURNS, help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    wanted = [tuple(map(int, each.split("+"))) for each in chosen.points.split(",")]
    out = SCRATCH / "bench" / "history"
    longest = max(map(sum, wanted)) + 16
    bed = make_bed(None, out, ("--no-enable-prefix-caching",), longest=longest, together=2)
    with ExitStack() as undo:
        running: dict[str, Running] = {}
        for name, system in SYSTEMS.items():
            running[name] = system.start(bed)
            undo.callback(running[name].close)
        urls = {name: each.url for name, each in running.items()}
        started = time.monotonic()
        rows = asyncio.run(measure(urls, bed.served_name, [(a, b) for a, b in wanted], chosen.turns))
        console.print(f"{time.monotonic() - started:.0f} s")
    show_rows(rows, "Time to the first token where the beginning of a prompt is known")
    print(json.dumps({"bench": "history", "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
