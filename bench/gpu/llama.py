"""Prefill in one engine process and decode in another on one GPU, with the shapes of Llama-3.1-8B and random weights.

The bench runs with one GPU node that both engines map, and with a node per engine and the channel `cuda_ipc` between
them. The exposed time lasts from the end of the prompt's last layer until the decoder may run the request. Bytes are
hidden if they are where the decoder finds them when that layer ends. The decoder's load reads and writes each byte of
the prompt once, so a copy of those bytes within the GPU is a lower bound of the exposed time; it is measured, too. For
long prompts that copy alone exceeds the goal, which holds up to 8,192 tokens. What the connector costs the prefill
engine is measured against an engine without it, on the same prompts in turns, never both at once.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from pdx.bench.gpu.bed import REAL, TOY, Bed, Findings
from pdx.bench.harness.report import Figure, at_least, at_most, plain
from pdx.bench.harness.timing import measure
from pdx.bench.reference.model import SHAPES, Shapes
from pdx.bench.reference.pair import NODES, EngineProcess, hand_over, legs, nodes_for
from pdx.client.api import connect
from pdx.telemetry.timeline import Breakdown, Event, Moment, breakdown
from pdx.wire.proxy import NodeReport, decode_to_proxy


class ReportCollector:
    """Collects the reports of nodes whose `proxy` is `address`; answers nothing."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/scribe.sock"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.address)
        self._moments: dict[str, list[Moment]] = {}

    def transfer(self, name: str, last: Event, timeout_s: float = 10.0) -> Breakdown:
        """A transfer's times; waits until PREFILL_END, SEALED, RUNNABLE and `last` are reported.

        :raises RuntimeError: an event is not reported within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        wanted = {Event.PREFILL_END, Event.SEALED, Event.RUNNABLE, last}
        while missing := wanted - {moment.event for moment in self._moments.get(name, [])}:
            if not self._router.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
                raise RuntimeError(f"not told of {name} within {timeout_s} s: {', '.join(sorted(missing))}")
            self._receive()
        return breakdown(self._moments.pop(name))

    def _receive(self) -> None:
        _, frame = self._router.recv_multipart()
        report = decode_to_proxy(frame)
        for mark in report.marks if isinstance(report, NodeReport) else ():
            moment = Moment(mark.event, mark.at_ns, mark.engine, mark.nbytes, mark.tokens)
            self._moments.setdefault(mark.transfer, []).append(moment)

    def __enter__(self) -> ReportCollector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)


EXPOSED_MS, HIDDEN, SLOWED = 3.0, 0.97, 0.02
EXPOSED_TOKENS = 8192  # EXPOSED_MS holds for prompts up to this length
COPIED_BYTES = {REAL: 512 << 20, TOY: 1 << 20}  # by the reference copy
WARMUPS = 2
COPY_REPEATS = 9
WARM_S = 60.0
DECODED = 4  # tokens of a decode leg
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. `channel`: between two nodes."""

    shapes: Shapes
    device: str
    node_gpu: str
    channel: str
    prompts: Sequence[int]
    piece_tokens: int
    chunk_tokens: int
    repeats: int
    threads: int  # of each engine process, for what torch does on the CPU

    @property
    def token_bytes(self) -> int:
        itemsize = 2 if self.device == "cuda" else 4
        return self.shapes.layers * self.shapes.kv_heads * 2 * self.shapes.head_dim * itemsize


SIZES = {
    REAL: Sizes(SHAPES["llama-3.1-8b"], "cuda", "0", "cuda_ipc", (8192, 32768), 2048, 256, 21, 4),
    TOY: Sizes(SHAPES["tiny"], "cpu", "", "shm", (96,), 32, 32, 2, 1),
}


