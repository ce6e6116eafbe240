"""The worker half: gathers final pages into slots layer by layer, and scatters loads into the engine's pages.

A `PageCopier` copies: on a CPU a hook returns when its copy is done, on a GPU when it is queued. Reports to the node
are queued behind the copies that they report (`PageCopier.after_copies`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from pdx.client.connection import Connection
from pdx.config import ConnectorConfig
from pdx.engine.copier import PageCopier
from pdx.engine.link import NodeLink
from pdx.engine.loader import Loader
from pdx.engine.pace import Pace
from pdx.engine.plan import LoadPlan, PagesPlan, SavePlan, StepPlan, WorkerNews
from pdx.engine.step_save import StepSave
from pdx.engine.streams import Streams
from pdx.engine.tally import Tally
from pdx.errors import GpuError, LayoutError, NodeUnavailable
from pdx.kernels.page_rows import page_rows
from pdx.memory.arena import Arena, populate_in_background
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.memory.share import Share
from pdx.memory.slot import Slot
from pdx.telemetry.trace import tracer_for
from pdx.wire.messages import VERSION, Abort, Hello

if TYPE_CHECKING:
    from pdx.engine.turning import Turning
    from pdx.kernels.turned_gpu import TurnedPages

START_UP_S = 20.0  # at start-up only
IDLE_WAIT_S = 0.03  # on a CPU, whose cores the load needs
GPU_IDLE_WAIT_S = 0.002
NEWS_SHARE = 0.2  # a pace that has changed by less is not reported


class WorkerHalf:
    """One per rank. All methods are called by the engine's model runner, on its thread.

    `layout`: see `SchedulerHalf`. `streams`: for copies; by default streams of the GPU that the KV cache is on.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KvLayout | Sequence[KvLayout],
        engine: str,
        rank: int,
        streams: Streams | None = None,
        *,
        ranks: int = 0,
        stage: int = 0,
    ) -> None:
        """`ranks`: per pipeline stage of the engine; 0: as many as shards. `stage`: of this rank; `layout` has that
        stage's cache groups. Raises LayoutError if these do not fit together."""
        self._groups = CacheGroups.of(layout)
        shards = self._groups.num_shards
        self._share = Share.of(rank, ranks or shards, shards)
        self._streams = streams
        self._layers: dict[str, tuple[int, int, int]] = {}  # number in the model, cache group, number in the group
        self._tracer = tracer_for(config.trace, f"{engine}/{stage * (ranks or shards) + rank}")
        # If several ranks read what one writes, or a stage may read what another one wrote, all use the node's first
        # arena, whichever GPU they compute on.
        gpu = _gpu_of(streams) if ranks <= shards and not self._groups.stages else ""
        share = self._share
        hello = Hello(
            VERSION,
            os.getpid(),
            "worker",
            engine=engine,
            shard=stage * shards + share.first,
            shards=share.count if share.writes else 0,
            role=config.role,
            gpu=gpu,
        )
        # Any process of an engine may be the first: workers come up before the scheduler half.
        self.link = NodeLink(config, hello, starter=rank == stage == 0)
        self.tally = tally = Tally()
        self._loader = Loader(self._groups, self._share, self._tracer, tally=tally, patience_s=config.transfer_wait_s)
        self._copier: PageCopier | None = None  # while there is a KV cache
        self._cache: tuple[Sequence[Sequence[torch.Tensor]], int] = (), 0  # by cache group; number of blocks
        self._turning: Turning | TurnedPages | None = None
        self._idle = True
        self._pace = Pace(self._groups.chunk_tokens)
        self._number = 0  # of this step
        self._has_news = False
        self._told_chunk_s = 0.0  # the pace that the scheduler half knows
        self._step = 0, 0  # tokens of this step, and when it began (CLOCK_MONOTONIC)
        self._saving: StepSave | None = None  # of this step, if its plan's node is still there
        self._spoiled: set[Slot] = set()  # a page of each was not saved, so they must not be sealed
        self._epoch = 0  # the node's life that these are of

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        group_of: Mapping[str, int] | None = None,
        turning: Turning | TurnedPages | None = None,
    ) -> None:
        """Register the engine's KV cache: one tensor [num_blocks x ratio, …] per layer, in layer order. `group_of`: the
        cache group of each layer, the first by default. `turning`: how tokens are loaded at other positions, a Turning
        for a CPU's cache and TurnedPages for a GPU's.

        :raises LayoutError: the tensors do not fit the layout, or are not all in one place.
        :raises GpuUnavailable: PDX cannot call the driver of their GPU.
        """
        layers: list[list[torch.Tensor]] = [[] for _ in self._groups]
        rows: dict[tuple[int, int], tuple[int, int, int]] = {}
        for name, tensor in kv_caches.items():
            group = group_of.get(name) if group_of is not None else 0
            if group is None:
                continue  # it shares the KV of an earlier layer
            # Layers that share KV have one address; but so do layers of several groups, which use different blocks.
            place = rows.setdefault((group, tensor.data_ptr()), (len(rows), group, len(layers[group])))
            self._layers[name] = place
            if place[2] == len(layers[group]):
                layers[group].append(tensor)
        for layout, of_group in zip(self._groups, layers, strict=True):
            if len(of_group) != layout.num_layers:
                raise LayoutError(f"{len(of_group)} layers with a KV cache, expected {layout.num_layers}")
        self._cache, self._turning = (layers, num_blocks), turning
        self._serve()
        self.link.wait_attached(START_UP_S)

    def _serve(self) -> None:
        self._copier = self._copier_for(*self._cache)
        self.link.serve(self._copier.use)

    def unregister(self) -> None:
        """The memory of the KV cache goes away, until `restore`. When this returns, no copy is in flight and no GPU
        memory is held. Saves in progress are given up; loads that are not whole fail. Idempotent."""
        self._loader.close()
        self._give_up()
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()
            self.link.withdraw()

    def restore(self) -> None:
        """The KV cache's memory is back at its old place, without its content. Idempotent."""
        if self._copier is None:
            has_node = self.link.is_attached
            self._serve()
            if has_node:
                self.link.wait_attached(START_UP_S)

    def _copier_for(self, layers: Sequence[Sequence[torch.Tensor]], num_blocks: int) -> PageCopier:
        devices = {tensor.device for of_group in layers for tensor in of_group}
        if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
            raise LayoutError(
                f"KV cache on {', '.join(sorted(map(str, devices)))}: PDX moves what is all in host memory or all on "
                "one NVIDIA GPU"
            )
        device = devices.pop()
        if device.type == "cpu" and self._streams is None:
            from pdx.engine.cpu_copier import CpuCopier  # needs Numba, and half a second to compile

            _populate([tensor for of_group in layers for tensor in of_group])
            blocks = [
                [[_block_rows(tensor, num_blocks, layout.page_bytes) for tensor in of_shard] for of_shard in of_group]
                for layout, of_group in zip(self._groups, self._by_shard(layers), strict=True)
            ]
            turning = cast("Turning | None", self._turning)
            return CpuCopier(blocks, self._groups, self._share, self.link, turning)
        from pdx.engine.gpu_copier import GpuCopier, page_map  # needs Triton, which not every CPU machine has

        pages = [
            [page_map(of_shard, num_blocks, layout.page_bytes) for of_shard in of_group]
            for layout, of_group in zip(self._groups, self._by_shard(layers), strict=True)
        ]
        turned = cast("TurnedPages | None", self._turning)
        return GpuCopier(pages, self._share, self._streams or Streams(device), self.link, turned)

    def _by_shard(self, layers: Sequence[Sequence[torch.Tensor]]) -> list[list[list[torch.Tensor]]]:
        """The layers of each cache group, cut by heads into the shards of this rank."""
        return [
            [
                [_heads(tensor, part, self._share.count, layout) for tensor in of_group]
                for part in range(self._share.count)
            ]
            for layout, of_group in zip(self._groups, layers, strict=True)
        ]

    # ---- each step --------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """A step starts: drop what is aborted, start its loads, prepare its saves."""
        self._idle = not plan.num_scheduled_tokens
        self._step = plan.num_scheduled_tokens, time.monotonic_ns()
        self._number = plan.number
        self._has_news = self._has_news or plan.awaits
        if (own := self._groups.renumbered) is not None and plan.saves:
            saves = [save.of_stage(own) for save in plan.saves]
            plan = msgspec.structs.replace(plan, saves=saves)
        self._give_up()
        if self._epoch != plan.epoch:
            self._epoch = plan.epoch
            self._spoiled.clear()
        connection, copier = self.link.connection, self._copier
        arena = _arena_of(connection, plan.epoch)
        if copier is None or connection is None or arena is None:
            self._miss(plan)
            return
        for load in plan.loads:
            scatter = copier.loading(arena) if load.epoch == plan.epoch else None
            if scatter is None:
                self._fail([load])
            else:
                self._loader.submit(load, scatter, connection, arena)
        if plan.aborts and self._share.writes:
            copier.after_copies(partial(connection.tell, Abort(self._aborted(plan))))
        if plan.saves and self._share.writes:
            self._saving = self._open(plan.saves, copier, connection, arena)

    def _miss(self, plan: StepPlan) -> None:
        """Copy nothing: the node is gone, or it promised these slots before this process could reach its arena."""
        self._fail(plan.loads)
        if not self._share.writes:
            return
        given_up = self._aborted(plan) + self._lose([pages for save in plan.saves for pages in save.pages])
        if given_up:
            self.link.give_back(plan.epoch, given_up)

    def _fail(self, loads: Sequence[LoadPlan]) -> None:
        self._loader.fail(loads)
        for load in loads:
            text = "request %s: its node is gone or its memory out of reach, %d chunks are not loaded"
            self.link.count("load_failed", text, load.request_id, load.num_chunks)

    def _aborted(self, plan: StepPlan) -> list[Slot]:
        aborted = [slot for slots in plan.aborts for slot in self._share.among(slots)]
        self._spoiled.difference_update(aborted)
        return aborted

    def _open(self, saves: list[SavePlan], copier: PageCopier, connection: Connection, arena: Arena) -> StepSave:
        wanted = [pages for save in saves for pages in save.pages]
        whole = [pages for pages in wanted if self._spoiled.isdisjoint(pages.slots_of(self._share))]
        taken = copier.begin(arena, whole)
        if len(taken) < len(wanted):
            kept = {id(pages) for pages in taken}
            self._spoil([pages for pages in wanted if id(pages) not in kept], copier, connection)
        return StepSave(
            saves,
            taken,
            self._groups,
            self._share,
            copier=copier,
            connection=connection,
            arena=arena,
            tally=self.tally,
            tracer=self._tracer,
        )

    def _spoil(self, lost: Sequence[PagesPlan], copier: PageCopier, connection: Connection) -> None:
        """These pages are not saved: give back the room of their chunks, behind the copies in flight."""
        slots = self._lose(lost)
        if slots:
            copier.after_copies(partial(connection.tell, Abort(slots)))

    def _lose(self, lost: Sequence[PagesPlan]) -> list[Slot]:
        """These pages are not saved, so their chunks will never be whole. Returns the chunks' slots."""
        if not lost:
            return []
        for pages in lost:
            if pages.completes:  # no more pages come for it
                self._spoiled.difference_update(pages.slots_of(self._share))
            else:
                self._spoiled.update(pages.slots_of(self._share))
        text = "%d chunks are not saved: their slots are not ours any more, or out of reach"
        self.link.count("save_skipped", text, len(lost), times=len(lost))
        return [slot for pages in lost for slot in pages.slots_of(self._share)]

    def _give_up(self) -> None:
        """Give up the last step if it was not finished: its forward pass failed, so its pages may hold anything."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.copier.end()  # gather no more, seal nothing
            self._spoil(saving.pages, saving.copier, saving.connection)

    def save_layer(self, name: str) -> None:
        """The pages of this layer that become final in this step are final now: gather them."""
        if self._saving is not None and (place := self._layers.get(name)) is not None:
            self._saving.gather(*place)

    def end_forward(self) -> None:
        """The forward pass is over: gather what no hook was called for, seal what is whole.

        An engine may call this in a `finally`, as vLLM's first model runner does. While an exception propagates, layers
        that no hook was called for were not computed, so the step is given up.
        """
        if sys.exc_info()[0] is not None:
            self._give_up()
            return
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if saving.finish():
            saving.copier.after_copies(partial(self._stepped, saving.connection, *self._step))
        else:
            self._spoil(saving.pages, saving.copier, saving.connection)

    def _stepped(self, connection: Connection, tokens: int, start_ns: int) -> None:
        """A step is computed and its saves are copied: update the pace, which the node weighs loads against."""
        self._pace.step(tokens, start_ns, time.monotonic_ns())
        connection.chunk_s = self._pace.chunk_s

    def finished_loads(self) -> tuple[set[str], set[int]]:
        """Requests whose load has ended since the last call, and the blocks that were not loaded.

        In a step without tokens this waits a moment for a load in flight: there is nothing else to do, and the engine's
        idle loop would take the core from the load thread. A GPU's copies need no core: new requests hardly wait.
        """
        if self._idle and self._copier is not None:
            self._loader.wait(GPU_IDLE_WAIT_S if self._copier.is_asynchronous else IDLE_WAIT_S)
        finished, failed = self._loader.take_finished()
        self._has_news = self._has_news or bool(finished)
        return finished, failed

    def take_news(self) -> WorkerNews | None:
        """What the scheduler half should know after this step; None: nothing new."""
        chunk_s = self._pace.chunk_s
        if not self._has_news and abs(chunk_s - self._told_chunk_s) <= NEWS_SHARE * self._told_chunk_s:
            return None
        self._has_news, self._told_chunk_s = False, chunk_s
        connection = self.link.connection
        load_s = connection.load_s if connection is not None else 0.0
        return WorkerNews(load_s, chunk_s, self._number)

    def close(self) -> None:
        """Wait for copies in flight, stop the threads and detach. Idempotent."""
        self._loader.close()
        self._give_up()
        if self._copier is not None:
            self._copier.close()
        self.link.close()
        if self._tracer is not None:
            self._tracer.close()


def _heads(tensor: torch.Tensor, part: int, count: int, layout: KvLayout) -> torch.Tensor:
    """Of pages [blocks, heads, tokens, content], the heads of one of the rank's `count` shards."""
    if count == 1:
        return tensor
    if tensor.dim() != 4 or tensor.shape[1] != layout.num_heads * count:
        raise LayoutError(
            f"KV cache: pages of shape {tuple(tensor.shape[1:])} cannot be cut into {count} shards of "
            f"{layout.num_heads} heads; set `shards` to the number of ranks, or leave it out"
        )
    return tensor.narrow(1, part * layout.num_heads, layout.num_heads)


