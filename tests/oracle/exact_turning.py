"""How the keys of the toy's first layer turn with their positions, in the place of `pdx.engine.turning.Turning`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from exact_kinds import BLOCK
from exact_model import WORDS, Word, Words, masks, turned

from pdx.engine.plan import MovedTokens


class _Lines(NamedTuple):
    """Where tokens come from in a chunk, and where they go: pages and tokens in them."""

    pages: Any
    tokens: Any
    blocks: Any
    to_tokens: Any


class ToyTurning:
    """Of pages with one head."""

    def warm_up(self) -> None:
        pass

    def pages(self, rows: torch.Tensor) -> Words:
        found: Words = rows.view(torch.int64).numpy().view(Word)
        return found

    def lines(self, moved: MovedTokens, block_ids: list[int]) -> _Lines:
        here, there = (np.arange(first, first + moved.num_tokens) for first in (moved.first, moved.target))
        return _Lines(here // BLOCK, here % BLOCK, np.array(block_ids)[there // BLOCK], there % BLOCK)

    def scatter(self, source: Words, targets: Sequence[Words], lines: _Lines, shift: int) -> None:
        for of_layer, target in zip(source, targets, strict=True):
            old, new = of_layer.reshape(-1, BLOCK, WORDS), target.reshape(len(target), BLOCK, WORDS)
            assert np.shares_memory(new, target)
            found = turned(old[lines.pages, lines.tokens] ^ masks(WORDS), shift) ^ masks(WORDS)
            new[lines.blocks, lines.to_tokens] = found