@dataclass(frozen=True, slots=True)
class Handoff:
    """The handoff of one prompt from one engine to the other."""

    prompt_tokens: int
    channel: str  # empty: one node
    exposed_ms: float
    hidden_share: float
    prefill_ms: float
    load_ms: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt, computed with and without the connector: milliseconds from arrival to the end of the last layer."""

    prompt_tokens: int
    with_ms: float
    without_ms: float


class Stage:
    """The nodes, and two engine processes, which outlive the stage."""

    def __init__(
        self,
        sizes: Sizes,
        engines: Sequence[EngineProcess],
        prompt_tokens: int,
        channel: str,
        stack: contextlib.ExitStack,
    ) -> None:
        self._sizes = sizes
        self._engines = engines
        self._channel = channel
        self._random = random.Random(prompt_tokens)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdx-bench-")))
        self._reports = stack.enter_context(ReportCollector(folder))
        prompt_bytes = prompt_tokens * sizes.token_bytes
        node = {
            "arena_bytes": prompt_bytes * 3 // 2 + 64 * MIB,
            "peer_share": 1.0,
            "proxy": self._reports.address,
            **({"gpu": sizes.node_gpu} if sizes.node_gpu else {}),
        }
        self._addresses = stack.enter_context(nodes_for(channel, node))
        for engine in engines:
            stack.callback(engine.do, "close")
        self._prompt_tokens = prompt_tokens

    def open(self, index: int, role: str) -> None:
        """Create the engine in that process; an empty role: without the connector."""
        sizes = self._sizes
        num_blocks = 8 + -(-(self._prompt_tokens + DECODED) // 16)
        settings: dict[str, Any] = {
            "shapes": asdict(sizes.shapes),
            "seed": 0,
            "device": sizes.device,
            "num_blocks": num_blocks,
            "piece_tokens": sizes.piece_tokens,
        }
        if role:
            settings["name"] = f"{role}-{index}"
            settings["connector"] = {
                "node": self._addresses[index],
                "start_node": False,
                "role": role,
                "chunk_tokens": sizes.chunk_tokens,
            }
        self._engines[index].do("open", **settings)

    def warm_handoffs(self) -> None:
        """Hand over prompts until one is loaded, because engines map the arena in the background."""
        self._wait_for(lambda: self._hand_over()[2]["loaded_tokens"], "no prompt is handed over")

    def warm_prefills(self) -> None:

        def is_saved() -> bool:
            name = f"warm {self._random.random()}"
            self._engines[0].do("run", requests=[{"name": name, "prompt": self._prompt(), "max_tokens": 1}])
            with connect(self._addresses[0]) as node:
                return node.status().chunks.get("sealed", 0) > 0

        self._wait_for(is_saved, "no prompt is saved")

    @staticmethod
    def _wait_for(condition: Callable[[], Any], otherwise: str) -> None:
        deadline = time.monotonic() + WARM_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{otherwise} within {WARM_S} s")

    def _hand_over(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Hand over one new prompt; returns its transfer id and the results of both legs."""
        pair = legs(self._prompt(), DECODED, NODES if self._channel else ("", ""))
        first, second = self._engines
        [prefilled], [decoded] = hand_over(first, second, [pair], mode="sampled")
        return pair[0]["params"]["transfer_id"], prefilled, decoded

    def handoff(self) -> Handoff:
        """Measure the handoff of one new prompt; its decode leg waits in the decode engine during prefill.

        :raises RuntimeError: the decoder has computed the prompt itself, or the timeline has holes.
        """
        transfer, prefilled, decoded = self._hand_over()
        if decoded["loaded_tokens"] < self._prompt_tokens - self._sizes.chunk_tokens:
            raise RuntimeError(f"the decoder has loaded {decoded['loaded_tokens']} of {self._prompt_tokens} tokens")
        times = self._reports.transfer(transfer, Event.PUSHED if self._channel else Event.LOAD_END)
        if times.handoff_ms is None or times.hidden_share is None:
            raise RuntimeError(f"the timeline has holes: {times}")
        prefill_ms = (prefilled["prefill_end_ns"] - prefilled["added_ns"]) / 1e6
        return Handoff(
            self._prompt_tokens,
            self._channel,
            times.handoff_ms,
            times.hidden_share,
            prefill_ms,
            times.load_ms or 0.0,
        )

    def prefill(self, turn: int) -> Prefill:
        """Time one new prompt in both engines; only the first engine has the connector."""
        prompt = self._prompt()
        took = [0.0, 0.0]
        for index in (0, 1) if turn % 2 else (1, 0):
            request = {"name": f"{turn}", "prompt": prompt, "max_tokens": 1}
            [done] = self._engines[index].do("run", requests=[request])
            took[index] = (done["prefill_end_ns"] - done["added_ns"]) / 1e6
        return Prefill(self._prompt_tokens, *took)

    def _prompt(self) -> list[int]:
        return [self._random.randrange(self._sizes.shapes.vocab) for _ in range(self._prompt_tokens)]


