"""Pages of two cache groups on one device, as a hybrid model has them: both lie over the same memory, block by block.

Whoever takes the pages, the layers or the table of the wrong group sees it in the bytes.
"""

from __future__ import annotations

import torch

from pdx.engine.gpu_copier import page_map
from pdx.engine.plan import LoadPlan, PagesPlan
from pdx.kernels.page_map import PageMap
from pdx.memory.slot import Slot

BLOCKS = 32
RAW_BYTES = 48 << 10  # of a block in one of the tensors that the groups share
GENERATION = 5


class TwoGroups:
    """Attention in three layers, pages of 48 KiB, and states in two, of 40 KiB; each block is one group's."""

    def __init__(self, device: str) -> None:
        self.raw = torch.zeros((3, BLOCKS, RAW_BYTES), dtype=torch.uint8, device=device)
        self.layers = [list(self.raw), [each[:, : 40 << 10] for each in self.raw[:2]]]
        self.ids = [[9, 2, 30, 17], [5]]
        self.slots, self.plans, offset = [], [], 0
        for group, (layers, ids) in enumerate(zip(self.layers, self.ids, strict=True)):
            slot = Slot(offset, len(layers) * len(ids) * layers[0].shape[1], GENERATION)
            self.slots.append(slot)
            self.plans.append(PagesPlan([slot], len(ids), 0, ids, completes=True, group=group))
            offset += slot.nbytes
        self.nbytes = offset

    def maps(self) -> list[list[PageMap]]:
        return [[page_map(layers, BLOCKS, layers[0].shape[1])] for layers in self.layers]

    def compute(self) -> None:
        """Bytes that do not repeat, in all blocks."""
        self.raw.copy_(torch.randint(1, 256, self.raw.shape, dtype=torch.uint8, device=self.raw.device))

    def taken(self, group: int) -> bytes:
        """The group's pages of the plan, as its slot has them."""
        rows = torch.tensor(self.ids[group], device=self.raw.device)
        return torch.stack([layer[rows] for layer in self.layers[group]]).cpu().numpy().tobytes()

    def load(self) -> LoadPlan:
        return LoadPlan.of("r", None, self.plans)

    def of_plans(self, raw: torch.Tensor) -> torch.Tensor:
        """`raw`, but zeroes in all that no plan has."""
        kept = torch.zeros_like(raw)
        for layers, ids in zip(self.layers, self.ids, strict=True):
            for at, layer in enumerate(layers):
                kept[at, ids, : layer.shape[1]] = raw[at, ids, : layer.shape[1]]
        return kept
