"""The worker half: gathers final pages into slots layer by layer, and scatters loads from a thread of its own.

Gathering runs inside the forward pass, right after a layer's attention, on the thread that computes: on a CPU the
copy is done when the hook returns. Loads are scattered by the load thread; torch's copies release the GIL.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from pdx.config import ConnectorConfig
from pdx.connection import Connection
from pdx.errors import LayoutError, NodeUnavailable
from pdx.kernels.pages import gather, page_rows
from pdx.layout import KvLayout
from pdx.memory import populate_in_background
from pdx.messages import VERSION, Abort, Fill, Hello, Mark, Slot
from pdx.timeline import Event
from pdx.vllm.link import NodeLink
from pdx.vllm.loader import Loader
from pdx.vllm.plan import PagesPlan, SavePlan, StepPlan
from pdx.vllm.rows import ArenaRows

log = logging.getLogger("pdx")

ATTACH_S = 20.0  # at start-up only
IDLE_WAIT_S = 0.01


class WorkerHalf:
    """One per rank. All methods are called by vLLM's model runner, on its thread."""

    def __init__(self, config: ConnectorConfig, layout: KvLayout, engine: str, shard: int) -> None:
        self._layout = layout
        self._shard = shard
        self._pages: list[torch.Tensor] = []  # per layer: rows [num_blocks, page_bytes / 16]
        self._layers: dict[str, int] = {}
        hello = Hello(VERSION, os.getpid(), "worker", engine=engine, shard=shard, role=config.role)
        # Any process of an engine may be the first: workers come up before the scheduler half.
        self._link = NodeLink(config, hello, starter=shard == 0)
        self._loader = Loader(layout, shard, self._link.count)
        self._idle = True
        self._saves: list[SavePlan] = []
        self._connection: Connection | None = None  # of this step, only if it is the one the plan is about
        self._rows: ArenaRows | None = None
        self._targets: list[tuple[PagesPlan, torch.Tensor, torch.Tensor]] = []  # with slot rows and block ids
        self._done_layers: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """The engine's KV cache: one tensor [num_blocks x ratio, …] per layer, in layer order.

        :raises LayoutError: the tensors are not what the layout says, or not in host memory.
        """
        devices = {tensor.device.type for tensor in kv_caches.values()}
        if devices != {"cpu"}:
            raise LayoutError(f"KV cache on {', '.join(sorted(devices))}: PDX moves only KV in host memory so far")
        rows: dict[int, int] = {}  # address -> layer; layers that share KV come with one address
        for name, tensor in kv_caches.items():
            layer = rows.setdefault(tensor.data_ptr(), len(rows))
            self._layers[name] = layer
            if layer == len(self._pages):
                self._pages.append(self._block_rows(name, tensor, num_blocks))
        if len(self._pages) != self._layout.num_layers:
            raise LayoutError(f"{len(self._pages)} layers with a KV cache, expected {self._layout.num_layers}")
        self._loader.pages = self._pages
        self._populate(kv_caches)
        if not self._link.wait_attached(ATTACH_S):
            log.warning("not attached to a node after %s s: running without PDX until one answers", ATTACH_S)

    @staticmethod
    def _populate(kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The cache's memory comes at its first touch: have it now, or loads pay for it."""
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in kv_caches.values()}
        for address, tensor in storages.items():
            populate_in_background(address, tensor.untyped_storage().nbytes(), tensor)

    def _block_rows(self, name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
        ratio, rest = divmod(tensor.shape[0], num_blocks)
        if rest or (ratio > 1 and not tensor.is_contiguous()):
            raise LayoutError(f"layer {name}: {tensor.shape[0]} pages over {num_blocks} blocks")
        blocks = tensor.view(num_blocks, -1) if ratio > 1 else tensor
        try:
            rows = page_rows(blocks)
        except ValueError as error:
            raise LayoutError(f"layer {name}: {error}") from error
        page_bytes = rows.shape[1] * rows.element_size()
        if page_bytes != self._layout.page_bytes:
            raise LayoutError(f"layer {name}: pages of {page_bytes} bytes, expected {self._layout.page_bytes}")
        return rows

    # ---- each step --------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """A step starts: let go of what is aborted, start its loads, look up where its saves go."""
        self._idle = not plan.num_scheduled_tokens
        self._done_layers.clear()
        self._saves = plan.saves
        self._targets = []
        connection = self._connection = self._current_connection(plan)
        if connection is None or self._rows is None:
            self._loader.fail(plan.loads)
            return
        self._loader.submit(plan.loads, self._rows, connection)
        if plan.aborts:
            connection.tell(Abort([slots[self._shard] for slots in plan.aborts]))
        self._targets = list(self._open_targets(plan.saves, self._rows))

    def _current_connection(self, plan: StepPlan) -> Connection | None:
        """The connection to the node that the plan is about, with its arena's rows; None if it is gone."""
        connection = self._link.connection
        if connection is None or connection.epoch != plan.epoch:
            return None
        try:
            arena = connection.arena
        except NodeUnavailable:  # the link has closed it just now
            return None
        if self._rows is None or self._rows.arena is not arena:
            self._rows = ArenaRows(arena)
        return connection

    def _open_targets(self, saves: list[SavePlan], rows: ArenaRows) -> Any:
        for save in saves:
            for pages in save.pages:
                slot = pages.slots[self._shard]
                if not rows.arena.is_current(slot):
                    log.warning("%s of request %s is not ours any more: not saved", slot, save.request_id)
                    self._link.count("save_skipped")
                    continue
                target = rows.of(slot, self._layout.num_layers * pages.num_blocks)
                yield pages, target, torch.tensor(pages.block_ids, dtype=torch.int64)

    def save_layer(self, name: str) -> None:
        """The pages of this layer that become final in this step are final now: gather them."""
        if self._targets:
            self._save(self._layers[name])

    def _save(self, layer: int) -> None:
        if layer in self._done_layers or self._connection is None:
            return
        self._done_layers.add(layer)
        for pages, target, block_ids in self._targets:
            first = layer * pages.num_blocks + pages.first
            gather(self._pages[layer], block_ids, target[first : first + len(block_ids)])
        filled = self._completed()
        if filled:
            self._connection.tell(Fill(filled, first_layer=layer))

    def _completed(self) -> list[Slot]:
        return [pages.slots[self._shard] for pages, _, _ in self._targets if pages.completes]

    def end_forward(self) -> None:
        """The forward pass is over: gather what no hook was called for, seal what is whole."""
        connection = self._connection
        if connection is None or not self._saves:
            return
        self._mark(connection, Event.PREFILL_END)
        if self._targets:
            missing = [layer for layer in range(self._layout.num_layers) if layer not in self._done_layers]
            for layer in missing:
                self._save(layer)
            sealed = self._completed()
            if sealed:
                connection.tell(Fill(sealed, layers=self._layout.num_layers, seal=True))
            if missing:
                log.debug("%d layers were gathered after the forward pass", len(missing))
        self._mark(connection, Event.SEALED)
        self._targets = []
        self._saves = []

    def _mark(self, connection: Connection, event: Event) -> None:
        """Tell the bytes of each transfer that were gathered by now, where its prefill ends in this step."""
        for save in self._saves:
            if save.transfer is None or not save.ends_transfer:
                continue
            pages = sum(len(plan.block_ids) for plan in save.pages)
            moved = save.blocks_before * self._layout.num_layers + pages * len(self._done_layers)
            nbytes, tokens = moved * self._layout.page_bytes, save.num_tokens
            connection.tell(Mark(save.transfer, event, time.monotonic_ns(), nbytes=nbytes, tokens=tokens))

    def finished_loads(self) -> tuple[set[str], set[int]]:
        """Requests whose load is over since the last call, and the blocks that were not loaded.

        In a step without tokens this waits a moment for a load under way: there is nothing else to do, and the
        engine's idle loop would take the core from the load thread.
        """
        if self._idle:
            self._loader.wait(IDLE_WAIT_S)
        return self._loader.take_finished()

    def close(self) -> None:
        """Stop the load thread and detach. Idempotent."""
        self._loader.close()
        self._targets = []
        self._rows = None
        self._link.close()

    @property
    def is_attached(self) -> bool:
        """Whether this half is attached to a living node."""
        return self._link.connection is not None