@contextlib.contextmanager
def stage(
    sizes: Sizes, engines: Sequence[EngineProcess], prompt_tokens: int, channel: str, roles: Sequence[str]
) -> Iterator[Stage]:
    """A stage with an engine in each process; its nodes and engines end with this context."""
    with contextlib.ExitStack() as stack:
        made = Stage(sizes, engines, prompt_tokens, channel, stack)
        for index, role in enumerate(roles):
            made.open(index, role)
        yield made


def copy_seconds(bed: Bed) -> float:
    """Seconds per byte that is read and written within the GPU."""
    nbytes = COPIED_BYTES[bed.name]
    source, target = bed.zeros(nbytes), bed.zeros(nbytes)
    calls = {"copy": lambda: target.copy_(source)}
    return (
        measure(calls, reference="copy", repeats=COPY_REPEATS, warmups=WARMUPS, clock=bed.clock)["copy"].median_s
        / nbytes
    )


def llama(bed: Bed, repeats: int = 0, prompts: Sequence[int] = ()) -> Findings:
    """The section `llama`. `repeats`: measured prompts of each case, `prompts`: their lengths; empty: the defaults."""
    sizes = SIZES[bed.name]
    sizes = replace(sizes, repeats=repeats or sizes.repeats, prompts=prompts or sizes.prompts)
    byte_s = copy_seconds(bed)
    handoffs: list[Handoff] = []
    prefills: list[Prefill] = []
    with contextlib.ExitStack() as stack:
        engines = [EngineProcess(sizes.threads) for _ in range(2)]
        for engine in engines:
            stack.callback(engine.close)
        for prompt_tokens in sizes.prompts:
            for channel in ("", sizes.channel):
                with stage(sizes, engines, prompt_tokens, channel, ("prefill", "decode")) as both:
                    both.warm_handoffs()
                    handoffs += [both.handoff() for _ in range(WARMUPS + sizes.repeats)][WARMUPS:]
            with stage(sizes, engines, prompt_tokens, "", ("both", "")) as both:
                both.warm_prefills()
                prefills += [both.prefill(turn) for turn in range(WARMUPS + sizes.repeats)][WARMUPS:]
    title = f"prefill to decode, two engine processes on one GPU, Llama-3.1-8B's shapes, median of {sizes.repeats}"
    details = {
        "shapes": asdict(sizes.shapes),
        "piece_tokens": sizes.piece_tokens,
        "copy_gb_s": 1e-9 / byte_s,
        "handoffs": [asdict(each) for each in handoffs],
        "prefills": [asdict(each) for each in prefills],
    }
    return Findings(title, llama_figures(handoffs, prefills, byte_s * sizes.token_bytes), details)


def llama_figures(handoffs: Sequence[Handoff], prefills: Sequence[Prefill], token_s: float) -> list[Figure]:
    """Medians per prompt length and way. `token_s`: seconds that a copy of a token's bytes takes."""
    found = []
    for prompt_tokens, channel in dict.fromkeys((each.prompt_tokens, each.channel) for each in handoffs):
        own = [each for each in handoffs if (each.prompt_tokens, each.channel) == (prompt_tokens, channel)]
        way = f"{prompt_tokens:,} tokens, {f'two nodes over {channel}' if channel else 'one node'}"
        exposed = statistics.median(each.exposed_ms for each in own)
        loaded = statistics.median(each.load_ms for each in own)
        prefill = statistics.median(each.prefill_ms for each in own)
        worst = max(each.exposed_ms for each in own)
        least = prompt_tokens * token_s * 1e3
        note = f"worst {worst:.2f}; the load {loaded:.2f}; a copy of the bytes {least:.2f}; prefill {prefill:.0f}"
        name = f"{way}: exposed"
        if prompt_tokens <= EXPOSED_TOKENS:
            found.append(at_most(name, exposed, "ms", EXPOSED_MS, note))
        else:
            found.append(plain(name, exposed, "ms", note))
        hidden = statistics.median(each.hidden_share for each in own)
        found.append(at_least(f"{way}: share of the bytes that is hidden", hidden, "", HIDDEN))
    for prompt_tokens in dict.fromkeys(each.prompt_tokens for each in prefills):
        pairs = [each for each in prefills if each.prompt_tokens == prompt_tokens]
        slowed = statistics.median(each.with_ms / each.without_ms for each in pairs) - 1
        without = statistics.median(each.without_ms for each in pairs)
        name = f"{prompt_tokens:,} tokens: prefill slowed by the connector"
        found.append(at_most(name, slowed, "", SLOWED, f"without it {without:.1f} ms"))
    return found
