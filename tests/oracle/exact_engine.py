"""vLLM's own `Scheduler` and `AsyncScheduler` with `PdxConnector`, both halves of it, around the toy of `exact_runner`.

Everything of an engine is real but for the model and its runner: tokens are those of `exact_model.answer`, or a byte of
the cache was wrong. Steps take a millisecond, and async scheduling, which no CPU engine of vLLM has, is covered.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Engines that tests start have this process's environment, so that it must be as it was.
with patch.dict(os.environ, {"VLLM_LOGGING_LEVEL": "ERROR"}), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    import torch
    from exact_config import DRAFTS, FOREIGN, MODEL_LEN, PDX, Shape, vllm_config
    from exact_hooks import FirstRunner, SecondRunner
    from exact_kinds import BLOCK, cache_config, known, of_stages
    from exact_model import Beside, Picture, answer
    from exact_releases import Cap, missing
    from exact_runner import NoWorker, Runner
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from pdx.vllm import connector, identity
    from pdx.vllm.connector import PdxConnector

from pdx.engine.copier import Scatter
from pdx.engine.params import parse_params
from pdx.engine.plan import PagesPlan
from pdx.engine.turns import Turns
from pdx.engine.weights import weights_digest

# vLLM is imported here first
__all__ = ["BLOCK", "FOREIGN", "PDX", "KVConnectorOutput", "LoRARequest", "Shape", "WorkerLoRAManager", "connector"]

DEPTH = 2  # steps under way with async scheduling
ATTACH_S = 30.0
GONE = 0xEEEEEEEEEEEEEEEE  # what the cache of an engine that sleeps holds
MAX_STEPS = 20_000  # until a request is called hung: an engine that waits steps a hundred times a second


@dataclass
class Faults:
    """What the loads of an engine suffer. `loses(number of the load)`: of the load's chunks, which are out of reach."""

    loses: Callable[[int], Callable[[int], bool]] = lambda load: lambda chunk: False
    loads: int = 0
    lost: int = 0  # loads

    def of_next_load(self) -> Callable[[int], bool]:
        self.loads += 1
        return self.loses(self.loads)

    def lose(self, chunks: Callable[[int], bool] = lambda chunk: chunk > 0, times: int = 1) -> None:
        """The next loads lose these chunks."""
        last = self.loads + times
        self.loses = lambda load: chunks if load <= last else lambda chunk: False


