"""Is a hit ever slower than computing, and how much sooner is it there? `python -m pdx.bench.store.paying`, real vLLM.

One engine and its node. In turns: a prompt that nobody has seen, and one whose beginning is known. Figures are times to
the first token, as the median of the turns' ratios. `--tier`: where the known beginning lies.

- `remote`: in a real Redis (`redis-server`) alone, behind a relay that lets so many bytes a second through,
- `disk`: on a disk alone; in both the node has little more memory than one prompt needs,
- `host`: in the node's memory.

The first two turns at each point, in which the node learns how fast the tier is, are shown and not counted. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pdx.bench.breakdown.command import make_bed
from pdx.bench.harness.ask import ask, completion, session
from pdx.bench.harness.prompts import Prompts
from pdx.bench.harness.report import SCRATCH, console, show_rows
from pdx.bench.systems.line import UNLIMITED, Relay
from pdx.bench.systems.pdx import PdxWith
from pdx.cli.ports import free_ports
from pdx.client.api import connect

# By tier, tokens of the known beginning and of the new rest.
POINTS = {
    "remote": "2000+0",
    "disk": "4096+128",
    "host": "1024+128,1024+1024,4096+128,4096+1024,4096+4096",
}
WARM, TURNS = 2, 6
PAUSE_S = 2.0  # after each request: what was computed is stored, and a heartbeat tells how fast it was
KIB_PER_TOKEN = 64  # of the bench's own model


@dataclass(frozen=True, slots=True)
class Row:
    """One point at one rate; medians of the turns, times to the first token."""

    mb_s: float  # 10⁶ bytes per second that the relay lets through
    history: int  # tokens that are known
    rest: int  # tokens that are new
    computing_ms: float  # of as many tokens that nobody has seen
    hit_ms: float
    ratio: float
    most: float  # of the ratios of the turns
    learning: str  # ratios of the turns before
    loaded_chunks: int  # from a tier below memory, in all turns


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[int]:
    """A Redis server in memory; its port."""
    (port,) = free_ports(1)
    options = ["--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as process:
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()


def loaded_chunks(node: str) -> int:
    """From all tiers below the node's memory so far."""
    with connect(node, timeout_s=10.0) as attached:
        return sum(attached.status().counters.get(f"{tier}_loaded", 0) for tier in ("disk", "remote"))


async def measure(
    url: str, node: str, served_name: str, points: list[tuple[int, int]], *, mb_s: float, turns: int
) -> list[Row]:
    """A row for each point."""
    prompts = Prompts(None)
    rows: list[Row] = []
    async with session() as client:
        number = 0

        async def ttft(prompt: str) -> float:
            nonlocal number
            number += 1
            found = (await ask(client, url, completion(served_name, prompt, 1), f"paying-{number}")).ttft_ms
            await asyncio.sleep(PAUSE_S)
            return found

        for history, rest in points:
            known = [str(prompts.make(history, f"history {each}")) for each in range(2)]
            for each in known * 2:  # stored, and loaded once: memory that was never touched is not measured
                await ttft(each + str(prompts.make(rest, f"before {number}")))
            before = loaded_chunks(node)
            pairs: list[tuple[float, float]] = []
            for turn in range(WARM + turns):
                computing = await ttft(str(prompts.make(history + rest, f"new {mb_s} {turn}")))
                pairs.append((computing, await ttft(known[turn % 2] + str(prompts.make(rest, f"{mb_s} {turn}")))))
            rows.append(_row(mb_s, history, rest, pairs, loaded_chunks(node) - before))
            console.print(rows[-1])
    return rows


def _row(mb_s: float, history: int, rest: int, pairs: list[tuple[float, float]], loaded: int) -> Row:
    """`pairs`: of each turn, a computed prompt's time and a known one's."""
    ratios = [hit / computing for computing, hit in pairs]
    computing_ms, hit_ms = (round(statistics.median(each), 1) for each in zip(*pairs[WARM:], strict=True))
    ratio, most = statistics.median(ratios[WARM:]), max(ratios[WARM:])
    learning = " ".join(f"{each:.2f}" for each in ratios[:WARM])
    return Row(mb_s, history, rest, computing_ms, hit_ms, round(ratio, 3), round(most, 3), learning, loaded)


def _points(text: str) -> list[tuple[int, int]]:
    """Tokens of history and rest: 1024+128,4096+128."""
    points = [(int(history), int(rest)) for history, rest in (each.split("+") for each in text.split(","))]
    if min(history for history, _ in points) < 1 or min(rest for _, rest in points) < 0:
        raise ValueError(text)
    return points


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.paying", description="Loads against computing.")
    parser.add_argument("--tier", choices=POINTS, default="remote", help="default: %(default)s")
    parser.add_argument("--points", type=_points, help="tokens of history and rest, such as 1024+128,4096+128")
    parser.add_argument("--turns", type=int, default=TURNS, help="default: %(default)s")
    parser.add_argument("--mb-s", default="1000000,250,100,10", help="of the line to the Redis; default: %(default)s")
    parser.add_argument("--disk", default="", metavar="FOLDER", help="on the disk in question, for --tier disk")
    chosen = parser.parse_args(arguments)
    if chosen.tier == "remote" and shutil.which("redis-server") is None:
        parser.error("redis-server is not installed")
    if (chosen.tier == "disk") != bool(chosen.disk):
        parser.error("--tier disk and --disk FOLDER go together")
    points = chosen.points or _points(POINTS[chosen.tier])
    longest = max(map(sum, points))
    bed = make_bed(
        None, SCRATCH / "bench" / "paying", ("--no-enable-prefix-caching",), longest=longest + 16, together=2
    )
    if chosen.tier != "host":
        bed = replace(bed, arena=f"{longest * KIB_PER_TOKEN * 3 // 2}KiB")
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        node, rates, relay = ("--disk", chosen.disk) if chosen.disk else (), [UNLIMITED / 1e6], None
        if chosen.tier == "remote":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            relay = Relay(stack.enter_context(redis(Path(folder))))
            stack.callback(relay.close)
            node = ("--remote", f"redis://127.0.0.1:{relay.port}")
            rates = [float(rate) for rate in chosen.mb_s.split(",")]
        system = PdxWith(chosen.tier, f"known prompts in {chosen.tier}", {}, node)
        running = system.start(bed)
        stack.callback(running.close)
        for rate in rates:
            if relay is not None:
                relay.rate = rate * 1e6
            asked = measure(running.url, system.node, bed.served_name, points, mb_s=rate, turns=chosen.turns)
            rows += asyncio.run(asked)
    show_rows(rows, f"Time to the first token of a known prompt, {chosen.tier}, over that of a computed one")
    print(json.dumps({"bench": "paying", "tier": chosen.tier, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
