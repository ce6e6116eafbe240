"""What a history that is already known is worth: `python -m pdx.bench.store.history`, real vLLM, nothing simulated.

For each history and rest, in turns: a new prompt is computed, and then another rest behind its history is asked for.
The figures are times to the first token.

With `--disk FOLDER` there is one engine, whose node has little more memory than one prompt needs and keeps chunks
there: a new prompt drives what was known out of memory, and then what is known comes from the disk. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdx.bench.breakdown.command import make_bed
from pdx.bench.harness.ask import ask, completion, session
from pdx.bench.harness.prompts import Prompts
from pdx.bench.harness.report import SCRATCH, console, show_rows
from pdx.bench.store.paying import counter
from pdx.bench.systems.pdx import PdxWith

POINTS = ((1024, 128), (1024, 1024), (4096, 128), (4096, 1024), (4096, 4096))
TURNS = 5
KIB_PER_TOKEN = 64  # of the bench's own model
PAUSE_S = 1.0  # what was computed is saved, and a heartbeat tells how fast that was


@dataclass(frozen=True, slots=True)
class Row:
    """Times to the first token in milliseconds, medians of the turns."""

    history: int  # tokens
    rest: int
    computing_ms: float
    loaded_ms: float
    times: float  # sooner, in each turn


async def measure(url: str, served_name: str, points: list[tuple[int, int]], turns: int) -> list[Row]:
    """A row for each point."""
    prompts = Prompts(None)
    rows: list[Row] = []
    async with session() as client:
        number = 0

        async def ttft(prompt: Any) -> float:
            nonlocal number
            number += 1
            found = (await ask(client, url, completion(served_name, prompt, 1), f"history-{number}")).ttft_ms
            await asyncio.sleep(PAUSE_S)
            return found

        for each in range(2):
            await ttft(prompts.make(1024, f"warm-up {each}"))
            await ttft(prompts.make(1024, f"warm-up {each}"))
        for history, rest in points:
            found: list[tuple[float, float]] = []
            for turn in range(turns):
                known = str(prompts.make(history, f"history {turn} {rest}"))
                computing = await ttft(known + str(prompts.make(rest, f"first {turn}")))
                found.append((computing, await ttft(known + str(prompts.make(rest, f"second {turn}")))))
            medians = [round(statistics.median(each), 1) for each in zip(*found, strict=True)]
            times = round(statistics.median(computing / loaded for computing, loaded in found), 2)
            rows.append(Row(history, rest, medians[0], medians[1], times))
            console.print(rows[-1])
    return rows


@dataclass(frozen=True, slots=True)
class DiskRow:
    """Times to the first token in milliseconds, medians of the turns."""

    history: int  # tokens
    rest: int
    computing_ms: float
    from_disk_ms: float
    times: float  # faster, in each turn
    loaded: int  # chunks from the disk, of all turns


async def measure_disk(
    url: str, node: str, served_name: str, points: list[tuple[int, int]], turns: int
) -> list[DiskRow]:
    """A row for each point."""
    prompts = Prompts(None)
    rows: list[DiskRow] = []
    async with session() as client:
        number = 0

        async def ttft(prompt: str) -> float:
            nonlocal number
            number += 1
            found = (await ask(client, url, completion(served_name, prompt, 1), f"disk-{number}")).ttft_ms
            await asyncio.sleep(2 * PAUSE_S)
            return found

        for history, rest in points:
            names = [f"history {each}" for each in range(2)]
            known = {name: str(prompts.make(history, name)) for name in names}
            for name in names * 2:  # stored, and then loaded once: what was not measured is loaded
                await ttft(known[name] + str(prompts.make(rest, f"before {number}")))
            loaded = counter(node, "disk_loaded")
            found: list[tuple[float, float]] = []
            for turn in range(turns):
                computing = await ttft(str(prompts.make(history + rest, f"new {turn}")))
                found.append((computing, await ttft(known[names[turn % 2]] + str(prompts.make(rest, turn)))))
            medians = [round(statistics.median(each), 1) for each in zip(*found, strict=True)]
            times = round(statistics.median(computing / hit for computing, hit in found), 2)
            rows.append(DiskRow(history, rest, medians[0], medians[1], times, counter(node, "disk_loaded") - loaded))
            console.print(rows[-1])
    return rows


def run_disk(folder: str, points: list[tuple[int, int]], turns: int) -> None:
    """Measure with one engine and a disk, and show the rows."""
    bed = make_bed(
        None, SCRATCH / "bench" / "history", ("--no-enable-prefix-caching",), longest=max(map(sum, points)), together=2
    )
    bed = replace(bed, arena=f"{max(map(sum, points)) * KIB_PER_TOKEN * 5 // 4}KiB")
    system = PdxWith("disk", "with a disk", {}, ("--disk", folder))
    running = system.start(bed)
    try:
        rows = asyncio.run(measure_disk(running.url, system.node, bed.served_name, points, turns))
    finally:
        running.close()
    show_rows(rows, "Time to the first token where the beginning of a prompt is on a disk")
    print(json.dumps({"bench": "history", "disk": True, "rows": [asdict(row) for row in rows]}))


def _points(text: str) -> list[tuple[int, int]]:
    """Tokens of history and rest: 1024+128,4096+128."""
    points = [(int(history), int(rest)) for history, rest in (each.split("+") for each in text.split(","))]
    if min(map(min, points)) < 1:
        raise ValueError(text)
    return points


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.history", description="Loads and computing.")
    points = ",".join(f"{history}+{rest}" for history, rest in POINTS)
    parser.add_argument(
        "--points", default=points, type=_points, help="tokens of history and rest; default: %(default)s"
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="default: %(default)s")
    parser.add_argument("--disk", default="", metavar="FOLDER", help="measure loads from there")
    chosen = parser.parse_args(arguments)
    if chosen.disk:
        run_disk(chosen.disk, chosen.points, chosen.turns)
        return
    out = SCRATCH / "bench" / "history"
    longest = max(map(sum, chosen.points)) + 16
    bed = make_bed(None, out, ("--no-enable-prefix-caching",), longest=longest, together=2)
    system = PdxWith("history", "loads what is known", {})
    running = system.start(bed)
    try:
        rows = asyncio.run(measure(running.url, bed.served_name, chosen.points, chosen.turns))
    finally:
        running.close()
    show_rows(rows, "Time to the first token where the beginning of a prompt is known")
    print(json.dumps({"bench": "history", "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
