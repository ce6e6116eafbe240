"""Is a hit ever slower than computing? `python -m pdx.bench.store.paying`: real vLLM, a remote store on a slow line.

One engine and its node, whose arena holds little more than one prompt, and a real Redis (`redis-server`) that the node
reaches by way of a relay. The relay lets so many bytes a second through. For each rate, two prompts that were computed
before come in turns, so that each is in the remote store alone, and beside each one that nobody has seen. The figure
is the time to the first token of the former over that of the latter; the first two turns at each rate, in which the
node learns of it, are not counted, and are shown. The last line is
JSON.
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
from typing import Any

from pdx.bench.breakdown.command import make_bed
from pdx.bench.harness.ask import ask, completion, session
from pdx.bench.harness.prompts import Prompts
from pdx.bench.harness.report import SCRATCH, console, show_rows
from pdx.bench.systems.line import Relay
from pdx.bench.systems.pdx import PdxWith
from pdx.bench.systems.system import Bed
from pdx.cli.ports import free_ports
from pdx.client.api import connect

TOKENS = 2000
RATES = (1e12, 250e6, 100e6, 10e6)  # bytes per second
WARM, TURNS = 2, 6
PAUSE_S = 2.0  # after each request: what was computed is stored, and a heartbeat tells how fast it was


@dataclass(frozen=True, slots=True)
class Row:
    """One rate; medians of the turns."""

    mb_s: float  # 10⁶ bytes per second that the relay lets through
    computing_ms: float  # to the first token of a prompt that nobody has seen
    hit_ms: float
    ratio: float
    most: float  # of the ratios of the turns
    learning: str  # ratios of the turns before
    loaded_chunks: int  # in all turns


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


def counter(node: str, name: str) -> int:
    with connect(node, timeout_s=10.0) as attached:
        return attached.status().counters.get(name, 0)


async def measure(url: str, node: str, bed: Bed, relay: Relay, tokens: int, rates: tuple[float, ...]) -> list[Row]:
    """A row for each rate."""
    prompts = Prompts(None)
    rows: list[Row] = []
    async with session() as client:
        number = 0

        async def ttft(prompt: Any) -> float:
            nonlocal number
            number += 1
            return (await ask(client, url, completion(bed.served_name, prompt, 1), f"paying-{number}")).ttft_ms

        for name in ("warm-up 1", "warm-up 2", "a", "b"):
            await ttft(prompts.make(tokens, name))
        for rate in rates:
            relay.rate = rate
            loaded = counter(node, "remote_loaded")
            pairs: list[tuple[float, float]] = []
            for turn in range(WARM + TURNS):
                computing = await ttft(prompts.make(tokens, f"{rate} {turn}"))
                await asyncio.sleep(PAUSE_S)
                pairs.append((computing, await ttft(prompts.make(tokens, "ab"[turn % 2]))))
                await asyncio.sleep(PAUSE_S)
            ratios = [hit / computing for computing, hit in pairs]
            counted = pairs[WARM:]
            rows.append(
                Row(
                    rate / 1e6,
                    round(statistics.median(computing for computing, _ in counted), 1),
                    round(statistics.median(hit for _, hit in counted), 1),
                    round(statistics.median(ratios[WARM:]), 3),
                    round(max(ratios[WARM:]), 3),
                    " ".join(f"{ratio:.2f}" for ratio in ratios[:WARM]),
                    counter(node, "remote_loaded") - loaded,
                )
            )
            console.print(rows[-1])
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.paying", description="Loads against computing.")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a prompt; default: %(default)s")
    parser.add_argument("--mb-s", default=",".join(f"{rate / 1e6:g}" for rate in RATES), help="default: %(default)s")
    parser.add_argument("--arena", default="192MiB", help="of the node; default: %(default)s")
    chosen = parser.parse_args(arguments)
    if shutil.which("redis-server") is None:
        parser.error("redis-server is not installed")
    out = SCRATCH / "bench" / "paying"
    bed = make_bed(None, out, ("--no-enable-prefix-caching",), longest=chosen.tokens + 16, together=2)
    bed = replace(bed, arena=chosen.arena)
    with tempfile.TemporaryDirectory() as folder, redis(Path(folder)) as port:
        relay = Relay(port, rate=RATES[0])
        system = PdxWith("remote", "with a remote store", {}, ("--remote", f"redis://127.0.0.1:{relay.port}"))
        running = system.start(bed)
        try:
            rates = tuple(float(rate) * 1e6 for rate in chosen.mb_s.split(","))
            rows = asyncio.run(measure(running.url, system.node, bed, relay, chosen.tokens, rates))
        finally:
            running.close()
            relay.close()
    show_rows(rows, f"Time to the first token of a prompt of {chosen.tokens} tokens in a remote store")
    print(json.dumps({"bench": "paying", "tokens": chosen.tokens, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
