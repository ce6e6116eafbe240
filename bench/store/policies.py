"""The eviction policies on traces of real load: `python -m pdx.bench.store.policies TRACE…`.

A trace is a file of JSON lines (`.gz` or not) in the form of Mooncake's published ones. Each request goes through a
real `Store`, as `pdx.bench.sim.replay` says; requests follow each other at once. The hit rate is the share of all
tokens that were found. `belady` is a policy that knows the trace. With `--apart` blocks come one at a time, as in a
cache's simulator. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pdx.bench.harness.report import show_rows
from pdx.bench.sim.replay import AFTER, EACH, REQUEST, hit_share
from pdx.bench.sim.requests import Trace, read

BLOCKS = (1_000, 5_000, 10_000, 20_000, 50_000)
POLICIES = "lru,lfu,fifo,s3fifo,sieve,gittins"


@dataclass(frozen=True, slots=True)
class Row:
    """One trace with one policy in an arena of so many blocks."""

    trace: str
    policy: str
    blocks: int
    hit_percent: float  # of tokens
    us_per_block: float  # of the control loop: lookup, lease, reservation, seal, release


def row(trace: Trace, policy: str, blocks: int, way: str = REQUEST) -> Row:
    """Replay in an arena of its own."""
    started_at = time.perf_counter()
    share = hit_share(trace, policy, blocks, way)
    taken_s = time.perf_counter() - started_at
    us = taken_s / sum(len(request.keys) for request in trace.requests) * 1e6
    return Row(trace.name, policy, blocks, round(100 * share, 1), round(us, 2))


def main(arguments: list[str] | None = None) -> None:
    """Replay the traces that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.policies", description="Eviction on traces.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--policies", default=POLICIES, help="a list; default: %(default)s")
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="sizes of the arena; default: %(default)s")
    parser.add_argument(
        "--apart",
        nargs="?",
        const=EACH,
        default=REQUEST,
        choices=(EACH, AFTER),
        help="blocks one at a time and none leased; after: room is made when a prompt is in",
    )
    chosen = parser.parse_args(arguments)
    rows = [
        row(trace, policy, int(blocks), chosen.apart)
        for trace in map(read, chosen.traces)
        for blocks in chosen.blocks.split(",")
        for policy in chosen.policies.split(",")
    ]
    show_rows(rows, "Hit rates of the eviction policies")
    print(json.dumps([asdict(each) for each in rows]))


if __name__ == "__main__":
    main()
