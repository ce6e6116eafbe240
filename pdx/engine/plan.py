"""The scheduler half's plan for the worker halves in each step: plain data, which the engine carries to them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pdx.memory.share import Share
from pdx.memory.slot import Slot

_SLOT_BYTES = 3 * 8
NO_EPOCH = -1  # no life of any node: such a load fails


class MovedTokens(NamedTuple):
    """Tokens [first, first + num_tokens) of a chunk, which go to the plan's blocks, from token `target` on; their keys
    turn by `shift` positions."""

    first: int
    target: int
    num_tokens: int
    shift: int


class PagesPlan(msgspec.Struct, frozen=True):
    """Pages [first, first + len(block_ids)) of every layer of one chunk, and the engine's blocks they belong to.

    `slots`: one per shard, or only those that a rank has; a layer's slice in each has `num_blocks` pages. `group`: the
    number of the layers' cache group (`Place.number`), or its index in a worker half. `moved`: these tokens go to the
    blocks, instead of whole pages.
    """

    slots: list[Slot]
    num_blocks: int
    first: int
    block_ids: list[int]
    completes: bool = False  # with these pages the chunk is whole
    by_layer: bool = False  # report layers to the node as they are filled, not only the whole
    group: int = 0
    moved: MovedTokens | None = None

    def slots_of(self, share: Share) -> Sequence[Slot]:
        return share.among(self.slots) if len(self.slots) > share.count else self.slots


class SavePlan(msgspec.Struct, frozen=True):
    """Pages of one request that become final in this step."""

    request_id: str
    transfer: str | None  # whose prompt is computed in this step
    pages: list[PagesPlan]
    ends_transfer: bool  # the last token of the prompt of a prefill leg is computed in this step
    bytes_before: dict[int, int]  # of pages gathered for it in earlier steps, of one shard, by cache group
    num_tokens: int  # of the prompt

    def of_stage(self, groups: Mapping[int, int]) -> SavePlan:
        """The part that a worker half with these cache groups saves. `groups`: its index of each, by number."""
        pages = [msgspec.structs.replace(each, group=groups[each.group]) for each in self.pages if each.group in groups]
        before = {groups[number]: nbytes for number, nbytes in self.bytes_before.items() if number in groups}
        return msgspec.structs.replace(self, pages=pages, bytes_before=before)


class LoadPlan(msgspec.Struct, frozen=True):
    """Chunks of one request to scatter into its blocks.

    It goes to the workers of all ranks, each of which reads only its own part. To avoid making and encoding thousands
    of objects, `packed` has arrays of machine words. First the slots, shard by shard: all offsets, all sizes, all
    generations. Then, in half words, four numbers for each chunk (its cache group, its blocks, the first of them that
    is loaded, how many are), and all block ids. `moved`, if any chunk is: four words for each (`MovedTokens`).
    """

    request_id: str
    transfer: str | None
    num_chunks: int
    num_shards: int
    packed: bytes
    epoch: int  # the node's life that its slots are of
    moved: bytes = b""

    @classmethod
    def of(
        cls,
        request_id: str,
        transfer: str | None,
        pages: Sequence[PagesPlan],
        epoch: int = NO_EPOCH,
    ) -> LoadPlan:
        """Pack these pages, which have slots of all shards."""
        num_shards = len(pages[0].slots) if pages else 1
        words, halves = array("Q"), array("I")
        for shard in range(num_shards):
            slots = [each.slots[shard] for each in pages]
            words.extend([slot.offset for slot in slots])
            words.extend([slot.nbytes for slot in slots])
            words.extend([slot.generation for slot in slots])
        for each in pages:
            halves.extend((each.group, each.num_blocks, each.first, len(each.block_ids)))
        for each in pages:
            halves.extend(each.block_ids)
        packed = words.tobytes() + halves.tobytes()
        moved = array("q")
        for each in pages if any([each.moved for each in pages]) else ():
            moved.extend(each.moved or (0, 0, 0, 0))
        return cls(request_id, transfer, len(pages), num_shards, packed, epoch, moved.tobytes())

    def pages_of(self, share: Share, groups: Mapping[int, int] | None = None) -> list[PagesPlan]:
        """What the worker with this share is to load. `groups`: see `SavePlan.of_stage`; None: it has all of them."""
        halves, moved = self._halves(), memoryview(self.moved).cast("q").tolist()
        pages, end = [], 4 * self.num_chunks
        for index, slots in enumerate(zip(*map(self._slots, share.among(range(self.num_shards))), strict=True)):
            group, num_blocks, first, length = halves[4 * index : 4 * index + 4]
            if groups is None or group in groups:
                own = group if groups is None else groups[group]
                block_ids = halves[end : end + length]
                of_chunk = moved[4 * index : 4 * index + 4]
                tokens = MovedTokens(*of_chunk) if any(of_chunk) else None
                pages.append(PagesPlan(list(slots), num_blocks, first, block_ids, group=own, moved=tokens))
            end += length
        return pages

    def _slots(self, shard: int) -> Iterator[Slot]:
        count = self.num_chunks
        start = shard * count * _SLOT_BYTES
        words = memoryview(self.packed)[start : start + count * _SLOT_BYTES].cast("Q").tolist()
        return map(Slot, words[:count], words[count : 2 * count], words[2 * count :])

    @property
    def block_ids(self) -> list[int]:
        """All blocks that it writes."""
        return self._halves()[4 * self.num_chunks :]

    def _halves(self) -> list[int]:
        return memoryview(self.packed)[self.num_shards * self.num_chunks * _SLOT_BYTES :].cast("I").tolist()


class StepPlan(msgspec.Struct, frozen=True):
    """All that the workers do in one step, and the node's life (`epoch`) it is about."""

    epoch: int = 0
    saves: list[SavePlan] = []
    loads: list[LoadPlan] = []
    aborts: list[list[Slot]] = []  # per chunk, one slot per shard: they will not be finished
    num_scheduled_tokens: int = 0
    number: int = 0  # of the step; grows
    awaits: bool = False  # the scheduler half wants to know when the step is over
    lost: dict[str, list[int]] | None = None  # PDX is off for this engine: blocks that will not be loaded, by request


class WorkerNews(msgspec.Struct, frozen=True):
    """What a worker half reports to the scheduler half after a step, beside finished loads and failed blocks."""

    load_s: float = 0.0  # to load a chunk; 0: not known
    chunk_s: float = 0.0  # to compute one; 0: not known
    step: int = 0  # the last one over: its failures were reported
