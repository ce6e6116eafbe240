"""Copies pages in host memory by the CPU: when a hook returns, its gather is done, and so are all before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pdx.engine.copier import Action, PageCopier, Scatter
from pdx.engine.link import NodeLink
from pdx.engine.plan import PagesPlan
from pdx.engine.turning import Turning
from pdx.errors import LayoutError
from pdx.kernels.page_rows import page_rows
from pdx.kernels.pages import PageCopy, gather, scatter
from pdx.memory.arena import Arena
from pdx.memory.layout import CacheGroups
from pdx.memory.share import Share

log = logging.getLogger("pdx.engine")


class _Target(NamedTuple):
    """Pages of one shard of a chunk, the rows of its slot, and the engine's blocks they belong to (int64 [pages]).
    `part`: which of the rank's shards it is."""

    pages: PagesPlan
    part: int
    rows: torch.Tensor
    block_ids: torch.Tensor


class CpuCopier(PageCopier):
    """The copier of a CPU. `layers`: by cache group and shard of the rank, the engine's blocks of each layer as rows
    [num_blocks, page_bytes / 16]."""

    is_asynchronous = False

    def __init__(
        self,
        layers: Sequence[Sequence[Sequence[torch.Tensor]]],
        groups: CacheGroups,
        share: Share,
        link: NodeLink,
        turning: Turning | None = None,
    ) -> None:
        """`turning`: what loads tokens at other positions; None: nothing does."""
        self._layers = layers
        self._turning = turning
        if turning is not None:
            turning.warm_up()
        # The same pages, by shard of the rank and layer, as elements that can be turned.
        self._elements = [[turning.pages(rows) for rows in of_shard] for of_shard in layers[0]] if turning else []
        self._groups = groups
        self._share = share
        self._link = link
        # Replaced by the link's thread. The tensor has all bytes of the arena and keeps the mapping alive, also beyond
        # the node's life.
        self._mapped: tuple[Arena, torch.Tensor] | None = None
        self._targets: list[_Target] = []

    def use(self, arena: Arena | None) -> None:
        is_ours = arena is not None and not arena.gpu
        self._mapped = (arena, torch.frombuffer(arena.data, dtype=torch.uint8)) if arena and is_ours else None
        if arena is not None and arena.gpu:
            log.error(
                "the KV cache is in host memory, but the node keeps its chunks on GPU %s: nothing is saved or loaded. "
                "Attach this engine to a node that was started without --gpu",
                arena.gpu,
            )
            self._link.count("arena_on_gpu")

    def begin(self, arena: Arena, pages: Sequence[PagesPlan]) -> list[PagesPlan]:
        data = self._bytes_of(arena)
        self._targets = [] if data is None else self._targets_of(pages, arena, data)
        return [target.pages for target in self._targets if not target.part]

    def gather(self, group: int, layers: range) -> bool:
        targets = [target for target in self._targets if target.pages.group == group]
        gather([self._copy(target, layer) for layer in layers for target in targets])
        return True

    def copied(self) -> Callable[[], bool]:
        return lambda: True

    def after_copies(self, action: Action) -> None:
        action()

    def after_compute(self, action: Action) -> bool:
        action()
        return True

    def end(self) -> None:
        self._targets = []

    def loading(self, arena: Arena) -> Scatter | None:
        data = self._bytes_of(arena)
        return None if data is None else Scatter(self, (arena, data))

    def close(self) -> None:
        self._targets = []

    def _bytes_of(self, arena: Arena) -> torch.Tensor | None:
        mapped = self._mapped
        return mapped[1] if mapped is not None and mapped[0] is arena else None

    def _targets_of(self, pages: Sequence[PagesPlan], arena: Arena, data: torch.Tensor) -> list[_Target]:
        """The targets of pages whose slots are still the promised ones; such slots lie within the arena."""
        targets = []
        for each in pages:
            slots = each.slots_of(self._share)
            if not all(map(arena.is_current, slots)):
                continue
            block_ids = torch.tensor(each.block_ids, dtype=torch.int64)
            for part, slot in enumerate(slots):
                found = data[slot.offset : slot.offset + slot.nbytes]
                rows = page_rows(found.view(self._groups[each.group].num_layers * each.num_blocks, -1))
                targets.append(_Target(each, part, rows, block_ids))
        return targets

    def _copy(self, target: _Target, layer: int) -> PageCopy:
        layers = self._layers[target.pages.group][target.part]
        first = layer * target.pages.num_blocks + target.pages.first
        return PageCopy(target.rows[first : first + len(target.block_ids)], target.block_ids, layers[layer])

    def load(self, source: Scatter, pages: Sequence[PagesPlan], layers: range) -> list[PagesPlan]:
        arena, data = source.mapped
        targets = self._targets_of(pages, arena, data)
        scatter([self._copy(target, layer) for target in targets if not target.pages.moved for layer in layers])
        for target in targets:
            if target.pages.moved:
                self._move(target, layers)
        begun = {id(target.pages) for target in targets}
        return [
            each
            for each in pages
            if id(each) not in begun or not all(map(arena.is_current, each.slots_of(self._share)))
        ]

    def _move(self, target: _Target, layers: range) -> None:
        """Load tokens of a chunk that was computed at other positions."""
        pages, turning = target.pages, self._turning
        if turning is None or pages.moved is None:
            raise LayoutError("tokens at other positions, where nothing turns keys")
        source = turning.pages(target.rows)
        source = source.reshape(-1, pages.num_blocks, source.shape[1])[layers.start : layers.stop]
        targets = self._elements[target.part][layers.start : layers.stop]
        turning.scatter(source, targets, turning.lines(pages.moved, pages.block_ids), pages.moved.shift)
