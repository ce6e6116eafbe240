"""A toy engine around both halves of the connector: real tensors, a real node, a scheduler of a few lines.

It computes nothing: the KV of a token is a function of all tokens up to it, as in a real model, so a page at the wrong
place is seen. It calls the halves as vLLM 0.32 does, hooks included, and can skip hooks as a full CUDA graph does. Its
forward pass can fail between two layers.
With `streams` it queues its work as an engine on a GPU does, and with `graphs` it captures each step and replays it.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pdx.config import ConnectorConfig
from pdx.engine.guard import SchedulerGuard, WorkerGuard
from pdx.engine.scheduler import SchedulerHalf
from pdx.engine.step import BlockHashing, LeftOut, StepLimits, StepRecord
from pdx.engine.worker import WorkerHalf
from pdx.memory.layout import CacheGroups, KvLayout, Place
from pdx.vllm.step import step_record
from pdx.wire.messages import Ping

if TYPE_CHECKING:
    from stream_bed import LaggingStreams

BLOCK = 4
CHUNK = 16
LAYERS = 3
PAGE_BYTES = 64
NUM_BLOCKS = 64
_numbers = itertools.count()  # of requests and of engines that a test gives no name


def tokens(seed: int, count: int) -> list[int]:
    """A prompt, the same for the same seed; a longer one begins as a shorter one does."""
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(count)]


def prefill_of(transfer: str, **more: Any) -> dict[str, Any]:
    """The parameters of a leg that prefills for another engine."""
    return {"do_remote_decode": True, "transfer_id": transfer, **more}


def decode_of(transfer: str, **more: Any) -> dict[str, Any]:
    """And of the one that was prefilled for."""
    return {"do_remote_prefill": True, "transfer_id": transfer, **more}


def layout(**changes: Any) -> KvLayout:
    fields = {
        "model": "toy", "dtype": "uint8", "num_layers": LAYERS, "num_heads": 1, "head_dim": 8,
        "block_tokens": BLOCK, "page_bytes": PAGE_BYTES, "chunk_tokens": CHUNK, "order": "LBHNC", "backend": "toy",
        "isa": "", "num_shards": 1, "hashing": "sha256", **changes,
    }  # fmt: skip
    return KvLayout(**fields)


def chained(tokens: list[int]) -> bytes:
    return hashlib.sha256(str(tokens).encode()).digest()


def _ranges(counts: Sequence[int]) -> list[range]:
    """So many layers each, one part after the other."""
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def hasher(request: Any, parent: bytes | None, start: int, end: int) -> bytes:
    return chained(request.all_token_ids[:end])


def kv_bytes(tokens: list[int], layer: int, head: int, weights: str = "", page_bytes: int = PAGE_BYTES) -> torch.Tensor:
    """What a head's page has of the last token of `tokens`: [page_bytes / BLOCK]."""
    digest = hashlib.shake_128(f"{tokens}{layer}{head}{weights}".encode()).digest(page_bytes // BLOCK)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


class ForwardFailed(Exception):
    """A kernel failed, or memory ran out, in the middle of a forward pass."""


class Request(SimpleNamespace):
    """What the connector reads of vLLM's Request."""

    def __init__(self, name: str, tokens: list[int], params: Any = None) -> None:
        super().__init__(request_id=name, all_token_ids=list(tokens), num_prompt_tokens=len(tokens))
        self.kv_transfer_params = params
        self.num_preemptions = 0
        self.num_computed = 0
        self.block_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return [chained(self.all_token_ids[: end + BLOCK]) for end in range(0, self.num_tokens - BLOCK + 1, BLOCK)]


class Hashing(BlockHashing):
    def __init__(
        self, keeps_apart: bool, left_out: Callable[[Request], LeftOut | None], beside: bytes | None = b""
    ) -> None:
        super().__init__(hasher)
        self._keeps_apart, self._left_out, self._beside = keeps_apart, left_out, beside

    def keep_apart(self, request: Request, form: str) -> bool:
        return self._keeps_apart or not form

    def beside(self, request: Request) -> bytes | None:
        return self._beside

    def tokens(self, request: Request, first: int, end: int) -> list[int]:
        return request.all_token_ids[first:end]

    def name_inputs(self, request: Request, is_new: bool) -> LeftOut | None:
        return self._left_out(request)


class ToyEngine:
    """One engine in this process, of as many ranks as its chunks have shards, if nothing else is said. `streams`: where
    its first rank works, and `more_streams` where the others do; the caller's to close. `shape`: what of its layout is
    another's. `heads`: of the model, one for each shard by default; ranks that are more than these have them twice.
    `turning`: how its keys turn with their positions, if they do.
    `stages`: how many layers each stage of its pipeline has, one stage by default, each of as many ranks; `cut`: how
    many each part of the layers has that its chunks are of, by default each stage's."""

    def __init__(
        self,
        address: str,
        name: str = "",
        shards: int = 1,
        *,
        ranks: int = 0,
        heads: int = 0,
        stages: Sequence[int] = (LAYERS,),
        cut: Sequence[int] = (),
        streams: LaggingStreams | None = None,
        more_streams: Sequence[LaggingStreams] = (),
        graphs: bool = False,
        page_bytes: int = PAGE_BYTES,
        num_blocks: int = NUM_BLOCKS,
        shape: dict[str, Any] | None = None,
        keeps_apart: bool = True,
        left_out: Callable[[Request], LeftOut | None] = lambda request: None,
        limits: StepLimits = StepLimits(),  # noqa: B008 - frozen
        turning: Any = None,
        beside: bytes | None = b"",
        **settings: Any,
    ) -> None:
        settings.setdefault("lookup_s", 20.0)  # so that only an answer decides, on a loaded machine, too
        settings.setdefault("load", "always")  # likewise, and not how fast the machine is
        config = ConnectorConfig(node=address, chunk_tokens=CHUNK, start_node=False, **settings)
        self.page_bytes = page_bytes
        name = name or f"toy-{next(_numbers)}"
        self.ranks, self.heads = ranks or shards, heads or shards
        of_shard = {"num_shards": shards, "num_heads": self.heads // shards, "page_bytes": page_bytes}
        whole = layout(**{**of_shard, **(shape or {})})
        self.cut = tuple(cut) or tuple(stages)
        assert streams is None or (self.ranks == 1 + len(more_streams) and len(stages) == 1)
        self.streams: Any = streams
        self.graphs = graphs
        num_workers = len(stages) * self.ranks
        self.by_rank = [None] * num_workers if streams is None else [streams, *more_streams]  # stage after stage
        self.layers = [layers for layers in _ranges(stages) for _ in range(self.ranks)]  # of each worker
        self.workers = [
            WorkerHalf(
                config,
                self._groups(whole, stages, stage),
                name,
                rank,
                each,
                ranks=self.ranks,
                stage=stage,
            )
            for each, (stage, rank) in zip(
                self.by_rank, itertools.product(range(len(stages)), range(self.ranks)), strict=True
            )
        ]
        self.head_bytes = page_bytes * shards // self.heads  # of a page
        of_rank = max(1, self.heads // self.ranks), BLOCK, self.head_bytes // BLOCK
        self.caches = [torch.zeros(LAYERS, num_blocks, *of_rank, dtype=torch.uint8) for _ in self.by_rank]
        for worker, cache, layers in zip(self.workers, self.caches, self.layers, strict=True):
            parts = [of_part for of_part in _ranges(self.cut) if of_part.start in layers]
            group_of = {f"layer.{index}": at for at, of_part in enumerate(parts) for index in of_part}
            tensors = {f"layer.{index}": cache[index] for index in layers}
            worker.register(tensors, num_blocks, group_of, turning)
        self.scheduler = SchedulerHalf(
            config,
            self._groups(whole, stages, None),
            name,
            Hashing(keeps_apart, left_out, beside),
            limits=limits,
            not_moved="" if turning is not None else "the toy has no positions",
        )
        assert self.scheduler.link.wait_attached(10)
        # Steps go through the guards, as vLLM's hooks do; tests may ask the halves themselves.
        self.scheduler_guard = SchedulerGuard(self.scheduler, BLOCK)
        self.worker_guards = [WorkerGuard(worker) for worker in self.workers]
        self.free = list(range(num_blocks))
        self.waiting: dict[str, set[int]] = {}  # ranks that have not reported a load, by request
        self.weights = ""
        self.failed: set[int] = set()  # blocks that the workers reported in the last step
        self.skip_hooks = False
        self.fails_at: tuple[int, int] | None = None  # the rank and layer whose computation raises `ForwardFailed`

    def _groups(self, whole: KvLayout, stages: Sequence[int], stage: int | None) -> CacheGroups:
        """The cache groups of a stage, or of the engine: of each part of its layers one."""
        if len(self.cut) == 1:
            return CacheGroups.of(whole)
        starts = list(itertools.accumulate(stages))
        found = [
            (
                msgspec.structs.replace(whole, num_layers=len(layers), layers=tuple(layers)),
                Place(number, 0, bisect.bisect(starts, layers.start)),
            )
            for number, layers in enumerate(_ranges(self.cut))
        ]
        own = [each for each in found if stage in (None, each[1].stage)]
        text = ",".join(map(str, self.cut))
        is_part = len(own) < len(found)
        return CacheGroups.of([each for each, _ in own], [at for _, at in own], stages=text, is_part=is_part)

    # ---- the scheduler's side ---------------------------------------------------------------

    def match(self, request: Request, local: int = 0, deadline_s: float = 20.0) -> int:
        """Ask until the connector has decided, which takes `fetch_s` (5 s) where a peer does not answer."""
        deadline = time.monotonic() + deadline_s
        while (found := self.scheduler_guard.matched_tokens(request, local)) is None:
            assert time.monotonic() < deadline, "never decided"
            self.idle()
        return found

    def allocate(self, request: Request, num_external: int) -> None:
        need = -(-(request.num_tokens + 64) // BLOCK)
        request.block_ids += [self.free.pop(0) for _ in range(need - len(request.block_ids))]
        if num_external:
            self.waiting[request.request_id] = set(range(len(self.workers)))
        self.scheduler_guard.allocated(request, [request.block_ids], num_external)

    def admit(self, request: Request) -> set[int]:
        """Look up, allocate, load; returns the blocks that could not be loaded."""
        external = self.match(request)
        self.allocate(request, external)
        if not external:
            return set()
        failed = self.finish_load(request)
        request.num_computed = external
        if failed:
            first = min(request.block_ids.index(block) for block in failed)
            request.num_computed = first * BLOCK
        return failed

    def finish_load(self, request: Request) -> set[int]:
        failed: set[int] = set()
        deadline = time.monotonic() + 20
        while self.waiting[request.request_id]:
            assert time.monotonic() < deadline, "never loaded"
            plan = self.scheduler_guard.plan_step(partial(step_record, self.output({})))
            for shard in range(len(self.workers)):
                blocks = self.run_worker(shard, plan, {})[1]
                if blocks:
                    self.scheduler_guard.not_loaded(blocks)
                failed |= blocks
        del self.waiting[request.request_id]
        self.scheduler_guard.loaded(request.request_id)
        return failed

    def save(self, prompt: list[int], params: Any = None, *, step: int = 1000) -> Request:
        """A request whose prompt is computed; what its gathers still have to do is queued."""
        request = Request(f"request-{next(_numbers)}", prompt, params)
        assert self.admit(request) == set()
        request.loaded = request.num_computed
        while request.num_computed < len(prompt):
            self.step((request, min(step, len(prompt) - request.num_computed)))
        return request

    def run(self, prompt: list[int], params: Any = None, *, step: int = 1000) -> int:
        """A request from its question to its end, whose pages are right; how many of its tokens were loaded."""
        request = self.save(prompt, params, step=step)
        self.check_cache(request, len(prompt))
        self.finish(request)
        return int(request.loaded)

    def load(self, prompt: list[int], params: Any = None) -> int:
        """How many tokens of this prompt another request finds; they are what was computed."""
        request = Request(f"request-{next(_numbers)}", prompt, params)
        assert self.admit(request) == set()
        self.check_cache(request, request.num_computed)
        self.finish(request)
        return request.num_computed

    def preempt(self, request: Request) -> None:
        """Its blocks go to others; it waits for its turn again."""
        request.num_preemptions += 1
        self.free += request.block_ids
        request.block_ids, request.num_computed = [], 0

    def planned(self, *work: tuple[Request, int]) -> Any:
        """The scheduler half's plan of a step, which no worker has heard of."""
        return self.scheduler.plan_step(self.record({request.request_id: (request, count) for request, count in work}))

    def output(self, scheduled: dict[str, tuple[Request, int]]) -> Any:
        new = [
            SimpleNamespace(req_id=name, block_ids=(request.block_ids,), num_computed_tokens=request.num_computed)
            for name, (request, _) in scheduled.items()
        ]
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        counts = {name: count for name, (_, count) in scheduled.items()}
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: [scheduled[name][0].block_ids]),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )

    def record(self, scheduled: dict[str, tuple[Request, int]]) -> StepRecord:
        """The step, for the scheduler half itself."""
        return step_record(self.output(scheduled), self.scheduler)

    # ---- the workers' side ------------------------------------------------------------------

    def step(self, *work: tuple[Request, int]) -> Any:
        """One step of the engine that computes `count` tokens of each request; returns what its workers were told."""
        scheduled = {request.request_id: (request, count) for request, count in work}
        plan = self.scheduler_guard.plan_step(partial(step_record, self.output(scheduled)))
        results = [self.run_worker(shard, plan, scheduled)[1] for shard in range(len(self.workers))]
        self.failed = set().union(*results)
        if self.failed:
            self.scheduler_guard.not_loaded(self.failed)
        news = [told for guard in self.worker_guards if (told := guard.take_news()) is not None]
        if news:
            self.scheduler_guard.heard(news)
        for request, count in work:
            request.num_computed += count
        return plan

    def idle(self) -> None:
        """A step without tokens."""
        self.step()

    def run_worker(self, shard: int, plan: Any, scheduled: dict[str, tuple[Request, int]]) -> tuple[set[str], set[int]]:
        worker = self.worker_guards[shard]
        worker.begin(plan)
        try:
            if self.graphs and scheduled:
                self.replay(self.capture(shard, scheduled))
            else:
                self.forward(shard, scheduled)
        finally:  # as vLLM's first model runner does, whatever became of the forward pass
            worker.end_forward()
            finished, failed = worker.finished_loads()
            for request_id in finished:
                self.waiting[request_id].remove(shard)  # vLLM ends where it hears of one that does not wait
        if worker.has_news:
            self.scheduler_guard.switch_off("a worker half is off")
        return finished, failed

    def forward(self, shard: int, scheduled: dict[str, tuple[Request, int]]) -> None:
        for layer in self.layers[shard] if scheduled else ():
            if (shard, layer) == self.fails_at:
                raise ForwardFailed(f"layer {layer} of rank {shard}")
            for request, count in scheduled.values():
                self.compute(shard, layer, request, request.num_computed, request.num_computed + count)
            if not self.skip_hooks:
                self.worker_guards[shard].save_layer(f"layer.{layer}")

    def capture(self, shard: int, scheduled: dict[str, tuple[Request, int]]) -> list[Callable[[], None]]:
        """The step as a graph: the hooks are called now, and not when it is replayed."""
        graph = self.streams.captured = []
        self.forward(shard, scheduled)
        self.streams.captured = None
        return graph

    def replay(self, graph: list[Callable[[], None]]) -> None:
        for work in graph:
            self.streams.do(work)

    def compute(self, shard: int, layer: int, request: Request, start: int, end: int) -> None:
        blocks, tokens = list(request.block_ids), list(request.all_token_ids)
        work = partial(self._compute, shard, layer, blocks, tokens, start, end, self.weights)
        streams = self.by_rank[shard]
        if streams is None:
            work()
        else:
            streams.do(work)

    def _compute(
        self, shard: int, layer: int, blocks: list[int], tokens: list[int], start: int, end: int, weights: str
    ) -> None:
        for position in range(start, end):
            page = self.caches[shard][layer, blocks[position // BLOCK]]
            for at, head in enumerate(page):
                number = shard % self.ranks * self.heads // self.ranks + at
                head[position % BLOCK] = kv_bytes(tokens[: position + 1], layer, number, weights, self.head_bytes)

    def overwrite(self, blocks: list[int]) -> None:
        """Somebody else's work on these blocks, as their next owner's or as zeroing."""
        for block in blocks:
            self.streams.do(partial(self.caches[0][:, block].fill_, 0xEE))

    def check_cache(self, request: Request, end: int) -> None:
        """The engine's own pages hold what computing tokens [0, end) would have put there."""
        for streams in self.by_rank:
            if streams is not None:
                streams.synchronize()
        places = [(shard, layer) for shard, layers in enumerate(self.layers) for layer in layers]
        for (shard, layer), position in itertools.product(places, range(end)):
            page = self.caches[shard][layer, request.block_ids[position // BLOCK]]
            for at, head in enumerate(page):
                number = shard % self.ranks * self.heads // self.ranks + at
                tokens = request.all_token_ids[: position + 1]
                wanted = kv_bytes(tokens, layer, number, self.weights, self.head_bytes)
                assert torch.equal(head[position % BLOCK], wanted), f"token {position} of layer {layer}, head {number}"

    def finish(self, request: Request) -> dict[str, Any]:
        """The request is over; one more step tells the workers. What its answer says of its transfer and hints."""
        told = self.scheduler_guard.finished(request)
        self.free += request.block_ids
        self.idle()
        return told

    def hear(self) -> None:
        """Until the node has heard all that the halves have told it, and they all that it has answered so far."""
        for half in (self.scheduler, *self.workers):
            half.link.connection.call(Ping(), 30)

    @property
    def is_attached(self) -> bool:
        """Whether all halves are attached to a living node."""
        return all(half.link.is_attached for half in (self.scheduler, *self.workers))

    def close(self) -> None:
        for guard in (self.scheduler_guard, *self.worker_guards):
            guard.close()

    def __enter__(self) -> ToyEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Engines:
    """Makes engines of one node, with these settings beside their own; `close` ends them."""

    def __init__(self, node: Any, **settings: Any) -> None:
        self.node, self._settings = node, settings
        self.made: list[ToyEngine] = []

    def __call__(self, **settings: Any) -> ToyEngine:
        self.made.append(ToyEngine(self.node.address, f"toy-{len(self.made)}", **{**self._settings, **settings}))
        return self.made[-1]

    def close(self) -> None:
        for engine in self.made:
            engine.close()