def _block_rows(tensor: torch.Tensor, num_blocks: int, page_bytes: int) -> torch.Tensor:
    ratio, rest = divmod(tensor.shape[0], num_blocks)
    if rest or (ratio > 1 and not tensor.is_contiguous()):
        text = (
            ", some heads of each, which PDX cannot cut out of so many on a CPU: leave `shards` out"
            if ratio > 1
            else ""
        )
        raise LayoutError(f"KV cache: {tensor.shape[0]} pages over {num_blocks} blocks{text}")
    try:
        rows = page_rows(tensor.view(num_blocks, -1) if ratio > 1 else tensor)
    except ValueError as error:
        raise LayoutError(f"KV cache: {error}") from error
    found = rows.shape[1] * rows.element_size()
    if found != page_bytes:
        raise LayoutError(f"KV cache: pages of {found} bytes, expected {page_bytes}")
    return rows


def _populate(layers: Sequence[torch.Tensor]) -> None:
    """Fault in the cache's memory now, or the first loads would pay for it."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in layers}
    for address, tensor in storages.items():
        populate_in_background(address, tensor.untyped_storage().nbytes(), tensor)


def _arena_of(connection: Connection | None, epoch: int) -> Arena | None:
    """The arena of the node's life `epoch`; None if that is over."""
    if connection is None or connection.epoch != epoch:
        return None
    try:
        return connection.arena
    except NodeUnavailable:  # the link has closed it just now
        return None


def _gpu_of(streams: Streams | None) -> str:
    """The UUID of the GPU that this process computes on; empty: none that PDX can call.

    An engine selects its GPU before it makes a worker half.
    """
    try:
        if streams is None and torch.cuda.is_available():
            streams = Streams(torch.device("cuda", torch.cuda.current_device()))
        return streams.gpu().uuid if streams is not None else ""
    except GpuError:  # the copier says what is wrong, once there is a KV cache
        return ""
