"""`PdxConnector`: vLLM's KV connector interface, on top of the scheduler half and the worker half.

    --kv-transfer-config '{"kv_connector": "PdxConnector", "kv_connector_module_path": "pdx.vllm.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

The same configuration serves prefill, decode and plain prefix reuse; the role is per request. The interface is
documented in vllm/distributed/kv_transfer/kv_connector/v1/base.py; `pdx.vllm.releases` has all differences of releases.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from pdx.config import ConnectorConfig, connector_config
from pdx.engine.guard import SchedulerGuard, WorkerGuard
from pdx.engine.plan import StepPlan, WorkerNews
from pdx.engine.scheduler import SchedulerHalf
from pdx.engine.worker import WorkerHalf
from pdx.errors import ConfigError, LayoutError
from pdx.vllm.adapters import Adapter, Claim, LoadedAdapters, watch
from pdx.vllm.content import Content
from pdx.vllm.identity import (
    attention_backend,
    check_no_state,
    drafter_identity,
    drafts_of,
    facts_of,
    layer_number,
    layouts_of,
    model_identity,
    naming_of,
    parts_of,
    why_unnamed,
)
from pdx.vllm.metrics import PdxMetrics, PdxStats, by_source, stats_of
from pdx.vllm.releases import check_nested, check_release, moves_groups, reports_blocks, tell_of_sleep
from pdx.vllm.stages import cut_of
from pdx.vllm.step import limits_of, step_record

if TYPE_CHECKING:
    from pdx.engine.turning import Turning
    from pdx.kernels.turned_gpu import TurnedPages

ATTACH_S = 5.0  # at start-up only
_INSIDE = "PdxConnector is inside another connector"
log = logging.getLogger("pdx.vllm")


class PdxMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's plan for the workers. `adapters`: the adapter of each request in it that has one, by request id."""

    def __init__(self, plan: StepPlan, adapters: dict[str, Claim]) -> None:
        self.plan = plan
        self.adapters = adapters


class PdxHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The facts about the layout that only a worker knows, sent to the scheduler half at start-up."""

    def __init__(self, backend: str, order: str, layers: list[list[int]], not_moved: str = "") -> None:
        """`layers`: in a pipeline, the numbers of this stage's layers for each of vLLM's groups; else empty.
        `not_moved`: why tokens cannot be loaded at other positions; empty: they can."""
        self.backend = backend
        self.order = order
        self.layers = layers
        self.not_moved = not_moved


class PdxWorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker halves report to the scheduler half after a step. `is_off`: one is off and loads nothing more.
    `adapters`: the digest of each that was loaded; empty: unknown, or different between workers."""

    def __init__(self, news: list[WorkerNews], *, is_off: bool, adapters: dict[Adapter, str]) -> None:
        self.news = news
        self.is_off = is_off
        self.adapters = adapters

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, PdxWorkerNews)
        adapters = self.adapters | other.adapters
        for adapter in self.adapters.keys() & other.adapters.keys():
            adapters[adapter] = self.adapters[adapter] if self.adapters[adapter] == other.adapters[adapter] else ""
        return PdxWorkerNews(self.news + other.news, is_off=self.is_off or other.is_off, adapters=adapters)


# Without `SupportsHMA` vLLM puts all layers into one group where it can.
_BASES: tuple[Any, ...] = (KVConnectorBase_V1, SupportsHMA) if moves_groups() else (KVConnectorBase_V1,)