class LosingScatter(Scatter):
    """Copies what another one does, but for the chunks that the fault is about: they are out of its reach."""

    def __init__(self, inner: Scatter, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self._is_lost: Callable[[int], bool] | None = None
        self._numbers: dict[int, int] = {}  # of chunks, by their slot

    def copy(self, pages: Sequence[PagesPlan], layers: range) -> Sequence[PagesPlan]:
        if self._is_lost is None:
            self._is_lost = self._faults.of_next_load()
        numbers = [self._numbers.setdefault(each.slots[0].offset, len(self._numbers)) for each in pages]
        lost = [each for number, each in zip(numbers, pages, strict=True) if self._is_lost(number)]
        self._faults.lost += bool(lost)
        kept = [each for each in pages if all(each is not one for one in lost)]
        return [*lost, *self._inner.copy(kept, layers)]

    def close(self) -> None:
        self._inner.close()


class Engine:
    """One engine, in this process. Its caller steps it."""

    def __init__(self, name: str, model: Path, node: str, shape: Shape = Shape()) -> None:  # noqa: B008 - frozen
        self.name, self.model, self.shape = name, model, shape
        self.faults = Faults()
        self.outputs: dict[str, list[int]] = {}
        self.requests: dict[str, Any] = {}  # that are not finished
        self._prompts: dict[str, tuple[list[int], int]] = {}
        self._inputs: dict[str, tuple[Any, tuple[Picture, ...]]] = {}  # adapter and pictures of those that have some
        self._queue: deque[tuple[Any, Any]] = deque()
        self.meanwhile: Callable[[], None] = lambda: None  # when a step is over and its outcome is not taken yet
        self.observe: Callable[[Any], None] = lambda stats: None  # what a step says of itself
        self.preemptions = 0
        self.kind = shape.model_kind
        self.mixers = self.kind.mixers[: len(self.kind.mixers) - shape.draft_layers]
        torch.set_num_threads(1)
        config, cache = vllm_config(shape, name, model, node), cache_config(self.kind, shape.blocks, shape.ranks)
        whole, unit = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
        if hasattr(cache, "hash_block_size"):  # vLLM's engine sets it when it knows
            cache.hash_block_size = unit
        self._hasher = _block_hasher(unit)
        stages = shape.stages or (len(self.kind.mixers),)
        caches = of_stages(cache, stages)
        partition = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, stages))} if shape.stages else {}
        with (
            patch.object(connector, "attention_backend", lambda *_: "TOY"),
            patch.object(type(config.model_config), "get_total_num_hidden_layers", lambda _: len(self.mixers)),
            patch.object(type(config), "use_v2_model_runner", shape.runner == 2),
            patch.dict(os.environ, partition),
            patch.object(connector, "drafter_identity", lambda *_: shape.drafter),
            patch.object(identity, "weights_digest", lambda files: _digest(tuple(files))),
            patch.object(identity, "entry_points", lambda group: ()),  # which takes as long as all else
            set_current_vllm_config(config),
        ):
            workers = [[self._worker_of(*at, config, caches[at[0]]) for at in of_stage] for of_stage in self._places]
            self._workers = dict(zip(itertools.chain(*self._places), itertools.chain(*workers), strict=True))
            drafter = self._draft if shape.drafts else None
            self.runner = Runner(
                workers,
                self.kind,
                shape.blocks,
                shape.draft_layers,
                skips_hooks=lambda num_tokens: num_tokens <= shape.graphs,
                drafter=drafter,
                num_drafts=DRAFTS,
                weights=shape.weights,
                layers=stages,
                hooks=partial(SecondRunner, config=config) if shape.runner == 2 else FirstRunner,
            )
            self.scheduler = known(
                AsyncScheduler if shape.asynchronous else Scheduler,
                Scheduler,
                vllm_config=config,
                kv_cache_config=caches[0],
                structured_output_manager=StructuredOutputManager(config),
                block_size=whole,
                hash_block_size=unit,
                log_stats=True,
            )
        assert not (why := missing(shape)), why
        if shape.defers:
            assert self.scheduler.defer_block_free
            self.scheduler.defer_async_loads = True
        if shape.caps:
            self.scheduler.aux_output_connector = Cap(whole)
        if shape.content:  # a model of text alone has no encoder
            self.scheduler.max_num_encoder_input_tokens = MODEL_LEN
            self.scheduler.encoder_cache_manager = type(self.scheduler.encoder_cache_manager)(cache_size=MODEL_LEN)
        told = {place: worker.get_handshake_metadata() for place, worker in self._workers.items()}
        if None not in told.values():
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)
        first = self._workers[0, 0]
        if "faults" in vars(first):
            first.faults = self.faults
        self.pdx: Any = None
        if shape.has_pdx:
            self.pdx = self._pdx_of(self.scheduler.connector)
            self.worker_pdx = self._pdx_of(first)
            assert self.half.link.wait_attached(ATTACH_S), "not attached"
            self._lose_by_faults()

    @property
    def _places(self) -> list[list[tuple[int, int]]]:
        """(stage, rank) of each worker, by stage."""
        return [[(stage, rank) for rank in range(self.shape.ranks)] for stage in range(len(self.shape.stages) or 1)]

    def _worker_of(self, stage: int, rank: int, config: Any, cache: Any) -> Any:
        if self.shape.connector is None:
            return NoWorker()
        with patch.object(connector, "_place", lambda: (rank, stage)):
            return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)

    @staticmethod
    def _pdx_of(outer: Any) -> PdxConnector:
        found = [each for each in getattr(outer, "_connectors", [outer]) if isinstance(each, PdxConnector)]
        return found[0]

    @property
    def half(self) -> Any:
        """The scheduler half."""
        return self.pdx.scheduler._half

    @property
    def worker_half(self) -> Any:
        """The worker half."""
        return self.worker_pdx.worker._half

    def _lose_by_faults(self) -> None:
        for worker in self._workers.values():
            copier = self._pdx_of(worker).worker._half._copier
            copier.loading = partial(self._loading_with_faults, copier.loading)

    def _loading_with_faults(self, loading: Callable[[Any], Scatter | None], arena: Any) -> Scatter | None:
        scatter = loading(arena)
        return LosingScatter(scatter, self.faults) if scatter is not None else None

    def _draft(self, name: str, tokens: list[int], count: int) -> list[int]:
        """The tokens that will follow, but for the last ones of them: some are taken and some are not."""
        done = len(tokens) - len(self._prompts[name][0])
        right = self._answer(name, done + count)[done:]
        wrong_from = right[0] % (count + 1)
        return right[:wrong_from] + [token + 1 for token in right[wrong_from:]]

    # ---- requests ---------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        count: int,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
        lora: Any = None,
        pictures: Sequence[Picture] = (),
        priority: int = 0,
        session: Sequence[int] | None = None,
    ) -> None:
        """A request for `count` tokens; `params` are its `kv_transfer_params`, `lora` is vLLM's `LoRARequest`.
        `session`: it is an input of a streaming session of this name, which has these tokens by now."""
        parse_params(params)  # one that is refused runs without a transfer, and would test nothing
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, extra_args=extra)
        request = Request(
            name,
            list(prompt),
            sampling,
            None,
            cache_salt=salt,
            block_hasher=self._hasher,
            lora_request=lora,
            mm_features=[_feature(each) for each in pictures],
            priority=priority,
            resumable=session is not None,
        )
        if lora is not None or pictures:
            self._inputs[name] = lora, tuple(pictures)
        self.requests[name], self.outputs[name] = request, []
        self.scheduler.add_request(request)
        if request.num_prompt_tokens < len(prompt):  # states stop before the last token, which is the decode leg's
            is_prefill = bool(params and params.get("do_remote_decode"))
            assert (is_prefill, bool(self.shape.model_kind.state_block)) == (True, True)
            prompt = prompt[:-1]
        self._prompts[name] = [*(session or ()), *prompt], count

    def abort(self, name: str) -> None:
        """Its client is gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._forget(name)

    def _forget(self, name: str) -> None:
        request = self.requests.pop(name, None)
        self.preemptions += request.num_preemptions if request is not None else 0

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._queue) or self.scheduler.has_requests()

    def step(self) -> list[str]:
        """As EngineCore.step, or step_with_batch_queue; the requests that have finished."""
        if self.scheduler.has_requests():
            planned = self.scheduler.schedule()
            self._queue.append((planned, self.runner.start(planned)))
            depth = DEPTH if self.shape.asynchronous else max(1, len(self.shape.stages))
            if len(self._queue) < depth and (planned.total_num_scheduled_tokens or self.scheduler.has_requests()):
                return []
        return self._take(*self._queue.popleft()) if self._queue else []

    def _take(self, planned: Any, end: Callable[[], Any]) -> list[str]:
        finished, output = [], end()
        self.meanwhile()  # as vLLM takes aborts there
        for outputs in self.scheduler.update_from_output(planned, output).values():
            self.observe(outputs.scheduler_stats)
            for each in outputs.outputs:
                self.outputs.setdefault(each.request_id, []).extend(each.new_token_ids)
                if each.finish_reason is not None:
                    finished.append(each.request_id)
                    self._forget(each.request_id)
        if self.runner.drafts is not None and not self.shape.asynchronous:
            self.scheduler.update_draft_token_ids(self.runner.drafts)
        return finished

    # ---- sleep ------------------------------------------------------------------------------

    def sleep(self, *, keeps: bool = False) -> None:
        """As EngineCore.sleep, of the modes "abort" and "keep": nobody may touch the cache from then on, which is not
        where it was. Steps until nothing is under way."""
        if not keeps:
            for name in list(self.requests):
                self.abort(name)
            self.run()
        while self._queue:
            self._take(*self._queue.popleft())
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        for worker in self._workers.values():
            worker.unregister_kv_caches()
        for raw in self.runner.pages.raws:
            raw[:] = GONE

    def wake_up(self, weights: int = 0) -> None:
        """With these, which may be other ones."""
        is_gone = all((raw == GONE).all() for raw in self.runner.pages.raws)
        assert is_gone, "something was written to the cache of an engine that sleeps"
        self.runner.weights = weights
        for raw in self.runner.pages.raws:
            raw[:, 0] = 0
        for worker in self._workers.values():
            worker.restore_kv_caches()

    # ---- what tests want --------------------------------------------------------------------

    def run(self, *names: str, each: Callable[[int], None] = lambda step: None) -> None:
        """Step until these are finished; all, if none is named.

        :raises AssertionError: they are hung.
        """
        for number in range(MAX_STEPS):
            if not (set(names) & set(self.requests) if names else self.is_busy):
                return
            self.step()
            each(number)
        raise AssertionError(f"hung: { {name: one.status.name for name, one in self.requests.items()} }")

    def ask(self, name: str, prompt: Sequence[int], count: int, **settings: Any) -> None:
        """One request from its arrival to its end, whose answer must be right."""
        self.add(name, prompt, count, **settings)
        self.run(name)
        self.check(name)

    def wrong(self, name: str) -> str:
        """What is wrong with the answer; empty: nothing."""
        prompt, count = self._prompts[name]
        want, got = self._answer(name, count), self.outputs[name]
        if got == want:
            return ""
        pairs = enumerate(zip(got, want, strict=False))
        at = next((index for index, (one, other) in pairs if one != other), min(len(got), len(want)))
        return f"{name} on {self.name}: prompt of {len(prompt)}, token {at}: {got[at : at + 3]} for {want[at : at + 3]}"

    def _answer(self, name: str, count: int) -> list[int]:
        lora, pictures = self._inputs.get(name, (None, ()))
        adapter = self.runner.adapters[lora.lora_int_id] if lora is not None else 0
        beside = Beside(self.runner.weights, adapter, pictures)
        return answer(self._prompts[name][0], count, self.mixers, beside)

    def check(self, *names: str) -> None:
        """:raises AssertionError: an answer is wrong."""
        found = [wrong for name in names or list(self.outputs) if (wrong := self.wrong(name))]
        assert not found, "; ".join(found)

    def taken(self, name: str) -> list[int]:
        """The answer of a request that is over, which is forgotten."""
        del self._prompts[name]
        self._inputs.pop(name, None)
        return self.outputs.pop(name)

    def leftovers(self) -> Iterator[str]:
        """What should not be there while the engine has no request: nothing."""
        pool = self.scheduler.kv_cache_manager.block_pool
        if (missing := self.shape.blocks - 1 - pool.get_num_free_blocks()) != 0:
            yield f"{missing} blocks are not free"
        if any(raw[:, 0].any() for stage in self.runner.stages for raw in stage.pages.raws):
            yield "the null block was written, which is no request's"
        torn = sum(stage.pages.torn for stage in self.runner.stages)
        if torn and not self.shape.beside:  # a load that fails may leave pages as they were
            yield f"{torn} torn reads"
        if self.pdx is not None:
            yield from self._leftovers_of_pdx()

    def _leftovers_of_pdx(self) -> Iterator[str]:
        for name, table in vars(self.half).items():
            if isinstance(table, Counter):
                table = +table
            if isinstance(table, dict | set | list | deque | Turns) and table:
                yield f"SchedulerHalf.{name}: {len(table)}"
        if self.pdx.scheduler.is_off or any(self._pdx_of(each).worker.is_off for each in self._workers.values()):
            yield "PDX is switched off"

    def close(self) -> None:
        """Stop its threads, and detach from the node."""
        for worker in self._workers.values():
            worker.shutdown()
        if self.shape.connector is not None:
            self.scheduler.connector.shutdown()


@lru_cache
def _digest(files: tuple[Path, ...]) -> bytes:
    return weights_digest(files)


@lru_cache
def _block_hasher(unit: int) -> Any:
    """:param unit: tokens of a hash."""
    kv_cache_utils.init_none_hash(sha256)
    return kv_cache_utils.get_request_block_hasher(unit, sha256)


def _feature(picture: Picture) -> Any:
    data = MultiModalFieldElem(data=torch.tensor(picture.content), field=MultiModalBatchedField())
    place = PlaceholderRange(offset=picture.offset, length=picture.length)
    item = MultiModalKwargsItem({"pixels": data})
    return MultiModalFeatureSpec(item, "image", picture.called, place, mm_hash=picture.called)


def tokens(count: int, seed: Any) -> list[int]:
    """Some tokens, the same for the same seed."""
    drawn = random.Random(str(seed))
    return [drawn.randrange(100, 1000) for _ in range(count)]


def run_together(*engines: Engine) -> None:
    """In turns, until none has requests any more."""
    while any(engine.requests for engine in engines):
        for engine in engines:
            engine.step()


def check_nothing_left(engines: Iterable[Engine]) -> None:
    """:raises AssertionError: something is left of requests that are over."""
    left = [f"{engine.name}: {what}" for engine in engines for what in engine.leftovers()]
    assert not left, "; ".join(left)
