"""A small engine other than vLLM on the same connector core: it proves that PDX serves more than one engine, and is the
load of GPU measurements. Continuous batching, prompts in pieces, greedy decoding, one rank.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pdx.bench.reference.model import AXES, Batch, Model, PagedKv, Shapes
from pdx.config import ConnectorConfig
from pdx.engine.scheduler import SchedulerHalf
from pdx.engine.step import BlockHashing, StepRecord, StepRequest
from pdx.engine.worker import WorkerHalf
from pdx.errors import NodeUnavailable
from pdx.memory.layout import KvLayout

ATTACH_S = 20.0


def chained_hash(request: Request, parent: bytes | None, start: int, end: int) -> bytes:
    """The hash of tokens [start, end) and, through `parent`, of all tokens before them."""
    return hashlib.sha256((parent or bytes(32)) + array("q", request.all_token_ids[start:end]).tobytes()).digest()


class Hashing(BlockHashing):
    """Block hashing of this engine, which has no prefix cache and so never shares blocks between requests."""

    def keep_apart(self, request: Request, form: str) -> bool:
        return True


@dataclass(slots=True)
class Stats:
    """Times and token counts of one request. Times are CLOCK_MONOTONIC nanoseconds, 0 until they are known."""

    added_ns: int = 0
    loaded_ns: int = 0  # its load is over
    prefill_end_ns: int = 0  # its last prompt token is computed, on the device
    first_token_ns: int = 0
    loaded_tokens: int = 0
    computed_prompt_tokens: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its generated tokens and state. For the connector it is an `EngineRequest`."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    max_tokens: int = 16
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and generated tokens."""
        return len(self.all_token_ids)

    @property
    def output(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    def extend_hashes(self, block_tokens: int) -> None:
        """Hash the blocks that have become full."""
        while (end := (len(self.block_hashes) + 1) * block_tokens) <= self.num_tokens:
            parent = self.block_hashes[-1] if self.block_hashes else None
            self.block_hashes.append(chained_hash(self, parent, end - block_tokens, end))


class DecodeGraphs:
    """CUDA graphs of steps in which each request computes one token: a graph per number of requests and of blocks, the
    latter rounded up to a power of two. As in vLLM, a replay calls no layer hook."""

    def __init__(self, model: Model, kv: PagedKv) -> None:
        self._model = model
        self._kv = kv
        self._captured: dict[tuple[int, int], tuple[Batch, torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def forward(self, batch: Batch) -> torch.Tensor:
        """The logits of `batch`, valid until the next call."""
        size, width = batch.table.shape
        key = (size, 1 << (width - 1).bit_length())
        if key not in self._captured:
            self._captured[key] = self._capture(*key, batch.table.device)
        static, graph, logits = self._captured[key]
        static.tokens.copy_(batch.tokens)
        static.positions.copy_(batch.positions)
        static.table[:, :width].copy_(batch.table)
        graph.replay()
        return logits

    def _capture(self, size: int, width: int, device: torch.device) -> tuple[Batch, torch.cuda.CUDAGraph, torch.Tensor]:
        static = Batch.of([([0], 0, [0] * width)] * size, device)  # only block 0 is written
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # so that libraries allocate before the capture
            self._model.forward([static], self._kv)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._model.forward([static], self._kv)
        return static, graph, logits


class ReferenceEngine:
    """One engine in this process, run by the calling thread, with both halves of the connector.

    `exact`: each request goes through the model by itself, in pieces that depend neither on other requests nor on what
    was loaded. Every engine then computes bit-identical KV for equal prompts, as long as chunks are whole pieces.

    :raises NodeUnavailable: no node answers at the start. If the node is lost later, the engine continues without it.
    """

    def __init__(
        self,
        shapes: Shapes,
        seed: int,
        device: str = "cpu",
        *,
        connector: ConnectorConfig | None = None,
        name: str = "",  # unique among the engines of the node; empty: a random name
        num_blocks: int = 256,
        block_tokens: int = 16,
        order: str = AXES,
        piece_tokens: int = 2048,  # at most in one step: of a prompt, and of all prompts together
        exact: bool | None = None,  # None: on CPUs
        graphs: bool = False,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = Model(shapes, seed, dtype, self.device)
        self.kv = PagedKv(shapes, num_blocks, block_tokens, order, dtype, self.device)
        self.piece_tokens = piece_tokens
        self.exact = self.device.type == "cpu" if exact is None else exact
        self.graphs = DecodeGraphs(self.model, self.kv) if graphs and self.device.type == "cuda" else None
        self.free = list(range(1, num_blocks))
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.running: list[Request] = []
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        if connector is not None:
            layout = self._layout(connector.chunk_tokens, seed, order, dtype)
            name = name or f"reference-{secrets.token_hex(8)}"
            self.worker = WorkerHalf(connector, layout, name, 0)
            self.worker.register({f"layer.{i}": pages for i, pages in enumerate(self.kv.layers)}, num_blocks)
            self.scheduler = SchedulerHalf(connector, layout, name, Hashing(chained_hash))
            if not (self.worker.link.is_attached and self.scheduler.link.wait_attached(ATTACH_S)):
                self.close()
                raise NodeUnavailable(f"no node answers engine {name} at {connector.node_address()}")

    def _layout(self, chunk_tokens: int, seed: int, order: str, dtype: torch.dtype) -> KvLayout:
        shapes = self.model.shapes
        return KvLayout(
            model=f"{shapes}, weights from seed {seed} on {self.device.type}",
            dtype=str(dtype),
            num_layers=shapes.layers,
            num_heads=shapes.kv_heads,
            head_dim=shapes.head_dim,
            block_tokens=self.kv.block_tokens,
            page_bytes=self.kv.page_bytes,
            chunk_tokens=chunk_tokens,
            order=order,
            backend="reference",
            isa="",
            num_shards=1,
            hashing="sha256",
        )

    def add(
        self, name: str, prompt: Sequence[int], max_tokens: int = 16, params: dict[str, Any] | None = None
    ) -> Request:
        """Enqueue a request for the next steps; `params` are its `kv_transfer_params`.

        :raises ValueError: the prompt is empty, `max_tokens` is below 1, or the KV cache is too small.
        """
        blocks = -(-(len(prompt) + max_tokens) // self.kv.block_tokens)
        if not prompt or max_tokens < 1 or blocks >= self.kv.layers[0].shape[0]:
            raise ValueError(f"{len(prompt)} prompt tokens and {max_tokens} more do not fit")
        request = Request(name, list(prompt), params, len(prompt), max_tokens=max_tokens)
        request.stats.added_ns = time.monotonic_ns()
        self.waiting.append(request)
        return request

    @property
    def has_work(self) -> bool:
        unsent = self.scheduler is not None and self.scheduler.has_unsent_plans()
        return bool(self.waiting or self.loading or self.running or unsent)

    def run(self) -> None:
        while self.has_work:
            self.step()

    def step(self) -> None:
        """Admit requests that fit, compute one step, and take in completed loads. Never waits for a transfer."""
        self._admit()
        work = self._schedule()
        if self.scheduler is not None and self.worker is not None:
            self.worker.begin(self.scheduler.plan_step(self._record(work)))
        sampled, computed_at = self._forward(work) if work else (None, time.monotonic_ns)
        if self.worker is not None:
            self.worker.end_forward()
        now = computed_at()
        self._take_loaded()
        for index, (request, start, end) in enumerate(work):
            self._advance(request, start, end, now, sampled, index)

    # ---- scheduling -------------------------------------------------------------------------

    def _admit(self) -> None:
        for request in list(self.waiting):
            request.extend_hashes(self.kv.block_tokens)
            found = self.scheduler.matched_tokens(request, 0) if self.scheduler is not None else 0
            if found is None:
                continue
            need = -(-(request.num_tokens + request.max_tokens) // self.kv.block_tokens)
            if need > len(self.free):
                break
            request.block_ids, self.free = self.free[:need], self.free[need:]
            if self.scheduler is not None:
                self.scheduler.allocated(request, [request.block_ids], found)
            self.waiting.remove(request)
            if found:
                request.stats.loaded_tokens = found
                self.loading[request.request_id] = request
            else:
                self.running.append(request)

    def _schedule(self) -> list[tuple[Request, int, int]]:
        """Requests with the tokens [start, end) that they compute in this step: single tokens first, then pieces of
        prompts. A piece ends at a multiple of `piece_tokens`, so its end does not depend on where a load ended."""
        single, pieces, room = [], [], self.piece_tokens
        for request in self.running:
            start = request.num_computed
            end = min(request.num_tokens, (start // self.piece_tokens + 1) * self.piece_tokens)
            if self.exact and start < request.num_prompt_tokens - 1:
                end = min(end, request.num_prompt_tokens - 1)  # a decoder computes the last token alone
            if end - start == 1:
                single.append((request, start, end))
            elif end - start <= room:
                pieces.append((request, start, end))
                room -= end - start
        return single + pieces

    @staticmethod
    def _record(work: Sequence[tuple[Request, int, int]]) -> StepRecord:
        """The step, with all its requests in full."""
        requests = [
            StepRequest(request.request_id, start, end - start, request.num_tokens, [request.block_ids])
            for request, start, end in work
        ]
        return StepRecord(requests, sum(each.scheduled for each in requests))

    # ---- computing --------------------------------------------------------------------------

    def _forward(self, work: Sequence[tuple[Request, int, int]]) -> tuple[torch.Tensor, Callable[[], int]]:
        """The next tokens, and a function that returns when they were computed; after that they are in host memory."""
        block = self.kv.block_tokens
        inputs = [(request.all_token_ids[a:b], a, request.block_ids[: -(-b // block)]) for request, a, b in work]
        if self.graphs is not None and all(len(ids) == 1 for ids, _, _ in inputs):
            logits = self.graphs.forward(Batch.of(inputs, self.device))
        else:
            parts = [Batch.of([one], self.device) for one in inputs] if self.exact else [Batch.of(inputs, self.device)]
            logits = self.model.forward(parts, self.kv, self._save_layer if self.worker is not None else None)
        if self.device.type == "cpu":
            now = time.monotonic_ns()
            return logits.argmax(-1), lambda: now
        sampled = torch.empty(len(work), dtype=torch.int64, pin_memory=True)
        sampled.copy_(logits.argmax(-1), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return sampled, lambda: event.synchronize() or time.monotonic_ns()

    def _save_layer(self, layer: int) -> None:
        assert self.worker is not None
        self.worker.save_layer(f"layer.{layer}")

    def _advance(self, request: Request, start: int, end: int, now: int, sampled: torch.Tensor, index: int) -> None:
        stats, prompt = request.stats, request.num_prompt_tokens
        stats.computed_prompt_tokens += min(end, prompt) - min(start, prompt)
        request.num_computed = end
        if end < request.num_tokens:
            return
        request.all_token_ids.append(int(sampled[index]))
        request.extend_hashes(self.kv.block_tokens)
        if not stats.first_token_ns:
            stats.prefill_end_ns, stats.first_token_ns = now, time.monotonic_ns()
        if len(request.output) == request.max_tokens:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self.free += request.block_ids
        if self.scheduler is not None:
            self.scheduler.finished(request)

    def _take_loaded(self) -> None:
        """Run requests whose load is over, from the first missing block on, or at least from the last prompt token."""
        finished, failed = self.worker.finished_loads() if self.worker is not None else (set(), set())
        if self.scheduler is not None and self.worker is not None:
            if failed:
                self.scheduler.not_loaded(failed)
            news = self.worker.take_news()
            if news is not None:
                self.scheduler.heard([news])
        for name in finished:
            request = self.loading.pop(name)
            assert self.scheduler is not None
            self.scheduler.loaded(name)
            missing = [index for index, block in enumerate(request.block_ids) if block in failed]
            loaded = min([request.stats.loaded_tokens, *(index * self.kv.block_tokens for index in missing[:1])])
            request.stats.loaded_tokens, request.stats.loaded_ns = loaded, time.monotonic_ns()
            request.num_computed = min(loaded, request.num_prompt_tokens - 1)
            self.running.append(request)

    def close(self) -> None:
        """Detach from the node. Idempotent."""
        for half in (self.scheduler, self.worker):
            if half is not None:
                half.close()
