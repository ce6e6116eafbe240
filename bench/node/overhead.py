"""Prefill throughput with the connector but no hit, against an engine without: `python -m pdx.bench.node.overhead`.

Two real engines, one per core, asked alternately and never at once; every prompt is new, so that nothing hits and
everything is saved. Then both change cores, because two cores need not be equally fast. The last line is JSON.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pdx.bench.harness.engines import FLAGS, PLAIN_SERVER, bench_folder, complete, prompt, say, start_together
from pdx.bench.harness.report import at_most, plain, publish
from pdx.cli.ports import free_ports
from pdx.cli.processes import Processes
from pdx.cli.ready import answers_at
from pdx.client.api import connect

TOKENS = 2000
ROUNDS = 15  # on each core
WARMUPS = 3
ALLOWED = 1.03
PDX = (sys.executable, "-P", "-m", "pdx.cli.main")


def once_s(url: str, seed: int) -> float:
    """One prompt to its first token."""
    text = prompt(TOKENS, seed)
    start_at = time.perf_counter()
    complete(url, text, max_tokens=1)
    return time.perf_counter() - start_at


def on_cores(processes: Processes, model: Path, node: str, cores: Sequence[int]) -> list[tuple[float, float]]:
    """(with, without) the connector, in seconds, with the engines bound to these cores."""
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
    flags = [[*FLAGS, "--max-model-len", "6000", "--port", url.rpartition(":")[2]] for url in urls]
    commands = [
        [*PDX, "serve", "both", str(model), "--node", node, "--proxy", "", *flags[0]],
        [*PLAIN_SERVER, "--model", str(model), *flags[1]],
    ]
    binds = [{"VLLM_CPU_OMP_THREADS_BIND": str(core)} for core in cores]
    names = [f"{name}-core-{core}" for name, core in zip(("with-pdx", "without-pdx"), cores, strict=True)]
    start_together(processes, list(zip(names, commands, urls, binds, strict=True)))
    rows = []
    for number in range(-WARMUPS, ROUNDS):
        order = [0, 1] if number % 2 else [1, 0]
        times = {index: once_s(urls[index], number) for index in order}
        if number >= 0:
            rows.append((times[0], times[1]))
            say(f"  with {times[0]:.3f} s, without {times[1]:.3f} s")
    return rows


def sealed_chunks(node: str) -> int:
    """Chunks that the node has sealed since it started."""
    with connect(node) as client:
        return client.status().counters.get("sealed", 0)


def measure() -> list[list[tuple[float, float]]]:
    """Both placements."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    phases = []
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder:
        node = f"ipc://{folder}/run/node.sock"
        for placed in (cores, cores[::-1]):
            with bench_folder() as (model, processes):
                command = [*PDX, "node", "--address", node, "--arena", "2GiB"]
                processes.start("node", command, is_ready=answers_at(node))
                phases.append(on_cores(processes, model, node, placed))
                saved = sealed_chunks(node)
                if saved < (ROUNDS + WARMUPS) * (TOKENS // 256):
                    raise RuntimeError(f"only {saved} chunks were saved: the connector did not do its work")
    return phases


def main() -> None:
    phases = measure()
    ratios = [statistics.median(own / theirs for own, theirs in rows) for rows in phases]
    own, theirs = (statistics.median(row[index] for rows in phases for row in rows) for index in range(2))
    ratio = math.prod(ratios) ** (1 / len(ratios))
    per_core = ", ".join(f"{one:.3f}" for one in ratios)
    publish(
        "overhead",
        f"prefill of {TOKENS:,} new tokens, {ROUNDS} rounds on each core",
        [
            plain("without the connector (the reference)", TOKENS / theirs, "tokens/s"),
            plain("with the connector, nothing hits, all is saved", TOKENS / own, "tokens/s"),
            at_most("time with / without", ratio, "", ALLOWED, f"per core: {per_core}"),
        ],
        {"seconds_with_and_without": [[[round(one, 4) for one in row] for row in rows] for rows in phases]},
    )


if __name__ == "__main__":
    main()
