"""A request's question to its node, `Admit`, and the answer: part of `pdx.wire.messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from pdx.memory.keys import KEY_BYTES
from pdx.memory.rules import Rule, needed
from pdx.memory.slot import Bytes
from pdx.wire.base import (
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_KEYS,
    BlockNames,
    Count,
    Keys,
    LayerCount,
    Layout,
    Message,
    Name,
    Number,
    Shard,
    ShardCount,
    Slots,
    TransferId,
    Verdicts,
)
from pdx.wire.hints import Hints, Seconds
from pdx.wire.moved import Part, PromptTokens


class Group(Rule, array_like=True, frozen=True, kw_only=True):
    """One cache group of an engine in an `Admit`: which of its chunks a prompt needs, and their size in each shard.
    `shard`: the first shard, as the worker that writes it numbers it (`Hello.shard`)."""

    nbytes: Bytes
    layers: LayerCount
    tail_nbytes: Bytes = 0
    shard: Shard = 0


Groups = Annotated[list[Group], Meta(max_length=MAX_GROUPS)]


class Admit(Message, frozen=True):
    """One request's question: which of `keys` are there, room for the others, and where all of them are to go.

    The leading run that is there is leased for `lease_s` (0: no lease). Behind it, room is granted for the missing
    chunks, of `nbytes` each (0: no room is asked for); the asking engine's workers, or the client itself, write them.
    `partial`: grant the leading ones that fit instead of all or nothing; if nothing is granted for lack of room,
    nothing is leased either.
    `tail_nbytes`: the last key is the tail of a prompt, of so many bytes. Room for it is granted to a `part` that
    writes, and to one that keeps, which is in no transfer. It is found again by its blocks, or goes to its reader.
    `blocks`: a name of 16 bytes for each full block of the prompt, from the first key's first block on, `chunk_blocks`
    per chunk; `parent`: the key before the first one, or what stands for it. Behind the leading run, the chunk that
    begins with the most of the prompt's next blocks is leased, too.
    `transfer`: the handoff that the request has a `part` in. A request that writes opens the transfer, and its grants
    belong to it. For one that reads, missing chunks may still arrive; one that expects also waits for a transfer that
    the node does not know yet.
    `early`: a request that reads can copy slices while others are being filled, so the answer need not wait for the
    last ones: it comes when filling those takes no longer than copying the rest (`Ping.load_s`).
    `push_to`: a peer that gets all of `keys`, those that are here and, as they fill, those that are granted.
    `source`: a peer that is asked for what is missing here.
    `wait_s`: while missing chunks may still arrive, the answer is held back for so long; then it is `waiting`, and
    nothing is leased or granted.
    `request`: the engine's id of the request; the node can explain its answer to it afterwards (`Why`).

    `groups`: for an engine with several cache groups. `keys` are then those of the first group, of the second, …,
    equally many of each; a group's `nbytes` is 0 if no room is asked for, and this message's own `nbytes`, `layers` and
    `tail_nbytes` are ignored. All groups have a tail, or none. Such an engine sends no `blocks`. If it asks for room
    alone (`lease_s` 0) it gets room for all missing chunks, even those that the prompt would not need.

    `tokens`: those of its leading whole chunks, for prompts that will find these at other positions. `moved`: what the
    request takes of each of `keys`, which are such chunks, found by `FindMoved`; it asks for no room then.

    From a peer: room for what it has, or is filling. `layout`: of these chunks; a process said its own when it
    attached. `wait_s`: how long it may wait for room for all of it. `want`: the number of the `Push` that this answers.
    """

    keys: Keys
    nbytes: Bytes = 0
    layers: LayerCount = 1
    shards: ShardCount = 1
    lease_s: Seconds = 0.0
    tail_nbytes: Bytes = 0
    partial: bool = False
    transfer: TransferId | None = None
    part: Literal["reads", "writes", "expects", "keeps"] = "reads"
    push_to: Name = ""
    source: Name = ""
    wait_s: Seconds = 0.0
    hints: Hints = Hints("")
    layout: Layout = b""
    want: Number = 0
    blocks: BlockNames = b""
    chunk_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    parent: Annotated[bytes, Meta(max_length=16)] = b""
    request: Name = ""
    early: bool = False
    groups: Groups = []
    tokens: PromptTokens | None = None
    moved: Annotated[list[Part], Meta(max_length=MAX_KEYS)] = []

    @property
    def chunks(self) -> int:
        """How many chunks its prompt has in each cache group."""
        return len(self.keys) // len(self.groups) if self.groups else len(self.keys)

    @property
    def asks_room(self) -> bool:
        return any([group.nbytes for group in self.groups]) if self.groups else self.nbytes > 0

    @property
    def has_tail(self) -> bool:
        """Whether the last chunk is the tail of a prompt."""
        return (self.groups[0] if self.groups else self).tail_nbytes > 0

    @property
    def writes_tail(self) -> bool:
        """Whether the last chunk is a tail that this request itself writes."""
        return self.part in ("writes", "keeps") and self.has_tail

    @property
    def sought(self) -> int:
        """How many leading chunks may come from elsewhere: not the tail that this request itself writes."""
        return self.chunks - self.writes_tail

    def needed_keys(self, end: int) -> Sequence[bytes]:
        """The keys that its leading `end` chunks need, of all cache groups."""
        if not self.groups:
            return self.keys[:end] if end < len(self.keys) else self.keys
        return [self.keys[at] for at in needed(self.groups, self.chunks, end, has_tail=self.has_tail)]

    @property
    def sought_keys(self) -> list[bytes]:
        """The keys of the sought chunks, of all cache groups."""
        count = self.chunks
        return [key for first in range(0, len(self.keys), count) for key in self.keys[first : first + self.sought]]

    @property
    def last_sought(self) -> bytes:
        """The key of the last of these, which by the hash chain names all before it, too."""
        return self.keys[-1 - self.writes_tail]

    @property
    def writes(self) -> TransferId | None:
        """The transfer that the grants belong to."""
        return self.transfer if self.part == "writes" else None

    def names(self, index: int) -> bytes:
        """The names of the full blocks behind the first `index` keys, at most a chunk's; empty: not told."""
        width = self.chunk_blocks * KEY_BYTES
        return self.blocks[index * width : (index + 1) * width]

    def before(self, index: int) -> bytes:
        """The key before `keys[index]`, or before what is behind the last one."""
        return self.keys[index - 1] if index else self.parent

    @property
    def awaits(self) -> TransferId | None:
        """The transfer that may bring what is missing."""
        return self.transfer if self.part != "writes" else None