class PdxConnector(*_BASES):  # type: ignore[misc]
    """One half of the connector: the one that `role` asks for. After start-up no hook raises (`pdx.engine.guard`)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _join_log()
        transfer = vllm_config.kv_transfer_config
        config = _checked_config(transfer)
        check_release(any_release=config.any_release)
        # Only the scheduler half makes keys: the workers need not read samples of the weights.
        is_scheduler = role is KVConnectorRole.SCHEDULER
        model = self._name_model(vllm_config) if is_scheduler else ""
        self._cut = cut_of(vllm_config, config.stages)
        self._layouts_of = partial(
            layouts_of,
            vllm_config,
            kv_cache_config,
            config.chunk_tokens,
            model=model,
            shards=config.shards,
            cut=self._cut,
        )
        self.groups = groups = self._layouts_of()
        drafter = drafter_identity(vllm_config) if is_scheduler else ""
        self._drafts = drafts_of(vllm_config, kv_cache_config, groups, drafter=drafter, shards=config.shards)
        self._own_parts, self._draft_parts = parts_of(vllm_config, kv_cache_config)
        self._config, self._engine = config, transfer.engine_id
        # Windows and states cannot use a part of a load: vLLM is told of failed requests then, not of failed blocks.
        has_one_group = groups.is_single and len(kv_cache_config.kv_cache_groups) == 1  # in vLLM, too
        self._reports_blocks = reports_blocks() and has_one_group
        self._facts = facts_of(vllm_config, stops_short=groups.has_state) if is_scheduler else None
        self._content = Content(vllm_config, has_state=groups.has_state) if is_scheduler else None
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._failed_blocks: set[int] = set()
        self._blocks: Any = None  # vLLM's block pool, if vLLM shows it
        # With micro-batches each batch runs every layer, in a thread of its own. A layer's hook does not mean then that
        # its pages are final, so hooks are ignored and all layers are gathered at the end of the step.
        self._has_hooks = not vllm_config.parallel_config.use_ubatching
        self._is_nested = _is_nested(transfer)
        if self._is_nested and not has_one_group:
            kinds = ", ".join(sorted({each.kind for each in groups}))
            stages = f", its layers cut into {self._cut.text}" if self._cut.text else ""
            raise ConfigError(
                f"PdxConnector inside another connector, and a model of {len(groups)} cache groups ({kinds}){stages}: "
                "that is possible with one group of full attention only so far; use PdxConnector alone"
            )
        self._backend = ""
        self._not_moved = ""  # why tokens are not loaded at other positions
        self._scheduler: SchedulerGuard | None = None  # once the workers have reported their layout facts
        self._worker: WorkerGuard | None = None
        if not is_scheduler:
            rank, stage = _place()
            if self._cut.text:
                self._cut.check_stage(stage, [number for of_group in self._layers for number in of_group])
            ranks = vllm_config.parallel_config.tensor_parallel_size
            all_groups = groups.beside(self._drafts)
            self._worker = WorkerGuard(WorkerHalf(config, all_groups, self._engine, rank, ranks=ranks, stage=stage))
        self._loaded = LoadedAdapters()
        if not is_scheduler and getattr(vllm_config, "lora_config", None) is not None:
            watch(self._loaded)
        if not is_scheduler and vllm_config.model_config.enable_sleep_mode:
            tell_of_sleep(self)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Require none. Models that PDX cannot move are refused here, before vLLM fails to group their layers."""
        check_no_state(vllm_config.model_config)
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """Blocks are free as soon as they are gathered: no delivery depends on them."""
        return False

    @property
    def scheduler(self) -> SchedulerGuard:
        """The scheduler half; only in the process that has it."""
        if self._scheduler is None:  # no worker has reported: this connector is inside another one
            self._start_scheduler([])
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _names(self) -> Content:
        """Content names of requests' inputs other than tokens; only in the scheduler half's process."""
        assert self._content is not None
        return self._content

    @property
    def worker(self) -> WorkerGuard:
        """The worker half; only in the processes that have it."""
        assert self._worker is not None
        return self._worker

    def _name_model(self, config: Any) -> str:
        load_format = config.load_config.load_format
        model = model_identity(config.model_config, load_format)
        self._unnamed = why_unnamed(config.model_config, load_format, config.cache_config)
        # Without content names, chunks are private to this run of this engine.
        return f"{model}-{secrets.token_hex(8)}" if self._unnamed else model

    @property
    def _layers(self) -> list[list[int]]:
        """The layer numbers of this process's pipeline stage, for each of vLLM's groups."""
        names = {part.table: part.names for part in self._own_parts}
        return [list(map(layer_number, names.get(table, ()))) for table in range(self.groups.num_tables)]

    def _start_scheduler(self, told: Sequence[PdxHandshake]) -> None:
        if self.groups.is_part and told:
            stages = [each.layers for each in told]
            layers = [sorted(set(itertools.chain(*of_group))) for of_group in zip(*stages, strict=True)]
            self.groups = self._layouts_of(layers=layers)
        if self.groups.is_part:
            raise LayoutError("the workers of the pipeline's stages have not told which layers they have")
        backends = "+".join(sorted({name for each in told for name in each.backend.split("+")}))
        orders = "+".join(sorted({each.order for each in told}))
        backend, order = backends or self.groups[0].backend, orders or self.groups[0].order
        layouts, drafts = (
            groups and groups.with_fields(backend=backend, order=order) for groups in (self.groups, self._drafts)
        )
        assert layouts is not None
        naming = naming_of(self._vllm_config) if self.groups.is_single else None
        limits = limits_of(self._vllm_config.scheduler_config)
        half = SchedulerHalf(
            *(self._config, layouts, self._engine, self._names, self._facts, naming, limits),
            names_transfers=bool(told),
            drafts=drafts,
            not_moved=next((each.not_moved for each in told if each.not_moved), "" if told else _INSIDE),
        )
        if told:  # start-up: the first request may come at once. Without a node, the workers have waited already.
            half.link.wait_attached(ATTACH_S)
        self._scheduler = SchedulerGuard(half, layouts[0].block_tokens)
        if self._unnamed:
            text = "chunks of this engine are found by no other one, nor by itself when it starts again: %s"
            self._scheduler.count("unnamed_weights", text, self._unnamed)

    # ---- scheduler side ---------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]) -> None:
        # A connector inside another one gets none (`get_handshake_metadata`).
        self._start_scheduler([each for each in metadata.values() if isinstance(each, PdxHandshake)])

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same, with metadata of all ranks of all pipeline stages."""
        self.set_xfer_handshake_metadata(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._blocks = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)  # asynchronous: vLLM publishes blocks of synchronous loads before they are loaded

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(sorted({place.table for place in self.groups.beside(self._drafts).places}))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if getattr(self._vllm_config.scheduler_config, "policy", "") == "priority" and self._blocks is not None:
            self._withdraw(scheduler_output.preempted_req_ids or ())
        plan = self.scheduler.plan_step(partial(step_record, scheduler_output))
        claims = self._names.claims
        if not claims:  # no request has an adapter
            return PdxMetadata(plan, {})
        copied = {each.request_id for each in plan.saves} | {each.request_id for each in plan.loads}
        return PdxMetadata(plan, {name: claims[name] for name in copied & claims.keys()})

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Called by vLLM 0.32 and newer."""
        return by_source(self.scheduler.sources(request)) if num_external_tokens else {}

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, PdxWorkerNews) and told.is_off:
            self.scheduler.switch_off("a worker half is off")
        if isinstance(told, PdxWorkerNews) and self._names.heard(told.adapters):
            self._evict(range(self._num_blocks))
        if failed := getattr(connector_output, "invalid_block_ids", None):
            self._evict(self.scheduler.not_loaded(failed))  # vLLM leaves them in its cache until they are recomputed
        for request_id in getattr(connector_output, "failed_recving", None) or ():
            self.scheduler.load_failed(request_id)
        if isinstance(told, PdxWorkerNews) and told.news:
            self.scheduler.heard(told.news)
        for request_id in connector_output.finished_recving or ():
            self.scheduler.loaded(request_id)

    def _withdraw(self, preempted: Iterable[str]) -> None:
        """With priorities vLLM may preempt a request that already has a place in this step. It leaves the blocks that
        the step would have filled in its cache, under their hashes: no later step may find them there."""
        drafts = 2 * getattr(self._vllm_config.speculative_config, "num_speculative_tokens", 0)  # and as many ahead
        for request_id in preempted:
            hashes = self.scheduler.withdrawn(request_id, drafts)
            for block_hash, table in itertools.product(hashes, range(self.groups.num_tables)):
                while found := self._blocks.get_cached_block(block_hash, [table]):
                    self._evict(block.block_id for block in found)

    def _evict(self, blocks: Iterable[int]) -> None:
        """Evict these from vLLM's own prefix cache, in use or not. Other connectors may report unknown ids."""
        if self._blocks is not None:
            self._blocks.evict_blocks({block for block in blocks if 0 <= block < self._num_blocks})

    def get_kv_connector_stats(self) -> PdxStats | None:
        half = self._scheduler or self._worker
        return stats_of(half.tally) if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdxStats:
        return PdxStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, engines: Any) -> PdxMetrics:
        return PdxMetrics(vllm_config, metric_types, labelnames, engines)

    def reset_cache(self) -> bool:
        self.scheduler.reset()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        told = self.scheduler.finished(request)
        if self._names.forget(request.request_id):
            self._evict(block for of_group in block_ids for block in of_group)
        return False, told or None

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_unsent_plans()

    def take_events(self) -> Iterable[Any]:
        return ()

    # ---- worker side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._backend = attention_backend(self._vllm_config, self._kv_cache_config)
        number_of = {
            name: self._cut.number_of(part.table, layer_number(name) if self._cut.text else 0)
            for part in self._own_parts
            for name in part.names
        }
        if self._drafts is not None:
            for part, place in zip(self._draft_parts, self._drafts.places, strict=True):
                number_of.update(dict.fromkeys(part.names, place.number))
        by_number = self.groups.beside(self._drafts).by_number
        group_of = {name: by_number[number] for name, number in number_of.items()}
        if self._cut.text:
            kv_caches = dict(sorted(kv_caches.items(), key=lambda each: layer_number(each[0])))
        self.worker.register(kv_caches, self._num_blocks, group_of, self._turning([*kv_caches.values()]))

    def _turning(self, layers: Sequence[torch.Tensor]) -> Turning | TurnedPages | None:
        """How tokens are loaded at other positions; None: they are not."""
        if not self._config.moved:
            return None
        from pdx.vllm.turning import turning_of

        try:
            return turning_of(self._vllm_config, self.groups, self._backend, layers, self._num_blocks)
        except LayoutError as error:
            self._not_moved = str(error)
            log.warning("requests with the hint `reuse: moved` are refused: %s", error)
            return None

    def unregister_kv_caches(self) -> None:
        """The engine goes to sleep: vLLM unmaps the cache's memory, and maps other memory in its place later."""
        self.worker.unregister()

    def restore_kv_caches(self) -> None:
        """The engine has woken up, at least so far that it has a KV cache again."""
        self.worker.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        # MultiConnector would pass it to its other children, and NixlConnector rejects metadata that is not its own.
        if self._is_nested or self._worker is None:
            return None
        layers = self._layers if self.groups.is_part else []
        return PdxHandshake(self._backend, self.groups[0].order, layers, self._not_moved)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Loads start here, before the forward pass of the step: vLLM calls start_load_kv only after it.
        plan, lost = self._loaded.checked(connector_metadata.plan, connector_metadata.adapters)
        if lost:
            text = "chunks of LoRA requests are not shared: their adapter was loaded from other files than it has now"
            self.worker.count("adapter_changed", text, times=lost)
        self.worker.begin(plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """No-op: `bind_connector_metadata` has started the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: no request runs while its load is in flight (ADR 11)."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._has_hooks:
            self.worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self.worker.end_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished, self._failed_blocks = self.worker.finished_loads()
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if not self._reports_blocks:
            results.failed_recving = self.worker.failed_loads()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed if self._reports_blocks else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        news = self.worker.take_news()
        is_off, adapters = self.worker.has_news, self._loaded.take_news()
        if not (news or is_off or adapters):
            return None
        return PdxWorkerNews([news] if news else [], is_off=is_off, adapters=adapters)

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()


# When it aggregates stats, MultiConnector looks up its children's classes by name; a missing one ends the server.
with contextlib.suppress(ValueError):  # already registered
    KVConnectorFactory.register_connector("PdxConnector", __name__, "PdxConnector")


def _join_log() -> None:
    """Send PDX's log where vLLM's own goes, at the same level, unless logging of `pdx` was configured."""
    ours = logging.getLogger("pdx")
    if ours.level == logging.NOTSET and not ours.hasHandlers():
        ours.parent = logging.getLogger("vllm")


def _checked_config(transfer: Any) -> ConnectorConfig:
    config = connector_config(transfer.kv_connector_extra_config)
    if transfer.kv_role != "kv_both":
        raise ConfigError(f'kv_role is {transfer.kv_role!r}: PdxConnector needs "kv_both"; the role is per request')
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: PdxConnector needs "
            '"recompute", so that a fault in the cache costs time and never an answer'
        )
    return config


def _is_nested(transfer: Any) -> bool:
    """Whether this connector is a child of another one, such as MultiConnector; only workers can tell. Raises
    ConfigError if vLLM would handle failed loads by the other connector's policy."""
    current = get_current_vllm_config_or_none()
    outer = current.kv_transfer_config if current is not None else None
    if outer is None or outer.kv_connector == transfer.kv_connector:
        return False
    if outer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {outer.kv_load_failure_policy!r} for {outer.kv_connector}: vLLM looks at that "
            'one and not at what stands beside PdxConnector inside it; PdxConnector needs "recompute" there, too'
        )
    check_nested()
    return True


def _place() -> tuple[int, int]:
    """The tensor parallel rank, and the pipeline stage, of this worker."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()), int(get_pp_group().rank_in_group)
