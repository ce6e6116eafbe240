"""What the proxy's index of chunks takes: `python -m pdx.bench.proxy.chunk_index`. About five minutes, and 2 GB.

100 nodes tell of 100,000 chunks each, in each of the cases in a process of its own: all have the same; none has what
another has; each prompt's chunks are in a random set of nodes, each with another leading run. A prompt of 64 and one of
512 chunks are looked up, and one that nobody has, in processor time. Memory is what the process has more than before.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.proxy.chunk_index import ChunkIndex

NODES = 100
CHUNKS = 100_000  # of each node
PROMPT = 512
ROUNDS = 400
GOAL_MS, GOAL_GB = 1.0, 2.0
SAME, APART, RUNS = "all nodes have all", "each node has its own", "nodes have other leading runs"


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def prompts(case: str, nodes: int, chunks: int) -> Iterator[tuple[list[bytes], list[tuple[str, str, int]]]]:
    """The keys of a prompt, and of each node that has some, in which tier, how many leading ones."""
    rng = random.Random(1)
    names = [f"node-{number}" for number in range(nodes)]
    if case == RUNS:
        count = nodes * chunks // (10 * PROMPT)  # each key is in about five tiers of ten nodes
        for _ in range(count):
            some = rng.sample(names, min(20, nodes))
            found = [(node, rng.choice(["host", "disk"]), rng.randrange(1, PROMPT + 1)) for node in some]
            yield [rng.randbytes(16) for _ in range(PROMPT)], found
        return
    for _ in range(chunks // PROMPT * (1 if case == SAME else nodes)):
        some = names if case == SAME else [rng.choice(names)]
        yield [rng.randbytes(16) for _ in range(PROMPT)], [(node, "host", PROMPT) for node in some]


def measure(case: str, nodes: int, chunks: int) -> dict[str, float]:
    """In this process."""
    index = ChunkIndex(1 << 31, Counter())
    before, began, longest_s, told = resident_bytes(), time.perf_counter(), 0.0, 0
    kept: list[list[bytes]] = []
    for number, (keys, found) in enumerate(prompts(case, nodes, chunks)):
        for node, tier, count in found:
            packed = b"".join(keys[:count])
            start = time.thread_time()
            index.add(node, tier, packed)
            longest_s = max(longest_s, time.thread_time() - start)
            told += count
        if number % 50 == 0:
            kept.append(keys)
    build_s = time.perf_counter() - began
    figures = {
        "keys": float(len(index)),
        "told": float(told),
        "gb": (resident_bytes() - before) / 1e9,
        "add_us": build_s / told * 1e6,
        "longest_ms": longest_s * 1e3,
    }
    nobody = [os.urandom(16) for _ in range(PROMPT)]
    for name, count in (("64", 64), ("512", PROMPT)):
        figures[f"p50_{name}"], figures[f"p99_{name}"] = spread([each[:count] for each in kept], index)
    figures["p50_nobody"], figures["p99_nobody"] = spread([nobody], index)
    return figures


def spread(asked: Sequence[Sequence[bytes]], index: ChunkIndex) -> tuple[float, float]:
    """Of a lookup, in milliseconds of processor time: p50 and p99."""
    took = []
    for turn in range(ROUNDS):
        keys = asked[turn % len(asked)]
        start = time.thread_time()
        index.lookup(keys)
        took.append((time.thread_time() - start) * 1e3)
    return statistics.median(took), statistics.quantiles(took, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.proxy.chunk_index", description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="of each node")
    parser.add_argument("--case", choices=(SAME, APART, RUNS), help="this one alone, as JSON")
    options = parser.parse_args()
    if options.case:
        print(msgspec.json.encode(measure(options.case, options.nodes, options.chunks)).decode())
        return
    figures: list[Figure] = []
    for case in (SAME, APART, RUNS):
        command = [sys.executable, "-P", "-m", "pdx.bench.proxy.chunk_index", "--case", case]
        command += ["--nodes", str(options.nodes), "--chunks", str(options.chunks)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found = msgspec.json.decode(done.stdout, type=dict[str, float])
        note = f"{found['keys']:,.0f} keys, {found['told']:,.0f} times told"
        figures += [
            at_most(f"{case}: lookup of 64 chunks, p50", found["p50_64"], "ms", GOAL_MS),
            at_most(f"{case}: lookup of 512 chunks, p50", found["p50_512"], "ms", GOAL_MS),
            plain(f"{case}: the same, p99", found["p99_512"], "ms"),
            at_most(f"{case}: lookup of 512 that nobody has, p50", found["p50_nobody"], "ms", GOAL_MS),
            at_most(f"{case}: memory", found["gb"], "GB", GOAL_GB, note),
            plain(f"{case}: to be told of one chunk", found["add_us"], "µs", "making the keys included"),
            plain(f"{case}: to be told of 512, the longest", found["longest_ms"], "ms"),
        ]
    publish("chunk-index", f"index of chunks, {options.nodes} nodes with {options.chunks:,} chunks each", figures)


if __name__ == "__main__":
    main()
