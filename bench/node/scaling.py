"""What a node's messages cost by how much it holds: `python -m pdx.bench.node.scaling`. About two minutes.

Each message at 10,000, 100,000 and 500,000 chunks, once by a node's own classes in this process and once by real nodes
over their sockets: processor time of that thread or of their control loops, so that other processes do not count. In
every round each size is asked in turn. Then requests that each evict 16 chunks and have a partial chunk. The last line
is JSON.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdx.bench.harness.report import Figure, at_least, at_most, plain, publish
from pdx.bench.node.scaling_bed import Bed, Here, Load, There, drive
from pdx.memory.arena import GRANULE_BYTES

SIZES = (10_000, 100_000, 500_000)
ROUNDS = 15
WARMUPS = 5
RATIO, STATUS_RATIO, REQUEST_RATIO = 2.0, 3.0, 0.7
REQUESTS = 150  # of each size in a row
TURNS = 8
REQUEST_CHUNKS = 16
REQUEST_CHUNK_BYTES = 4 * GRANULE_BYTES  # a partial chunk takes a part of that

Times = dict[str, dict[int, list[float]]]  # step -> size -> milliseconds per round


def rounds(loads: list[Load]) -> Times:
    """Every step at every size, in turns."""
    times: Times = defaultdict(lambda: defaultdict(list))
    for turn in range(-WARMUPS, ROUNDS):
        for load in loads:
            spent: dict[str, float] = defaultdict(float)

            def take(name: str, call: Callable[[], Any], load: Load = load, spent: dict[str, float] = spent) -> Any:
                began = load.bed.spent_s()
                answer = call()
                spent[name] += load.bed.spent_s() - began
                return answer

            drive(load.round(), take)
            if turn >= 0:
                for name, seconds in spent.items():
                    times[name][load.chunks].append(seconds * 1e3)
    return times


def requests(loads: list[Load]) -> dict[int, list[float]]:
    """Requests per second of processor time, at every size, in turns."""
    draw = random.Random(0)
    rates: dict[int, list[float]] = defaultdict(list)
    for load in loads:
        load.fill_up()
    for turn in range(-1, TURNS):
        for load in loads:
            sizes = [draw.randint(1, REQUEST_CHUNK_BYTES) for _ in range(REQUESTS)]
            began = time.thread_time()
            for size in sizes:
                load.request(REQUEST_CHUNKS, size)
            if turn >= 0:
                rates[load.chunks].append(REQUESTS / (time.thread_time() - began))
    return rates


def with_beds(make: Callable[[Path, int], Any], chunk_bytes: int, measure: Callable[[list[Load]], Any]) -> Any:
    """`measure` with a node of each size."""
    with contextlib.ExitStack() as stack:
        loads = []
        for chunks in SIZES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdx-bench-")))
            bed: Bed = stack.enter_context(make(folder, Load.arena_bytes(chunks, chunk_bytes)))
            loads.append(Load(bed, chunks, chunk_bytes))
        return measure(loads)


def figures(where: str, times: Times) -> list[Figure]:
    """One per step: milliseconds at the largest size, and how many times those at the smallest that is."""
    found = []
    for name, by_size in times.items():
        medians = [statistics.median(by_size[chunks]) for chunks in SIZES]
        note = ", ".join(f"{value:.3f} ms at {chunks:,}" for value, chunks in zip(medians, SIZES, strict=True))
        bound = STATUS_RATIO if name == "status" else RATIO
        found.append(at_most(f"{name}, {where}: 500k / 10k", medians[-1] / medians[0], "", bound, note))
    return found


def main() -> None:
    here: Times = with_beds(Here, GRANULE_BYTES, rounds)
    rates: dict[int, list[float]] = with_beds(Here, REQUEST_CHUNK_BYTES, requests)
    there: Times = with_beds(There, GRANULE_BYTES, rounds)
    per_s = [statistics.median(rates[chunks]) for chunks in SIZES]
    note = ", ".join(f"{value:,.0f}/s at {chunks:,}" for value, chunks in zip(per_s, SIZES, strict=True))
    publish(
        "scaling",
        "what messages cost a node by how many chunks it holds: 10,000, 100,000 and 500,000",
        [
            *figures("in one process", here),
            *figures("over the socket", there),
            at_least(
                "requests/s that evict and have a partial chunk: 500k / 10k",
                per_s[-1] / per_s[0],
                "",
                REQUEST_RATIO,
                note,
            ),
            plain("the same at 500k", per_s[-1], "1/s", f"{REQUEST_CHUNKS} chunks each, processor time of the node"),
        ],
        {"rounds": ROUNDS, "in_process_ms": here, "over_socket_ms": there, "requests_per_s": rates},
    )


if __name__ == "__main__":
    main()
