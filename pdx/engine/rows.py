"""Slots of an arena as torch rows, without a copy."""

from __future__ import annotations

import torch

from pdx.kernels.page_rows import page_rows
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot


class ArenaRows:
    """The whole arena as one tensor. It keeps the mapping alive, also beyond the node's life."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._bytes = torch.frombuffer(arena.data, dtype=torch.uint8)

    def of(self, slot: Slot, num_rows: int) -> torch.Tensor:
        """The slot as `num_rows` equal rows; its bounds were checked by `Arena.is_current`."""
        part = self._bytes[slot.offset : slot.offset + slot.nbytes]
        return page_rows(part.view(num_rows, -1))