class Admitted(Message, frozen=True):
    """`slots` holds hits x shards slots, chunk-major, under `lease`, which ends after `lease_s`: no more than was asked
    for. With several cache groups it holds what each needs for `hits` leading chunks (`Rule.first`), group-major.

    `granted` holds indices into `keys`; `granted_slots` holds len(granted) x shards slots, chunk-major. A key behind
    the hits that is not `granted` is there or being filled, or (if `full`) found no room.
    `waiting`: missing chunks may still arrive; `full` without `granted`: there was no room for all. Either way nothing
    is held, and the slots of the hits are left out.
    `part_blocks`: behind the hits, `slots` has a further chunk, of which this many leading blocks are the prompt's.
    `by_layer`: slices are copied on as they are filled, so report each layer by a `Fill`; else one that seals is
    enough.
    `verdicts`: the outcome of `Admit.hints`, for each field that is set.
    `sources`: for each of the hits, and the chunk behind them, where it came from for this request, as an index into
    `pdx.telemetry.names.SOURCES`; empty: all of it was in memory.
    """

    hits: Count = 0
    slots: Slots = []
    lease: Number = 0
    waiting: bool = False
    granted: Annotated[list[Count], Meta(max_length=MAX_KEYS)] = []
    granted_slots: Slots = []
    full: bool = False
    by_layer: bool = False
    part_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    verdicts: Verdicts = []
    lease_s: Seconds = 0.0
    sources: Annotated[bytes, Meta(max_length=MAX_KEYS + 1)] = b""
