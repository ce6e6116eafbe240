"""The cost of a layer's hook on the engine's thread: the connector's worker half with the KV of Llama-3.1-8B.

The rest of the model is small, because only the thread's own time counts. Hooks are timed in prefill steps, where each
hook launches a gather, and in decode steps, where a chunk hardly ever ends.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdx.bench.gpu.bed import REAL, TOY, Bed, Findings
from pdx.bench.harness.report import Figure, at_most, plain
from pdx.bench.reference.engine import ReferenceEngine
from pdx.bench.reference.model import Shapes
from pdx.bench.reference.pair import nodes_for
from pdx.client.api import connect
from pdx.config import ConnectorConfig

GOAL_US = 50.0
MIB = 1 << 20
BLOCK_TOKENS = 16
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    shapes: Shapes
    device: str
    node_gpu: str
    prompt_tokens: int
    piece_tokens: int
    chunk_tokens: int
    requests: int  # that decode together
    decoded: int  # tokens of each
    repeats: int  # of the prompt
    arena_bytes: int

    @property
    def short_tokens(self) -> int:
        """Prompt tokens of each request that decodes: all these prompts together are one piece."""
        return self.piece_tokens // self.requests

    @property
    def decode_tokens(self) -> int:
        """Tokens of all requests that decode, at their end."""
        return self.requests * (self.short_tokens + self.decoded)


SIZES = {
    REAL: Sizes(Shapes(32, 1024, 8, 8, 128, 1024, 1024), "cuda", "0", 8192, 2048, 256, 32, 64, 21, 4096 * MIB),
    TOY: Sizes(Shapes(3, 64, 4, 2, 16, 128, 512), "cpu", "", 64, 32, 32, 2, 4, 2, 16 * MIB),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One hook in one kind of step: microseconds of the thread's CPU time, and of wall time."""

    call: str
    step: str
    calls: int
    cpu_us: float
    cpu_us_99: float
    wall_us: float


class Meter:
    """Wraps a method and records the (CPU, wall) nanoseconds of each call, by the kind of step."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.step = ""  # empty: not counted
        self.times: dict[str, list[tuple[int, int]]] = {PREFILL: [], DECODE: []}

    def __call__(self, *arguments: Any) -> Any:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = self._method(*arguments)
        spent = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        if self.step:
            self.times[self.step].append(spent)
        return result

    def rows(self, name: str) -> list[Row]:
        found = []
        for step, times in self.times.items():
            if times:
                cpu = sorted(spent for spent, _ in times)
                wall_us = statistics.median(wall for _, wall in times) / 1e3
                last = cpu[min(len(cpu) - 1, len(cpu) * 99 // 100)]
                row = Row(name, step, len(cpu), statistics.median(cpu) / 1e3, last / 1e3, wall_us)
                found.append(row)
        return found


def hook(bed: Bed) -> Findings:
    sizes = SIZES[bed.name]
    node = {"arena_bytes": sizes.arena_bytes, **({"gpu": sizes.node_gpu} if sizes.node_gpu else {})}
    with nodes_for("", node) as addresses:
        connector = ConnectorConfig(node=addresses[0], start_node=False, chunk_tokens=sizes.chunk_tokens)
        num_blocks = 2 + sizes.requests + max(sizes.prompt_tokens, sizes.decode_tokens) // BLOCK_TOKENS
        engine = ReferenceEngine(
            sizes.shapes,
            0,
            sizes.device,
            connector=connector,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            piece_tokens=sizes.piece_tokens,
            exact=False,
        )
        try:
            rows = _measure(engine, sizes)
            _check_saved(addresses[0], sizes)
        finally:
            engine.close()
    title = f"CPU time of the engine's thread in the connector's hooks, {sizes.shapes.layers} layers"
    return Findings(title, hook_figures(rows), {"rows": [asdict(row) for row in rows]})


def _check_saved(address: str, sizes: Sizes) -> None:
    """Check that the hooks had work, or they would look cheap. :raises RuntimeError: the computed KV is not stored."""
    with connect(address) as node:
        sealed = node.status().chunks.get("sealed", 0)
    if sealed < sizes.prompt_tokens // sizes.chunk_tokens:
        raise RuntimeError(f"the node has {sealed} chunks: the hooks have saved nothing")


def _measure(engine: ReferenceEngine, sizes: Sizes) -> list[Row]:
    worker: Any = engine.worker
    if not worker.link.is_attached:
        raise RuntimeError("the engine is not attached to its node")
    meters = {name: Meter(getattr(worker, name)) for name in ("save_layer", "begin", "end_forward")}
    for name, meter in meters.items():
        setattr(worker, name, meter)
    source = random.Random(7)

    def prompt(tokens: int) -> list[int]:
        return [source.randrange(sizes.shapes.vocab) for _ in range(tokens)]

    def step_as(step: str) -> None:
        for meter in meters.values():
            meter.step = step

    for turn in range(1 + sizes.repeats):
        step_as(PREFILL if turn else "")  # the first turn compiles and connects
        engine.add(f"prefill {turn}", prompt(sizes.prompt_tokens), 1)
        engine.run()
    step_as("")
    requests = [
        engine.add(f"decode {number}", prompt(sizes.short_tokens), sizes.decoded) for number in range(sizes.requests)
    ]
    while not all(request.output for request in requests):
        engine.step()
    step_as(DECODE)
    engine.run()
    return [row for name, meter in meters.items() for row in meter.rows(name)]


def hook_figures(rows: Sequence[Row]) -> list[Figure]:
    """The hook of a layer has a goal; the calls at the start and end of a step have none."""
    found = []
    for row in rows:
        note = f"of {row.calls}; 99 % below {row.cpu_us_99:.1f}; {row.wall_us:.1f} by the clock"
        if row.call == "save_layer":
            found.append(at_most(f"a layer's hook, {row.step} steps: CPU time", row.cpu_us, "µs", GOAL_US, note))
        else:
            found.append(plain(f"{row.call}, {row.step} steps: CPU time", row.cpu_us, "µs", note))
    return found
