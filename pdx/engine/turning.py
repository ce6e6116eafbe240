"""What a worker half needs to load tokens at other positions than they were computed at (ADR 80)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from pdx.engine.plan import MovedTokens
from pdx.kernels.turned import Offsets, PageElements, Turn, scatter_turned, spans, warm_up
from pdx.memory.rope import Rope

_BITS = {torch.float32: torch.float32, torch.bfloat16: torch.int16}  # the types as which torch shows elements to NumPy

turn_of = lru_cache(Turn.of)


class Turning(NamedTuple):
    """How keys turn with their positions, and where elements lie in the pages of a shard. `dtype`: of the elements."""

    rope: Rope
    elements: PageElements
    dtype: torch.dtype

    def warm_up(self) -> None:
        """Compile what `scatter` needs, which takes some seconds."""
        warm_up(self._turn(0))

    def _turn(self, shift: int) -> Turn:
        return turn_of(self.elements, self.rope, shift, is_half=self.dtype == torch.bfloat16)

    def pages(self, rows: torch.Tensor) -> NDArray[Any]:
        """A view of pages, which are rows of any type, for `scatter`."""
        found: NDArray[Any] = rows.view(_BITS[self.dtype]).numpy()
        return found if self.dtype == torch.float32 else found.view("uint16")

    def lines(self, moved: MovedTokens, block_ids: list[int]) -> Offsets:
        """Which tokens of a chunk go where in these blocks."""
        return spans(self.elements, moved.first, moved.target, moved.num_tokens, block_ids)

    def scatter(self, source: NDArray[Any], targets: Sequence[NDArray[Any]], lines: Offsets, shift: int) -> None:
        """Copy these tokens from a chunk's pages [layers, pages, …] to the engine's pages of each layer. Any thread."""
        scatter_turned(source, targets, lines, self._turn(shift))
