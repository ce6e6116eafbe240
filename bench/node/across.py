"""How much of a prompt's KV has reached the decoder's node when prefill ends: `python -m pdx.bench.node.across`.

Two nodes on this host and a client that plays a prefill engine: 16 chunks of 256 tokens at 64 KB per token in 32
layers, filled layer by layer during a simulated prefill that takes at least twice as long as the wire needs. It sleeps
instead of computing, like a CPU while a GPU computes. For comparison, the same is filled at once at the end, which
gives the time on the wire. The last line is JSON.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import numpy

from pdx.bench.harness.nodes import TO, node_pair, why_not
from pdx.bench.harness.report import Figure, at_least, plain, publish
from pdx.client.api import Node, WritableChunk
from pdx.testing.waiting import wait_until

SCHEMES = ("tcp", "nixl", "ucx", "shm")
WITH_GOAL = ("tcp", "nixl")
CHUNKS, LAYERS = 16, 32  # 4,000 tokens at 256 per chunk; 32 layers
CHUNK_BYTES = 256 * (64 << 10)
TOTAL_BYTES = CHUNKS * CHUNK_BYTES
ARENA_BYTES = 3 * TOTAL_BYTES
COMPUTE = 2.0  # prefill takes this many times as long as the wire
ROUNDS = 7
GOAL = 0.9
PUSH_S = 60.0


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt. Shares are of all bytes, as acknowledged by the peer."""

    prefill_s: float
    after_s: float  # prefill's end → all chunks are sealed at the peer
    at_end: float  # share when the last layer is computed, before it is gathered
    after_fill: float  # share when the last layer is filled


class Prompts:
    """Prefills and their pushes, from node `a` to its peer."""

    def __init__(self, a: Node, b: Node) -> None:
        self._a = a
        self._b = b
        self._number = 0
        self._source = numpy.full(CHUNK_BYTES // LAYERS, 7, dtype=numpy.uint8)

    def round(self, compute_s: float) -> Round:
        """A prefill of `compute_s`, each layer filled as soon as it is computed; 0: all filled at once, then sealed."""
        self._number += 1
        names = [f"prompt {self._number} chunk {index}" for index in range(CHUNKS)]
        with ExitStack() as stack:
            chunks = [
                stack.enter_context(self._a.reserve(name, CHUNK_BYTES, parts=LAYERS, push_to=TO)) for name in names
            ]
            rows = [numpy.frombuffer(chunk.view, dtype=numpy.uint8).reshape(LAYERS, -1) for chunk in chunks]
            before = self._sent_bytes()
            if not compute_s:
                for row in rows:
                    row[:] = self._source
            start = time.perf_counter()
            at_end = 0.0
            for layer in range(LAYERS) if compute_s else ():
                time.sleep(max(0.0, start + compute_s * (layer + 1) / LAYERS - time.perf_counter()))
                if layer == LAYERS - 1:
                    end = time.perf_counter()
                    at_end = self._share(before)
                self._fill(chunks, rows, layer)
            if not compute_s:
                end = start
            after_fill = self._share(before)
            for chunk in chunks:
                chunk.seal()
            wait_until(
                lambda: self._b.lookup(names) == CHUNKS, "all chunks are sealed at the peer", PUSH_S, pause_s=0.001
            )
            after_s = time.perf_counter() - end
            del rows
        for node in (self._a, self._b):
            node.delete(*names)
        return Round(end - start, after_s, at_end, after_fill)

    def _fill(self, chunks: Sequence[WritableChunk], rows: Sequence[numpy.ndarray], layer: int) -> None:
        for chunk, row in zip(chunks, rows, strict=True):
            row[layer] = self._source
            chunk.fill(layer)

    def _share(self, before: int) -> float:
        return (self._sent_bytes() - before) / TOTAL_BYTES

    def _sent_bytes(self) -> int:
        return next(peer.sent_bytes for peer in self._a.status().peers if peer.name == TO)


def measure(scheme: str) -> tuple[list[Round], list[Round]]:
    """Filled at the end, and layer by layer; a prefill takes COMPUTE times the wire's median so far."""
    with node_pair(scheme, ARENA_BYTES) as (a, b):
        prompts = Prompts(a, b)
        prompts.round(0.0)
        at_once, layered = [], []
        for _ in range(ROUNDS):  # alternately, because the machine's speed drifts
            at_once.append(prompts.round(0.0))
            layered.append(prompts.round(COMPUTE * statistics.median(each.after_s for each in at_once)))
        return at_once, layered


def figures(scheme: str, at_once: list[Round], layered: list[Round]) -> list[Figure]:
    wire_s = statistics.median(each.after_s for each in at_once)
    shares = [each.at_end for each in layered]
    prefill_s = statistics.median(each.prefill_s for each in layered)
    name = f"{scheme}: share across when prefill ends"
    note = f"prefill {prefill_s * 1e3:.0f} ms, {prefill_s / wire_s:.1f} times the wire's; worst {min(shares):.3f}"
    share = statistics.median(shares)
    return [
        at_least(name, share, "", GOAL, note) if scheme in WITH_GOAL else plain(name, share, "", note),
        plain(
            f"{scheme}: the same, when the last layer is filled",
            statistics.median(each.after_fill for each in layered),
            "",
        ),
        plain(
            f"{scheme}: prefill end → sealed at the peer, layer by layer",
            statistics.median(each.after_s for each in layered) * 1e3,
            "ms",
        ),
        plain(
            f"{scheme}: prefill end → sealed at the peer, all filled at the end",
            wire_s * 1e3,
            "ms",
            f"{TOTAL_BYTES / wire_s / 1e9:.2f} GB/s: the wire, digests included",
        ),
    ]


def main() -> None:
    found: list[Figure] = []
    details = {}
    for scheme in SCHEMES:
        if why := why_not(scheme):
            found.append(plain(f"{scheme}: skipped", 0.0, "", why))
            continue
        at_once, layered = measure(scheme)
        found += figures(scheme, at_once, layered)
        details[scheme] = {
            "at_once": [asdict(each) for each in at_once],
            "layer_by_layer": [asdict(each) for each in layered],
        }
    title = f"a prompt of 4,000 tokens ({TOTAL_BYTES >> 20} MiB) pushed layer by layer, median of {ROUNDS}"
    publish("across", title, found, details)


if __name__ == "__main__":
    main()
