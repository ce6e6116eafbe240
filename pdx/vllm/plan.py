"""What the scheduler half tells the worker halves with each step. Plain data; pickled by vLLM on its way."""

from __future__ import annotations

import msgspec

from pdx.messages import Slot

NO_EPOCH = -1  # of no life at all: such a load fails


class PagesPlan(msgspec.Struct, frozen=True):
    """Pages [first, first + len(block_ids)) of every layer of one chunk, and the engine's blocks they belong to.

    `slots` has one slot per shard; a layer's slice in it has `num_blocks` pages.
    """

    slots: list[Slot]
    num_blocks: int
    first: int
    block_ids: list[int]
    completes: bool = False  # with these pages the chunk is whole
    is_pushed: bool = False  # the node wants to hear of each layer as it is filled, not only of the whole


class SavePlan(msgspec.Struct, frozen=True):
    """Pages of one request that become final in this step."""

    request_id: str
    transfer: str | None  # whose prompt is computed in this step
    pages: list[PagesPlan]
    ends_transfer: bool  # the last token of the prompt of a prefill leg is computed in this step
    blocks_before: int  # blocks gathered for it in earlier steps
    num_tokens: int  # of the prompt


class LoadPlan(msgspec.Struct, frozen=True):
    """Chunks of one request to scatter into its blocks."""

    request_id: str
    transfer: str | None
    pages: list[PagesPlan]
    epoch: int = NO_EPOCH  # the node's life that its slots are of

    @property
    def block_ids(self) -> list[int]:
        """All blocks that it writes."""
        return [block for pages in self.pages for block in pages.block_ids]


class StepPlan(msgspec.Struct, frozen=True):
    """All that the workers do in one step, and the node's life (`epoch`) it is about."""

    epoch: int = 0
    saves: list[SavePlan] = []
    loads: list[LoadPlan] = []
    aborts: list[list[Slot]] = []  # per chunk, one slot per shard: nobody will finish them
    num_scheduled_tokens: int = 0
