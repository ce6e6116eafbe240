"""What digests cost a push from node to node: `python -m pdx.bench.node.digests`.

Two pairs of nodes, one with digests of what crosses the wire, one without, push the same sealed chunks in turns; timed
until all are sealed at the peer. The last line is JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pdx.bench.harness.nodes import TO, node_pair, why_not
from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.bench.harness.timing import measure
from pdx.client.api import Node
from pdx.testing.waiting import wait_until

SCHEMES = ("tcp", "nixl")
CHUNKS, CHUNK_BYTES, LAYERS = 16, 16 << 20, 32
TOTAL_BYTES = CHUNKS * CHUNK_BYTES
ARENA_BYTES = 3 * TOTAL_BYTES
REPEATS = 9
GOAL = 0.15
PUSH_S = 60.0
NAMES = [f"chunk {index}" for index in range(CHUNKS)]


def fill(a: Node) -> None:
    """Seal the chunks; they stay."""
    for number, name in enumerate(NAMES):
        with a.reserve(name, CHUNK_BYTES, parts=LAYERS) as chunk:
            chunk.view[:] = bytes([number]) * CHUNK_BYTES
            chunk.seal()
    a.pin(*NAMES)


def pushing(a: Node, b: Node) -> Callable[[], None]:
    """A push of all of them, to be timed."""

    def call() -> None:
        a.push(*NAMES, to=TO)
        wait_until(lambda: b.lookup(NAMES) == CHUNKS, "all chunks are sealed at the peer", PUSH_S, pause_s=0.001)
        b.delete(*NAMES)

    return call


def cost(scheme: str) -> tuple[list[Figure], dict[str, Any]]:
    """Of one channel."""
    with ExitStack() as stack:
        calls = {}
        for digests in ("never", "wire"):
            a, b = stack.enter_context(node_pair(scheme, ARENA_BYTES, digests=digests))
            fill(a)
            calls[digests] = pushing(a, b)
        timings = measure(calls, reference="never", repeats=REPEATS)
    rates = {name: timing.rate(TOTAL_BYTES / 1e9) for name, timing in timings.items()}
    found = [
        plain(f"{scheme}: without digests", rates["never"], "GB/s"),
        plain(f"{scheme}: with digests", rates["wire"], "GB/s"),
        at_most(f"{scheme}: throughput lost to digests", 1 - timings["wire"].ratio, "", GOAL),
    ]
    return found, {name: {"median_s": timing.median_s, "best_s": timing.best_s} for name, timing in timings.items()}


def main() -> None:
    found: list[Figure] = []
    details = {}
    for scheme in SCHEMES:
        if why := why_not(scheme):
            found.append(plain(f"{scheme}: skipped", 0.0, "", why))
            continue
        figures, details[scheme] = cost(scheme)
        found += figures
    publish("digests", f"digests of {TOTAL_BYTES >> 20} MiB pushed, median of {REPEATS} rounds", found, details)


if __name__ == "__main__":
    main()
