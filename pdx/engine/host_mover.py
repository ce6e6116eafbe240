"""Pages in host memory, which the CPU copies: a gather is done when the hook returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from pdx.engine.mover import Action, Mover, Scatter
from pdx.engine.plan import LoadPlan, PagesPlan
from pdx.engine.rows import ArenaRows
from pdx.kernels.pages import PageCopy, gather, scatter
from pdx.memory.arena import Arena
from pdx.memory.layout import KvLayout

log = logging.getLogger("pdx")


class _Target(NamedTuple):
    """Pages of a chunk, the rows of its slot, and the engine's blocks they belong to (int64 [pages])."""

    pages: PagesPlan
    rows: torch.Tensor
    block_ids: torch.Tensor


class HostMover(Mover):
    """`layers` are the engine's blocks per layer, as rows [num_blocks, page_bytes / 16]."""

    is_asynchronous = False
    group_bytes = 0

    def __init__(
        self, layers: Sequence[torch.Tensor], layout: KvLayout, shard: int, count: Callable[[str], None]
    ) -> None:
        self._layers = layers
        self._layout = layout
        self._shard = shard
        self._count = count
        self._rows: ArenaRows | None = None  # replaced by the link's thread
        self._targets: list[_Target] = []
        self._num_gathered = 0

    def use(self, arena: Arena | None) -> None:
        """See `Mover.use`."""
        self._rows = ArenaRows(arena) if arena is not None and not arena.gpu else None
        if arena is not None and arena.gpu:
            log.error(
                "the KV cache is in host memory, but the node keeps its chunks on GPU %s: nothing is saved or loaded. "
                "Attach this engine to a node that was started without --gpu",
                arena.gpu,
            )
            self._count("arena_on_gpu")

    def begin(self, arena: Arena, pages: Sequence[PagesPlan], *, timed: bool) -> list[PagesPlan]:
        """See `Mover.begin`."""
        rows = self._rows_of(arena)
        self._num_gathered = 0
        self._targets = (
            [] if rows is None else [self._target(each, rows) for each in pages if self._is_ours(each, rows)]
        )
        return [target.pages for target in self._targets]

    def gather(self, layers: range) -> bool:
        """See `Mover.gather`."""
        gather([self._copy(target, layer) for layer in layers for target in self._targets])
        self._num_gathered += len(layers)
        return True

    def then(self, action: Action) -> None:
        """See `Mover.then`: everything is copied already."""
        action()

    def finish(self, missing: Sequence[range], *, computed: Callable[[int], None] | None, ended: Action) -> bool:
        """See `Mover.finish`."""
        if computed is not None:
            computed(self._num_gathered)
        for layers in missing:
            self.gather(layers)
        self._targets = []
        ended()
        return True

    def loading(self, arena: Arena) -> Scatter | None:
        """See `Mover.loading`."""
        rows = self._rows_of(arena)
        return None if rows is None else partial(self._load, rows)

    def close(self) -> None:
        """See `Mover.close`."""
        self._targets = []

    def _rows_of(self, arena: Arena) -> ArenaRows | None:
        rows = self._rows
        return rows if rows is not None and rows.arena is arena else None

    def _is_ours(self, pages: PagesPlan, rows: ArenaRows) -> bool:
        return rows.arena.is_current(pages.slot_of(self._shard))

    def _target(self, pages: PagesPlan, rows: ArenaRows) -> _Target:
        slot = rows.of(pages.slot_of(self._shard), self._layout.num_layers * pages.num_blocks)
        return _Target(pages, slot, torch.tensor(pages.block_ids, dtype=torch.int64))

    def _copy(self, target: _Target, layer: int) -> PageCopy:
        first = layer * target.pages.num_blocks + target.pages.first
        return PageCopy(target.rows[first : first + len(target.block_ids)], target.block_ids, self._layers[layer])

    def _load(self, rows: ArenaRows, load: LoadPlan) -> list[PagesPlan]:
        wanted = load.pages_of(self._shard)
        sources = [self._target(pages, rows) for pages in wanted if self._is_ours(pages, rows)]
        scatter([self._copy(source, layer) for source in sources for layer in range(len(self._layers))])
        arrived = {id(source.pages) for source in sources if self._is_ours(source.pages, rows)}
        return [pages for pages in wanted if id(pages) not in arrived]
