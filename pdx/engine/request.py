"""One request as the scheduler half sees it: parameters, life cycle, chunks, the node's answers, what is saved.

Its life cycle is one table, `TRANSITIONS`:

    WAITING ──decide──► DECIDED ──load──► LOADING ──loaded──► RUNNING ──void──► VOID
       ▲  ◄─ask again─────┘ └─────run───────────────────────────▲                 │
       └────────────────────────────preempt─────────────────────┴─────────────────┘

A request is tracked from first sight until the engine says that it is over. LEFT_OUT is final: nothing of it is looked
up, found or saved, but other requests may depend on the same blocks (`pdx.engine.trust`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any, Literal, NamedTuple

from pdx.engine.moved import Moving, Run, pages_of
from pdx.engine.params import TransferParams
from pdx.engine.plan import NO_EPOCH, LoadPlan, PagesPlan, SavePlan
from pdx.engine.request_keys import RequestKeys
from pdx.engine.step import EngineRequest
from pdx.errors import LayoutError
from pdx.memory.form import MOVED
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.memory.slot import Slot
from pdx.telemetry.names import SOURCES, source_of
from pdx.wire.hints import Envelope, Hints, Verdict, worst

NULL_BLOCK = 0  # in a table: the engine has no block there


class State(IntEnum):
    """A state of a request's life cycle."""

    LEFT_OUT = auto()
    WAITING = auto()  # for its turn, and for the node's decision
    DECIDED = auto()  # for its turn: hits are leased and misses have slots, or that is impossible
    LOADING = auto()  # it has blocks, and its hits are being loaded into them
    LOADING_VOID = auto()  # likewise, and nothing of its blocks will be saved
    RUNNING = auto()  # it has blocks and no load in flight
    VOID = auto()  # likewise, and nothing of its blocks is saved: computed before a reset, or from pages that failed


class Step(IntEnum):
    """An event in a request's life cycle."""

    DECIDE = auto()
    ASK_AGAIN = auto()  # the node's answer is void, or too old
    LOAD = auto()  # the engine gave it blocks, some of them to be loaded
    RUN = auto()  # the engine gave it blocks, none of them to be loaded
    LOADED = auto()  # its load is over, successful or not
    PREEMPT = auto()  # it has lost its blocks
    VOID = auto()  # its blocks do not hold what its keys say


_QUEUED = (State.WAITING, State.DECIDED)
_IN_BLOCKS = (State.RUNNING, State.VOID)
TRANSITIONS: dict[tuple[State, Step], State] = {
    **{(state, Step.DECIDE): State.DECIDED for state in _QUEUED},
    **{(state, Step.ASK_AGAIN): State.WAITING for state in _QUEUED},
    **{(state, Step.LOAD): State.LOADING for state in _QUEUED},
    **{(state, Step.RUN): State.RUNNING for state in (*_QUEUED, State.RUNNING)},
    **{(state, Step.PREEMPT): State.WAITING for state in _IN_BLOCKS},
    **{(state, Step.VOID): State.VOID for state in _IN_BLOCKS},
    **{(state, Step.VOID): State.WAITING for state in _QUEUED},
    (State.LOADING, Step.LOADED): State.RUNNING,
    (State.LOADING, Step.VOID): State.LOADING_VOID,
    (State.LOADING_VOID, Step.LOADED): State.VOID,
    (State.LOADING_VOID, Step.VOID): State.LOADING_VOID,
    (State.VOID, Step.RUN): State.VOID,
    **{(State.LEFT_OUT, step): State.LEFT_OUT for step in (Step.RUN, Step.PREEMPT, Step.VOID)},
}

_ALSO_OF_DRAFTS = (Step.PREEMPT, Step.VOID, Step.LOADED)
LOADING = (State.LOADING, State.LOADING_VOID)
SEATED = (*LOADING, State.RUNNING, State.VOID)  # with a place in steps, or before any that waits


class Asked(NamedTuple):
    """A question to the node: its message number, and the time and scheduling step in which it was sent."""

    seq: int
    at: float
    step: int
    first_chunk: int = 0  # of those it is about …
    num_chunks: int = 0  # … and how many, of each cache group
    end_tokens: int = 0  # of the prompt, to the end of the last one


class ChunkSlots(NamedTuple):
    """One chunk of a cache group: the request's block that it begins with, and its slots, one per shard."""

    group: int
    first_block: int
    slots: list[Slot]


class Hits(NamedTuple):
    """The part of a prompt that can be loaded: the single source of truth for its blocks."""

    slots: Sequence[ChunkSlots] = ()  # of the chunks that its leading tokens need
    num_whole: int = 0  # leading chunks; the next one may be there in part
    tokens: int = 0  # that can be loaded in all
    lease: int = 0
    lease_s: float = 0.0  # from the answer on
    moved: Sequence[Run] = ()  # in place of `slots`


@dataclass(slots=True)
class SlotGrant:
    """A reserved chunk of a cache group: blocks [first_block, end_block) of the request, whose last token is before
    `end_token`, go into `slots`, one per shard."""

    group: int
    slots: list[Slot]
    first_block: int
    end_block: int
    first_token: int
    end_token: int
    by_layer: bool = False  # the node wants to be told of layers as they are filled


class Awaited(IntEnum):
    """What may still arrive for a request. It only decreases while the node lives."""

    NOTHING = 0
    TRANSFER = 1  # its own transfer, until the node reports the outcome
    SOURCE = 2  # also what a peer or a tier may have


@dataclass(slots=True)
class NodeState:
    """The questions to one life of a node about a request, its answers and its grants."""

    epoch: int = 0  # the node's life; 0: none
    asked: Asked | None = None  # pending: for the prompt's hits, and for room for the rest
    late: Asked | None = None  # pending: for room that the request does not wait for
    found: Asked | None = None  # the question that `hits` answer
    asked_since: float = 0.0  # when the first unanswered question was sent; 0: none
    is_expecting: bool = False  # the node was told to expect the request, and not asked yet
    verdicts: list[Verdict] = field(default_factory=list)  # on the request's hints
    awaited: Awaited = Awaited.SOURCE
    fits: bool = True  # at least a chunk of it fits into the arena, as far as is known
    reserved: bool = False  # what is missing has room, or will get none
    hits: Hits = Hits()  # noqa: RUF009  it is a tuple
    sources: bytes = b""  # of the hits (`Admitted.sources`)
    grants: list[SlotGrant] = field(default_factory=list)  # in token order: a step costs what it saves


@dataclass(slots=True)
class Load:
    """The latest load planned for a request, in flight or over."""

    sources: Counter[str]  # of its tokens
    preemptions: int  # of the request, until then
    planned_at: float
    failed_block: int | None = None  # while in flight: the first of the request's blocks that was not loaded


NO_WAIT = float("-inf")  # a deadline that has always passed


class TrackedRequest:
    """One request from its first sight to its end. Owned by the scheduler's thread."""

    def __init__(
        self,
        request: EngineRequest,
        groups: CacheGroups,
        params: TransferParams,
        fingerprint: bytes,
        envelope: Envelope = Envelope(),  # noqa: B008 - frozen
        state: State = State.WAITING,
        counts: Counter[State] | None = None,
    ) -> None:
        """`fingerprint`: see `RequestKeys`. `counts`: the engine's requests by state."""
        self.request = request
        self.params = params
        self.envelope = envelope
        self._groups = groups
        self.keys = RequestKeys(request, groups, fingerprint)
        self.moving = Moving() if envelope.form == MOVED else None  # what is known of its tokens at other positions
        self.drafts: TrackedRequest | None = None  # the same request, of a draft model's layers (`pdx.engine.drafts`)
        self.state = state
        self._counts = Counter[State]() if counts is None else counts
        self._counts[state] += 1
        self.node = NodeState()
        self.load: Load | None = None
        self.wait_until: float | None = None  # deadline for what may still arrive; None: not waiting yet
        # Deadline for room for all of its prompt; None: not waiting yet; NO_WAIT: room for a part will do from now on.
        self.room_until: float | None = None if self.is_prefill else NO_WAIT
        self.needed_since: float | None = None  # of drafts: since when the request waits for them alone
        self.tables: list[list[int]] = [[] for _ in range(groups.num_tables)]  # block ids, by table
        self.saved_blocks = [0] * len(groups)  # by cache group: blocks before this one need no more saving
        self.gathered_bytes = Counter[int]()  # of one shard, by cache group
        self.state_ends: set[int] = set()  # ends of chunks in whose block the engine has kept a state
        self.computed_end = 0
        self.decoded_end = self.num_prompt_chunks  # those before this one were considered for saving
        self.local_tokens = 0  # that the engine's own cache had at its last lookup
        self.vouched = 0  # tokens from that cache or from the store: no other connector's promise

    def step(self, step: Step) -> None:
        """Advance its life cycle. A step that is not in the table is a bug: PDX switches off for this engine."""
        before, self.state = self.state, TRANSITIONS[self.state, step]
        if step is Step.PREEMPT:
            self.state_ends.clear()
        if self.state is not before:
            self._counts[before] -= 1
            self._counts[self.state] += 1
        if self.drafts is not None and step in _ALSO_OF_DRAFTS and (step is not Step.LOADED or self.drafts.is_loading):
            self.drafts.step(step)

    def end(self) -> None:
        """The request is over and no longer counted."""
        self._counts[self.state] -= 1

    @property
    def is_single(self) -> bool:
        """`CacheGroups.is_single`."""
        return self._groups.is_single

    @property
    def is_decided(self) -> bool:
        """Whether the node has decided about it, and it waits for its turn."""
        return self.state is State.DECIDED

    @property
    def is_queued(self) -> bool:
        """Whether it waits for its turn: the engine has given it no blocks."""
        return self.state in (State.WAITING, State.DECIDED)

    @property
    def is_loading(self) -> bool:
        return self.state in LOADING

    @property
    def saves(self) -> bool:
        """Whether its blocks hold what its keys say, so that they may be saved."""
        return self.state not in (State.LEFT_OUT, State.VOID, State.LOADING_VOID)

    @property
    def accepts_partial_room(self) -> bool:
        """Whether room for a part of its prompt will do."""
        return self.room_until == NO_WAIT

    @property
    def holds_no_room(self) -> bool:
        """Whether it waits for what may arrive, as decode legs do, or for room; it holds no room meanwhile."""
        if self.state is not State.WAITING:
            return False
        waits_for_room = self.is_prefill and self.room_until is not None
        return self.wait_until is not None or waits_for_room or self.is_decode

    # ---- its hints and its transfer ---------------------------------------------------------

    @property
    def hints(self) -> Hints:
        return self.envelope.hints

    def take_verdicts(self, verdicts: list[Verdict]) -> None:
        """Take the node's verdicts on its hints, which may differ between its chunks: the worst of a field counts."""
        self.node.verdicts = worst([*self.node.verdicts, *verdicts])

    @property
    def hints_answer(self) -> dict[str, str]:
        """The outcome of each field of its envelope, in words; empty: it had none."""
        own = [self.moving.verdict] if self.moving is not None else []
        return {verdict.field: verdict.told for verdict in self.envelope.answer([*self.node.verdicts, *own])}

    @property
    def is_prefill(self) -> bool:
        """Whether this request prefills for a decoder elsewhere."""
        return self.params.do_remote_decode

    @property
    def is_decode(self) -> bool:
        """Whether this request was prefilled elsewhere."""
        return self.params.do_remote_prefill

    @property
    def transfer(self) -> str | None:
        return self.params.transfer_id

    def handed_on(self, node: str) -> dict[str, Any]:
        """The decode leg's parameters if this engine named the transfer, else empty. `node`: where the chunks are."""
        if not self.is_prefill or self.request.kv_transfer_params.get("transfer_id") is not None:
            return {}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": self.transfer}
        return params | {"prefill_node": node, "prefill_tokens": self.params.prefill_tokens}

    @property
    def part(self) -> Literal["reads", "writes", "expects", "keeps"]:
        if self.is_prefill:
            return "writes"
        if self.is_decode:
            return "expects" if self.params.is_early else "reads"
        return "keeps"

    @property
    def source(self) -> str:
        """The peer that may have what is missing here; empty: no peer is asked."""
        if self.node.awaited is not Awaited.SOURCE:
            return ""
        return self.params.prefix_node or (self.params.decode_node if self.is_prefill else self.params.prefill_node)

    @property
    def push_to(self) -> str:
        """The peer that decodes what this request prefills; empty: this node itself."""
        return self.params.decode_node if self.is_prefill else ""

    @property
    def transfer_tokens(self) -> int:
        """How many leading tokens the transfer carries; 0 if this request is in none, or claims more than its prompt.
        Decoders recompute the last token from the state before it: prefill of a model with states stops there."""
        num_prompt = int(self.request.num_prompt_tokens)
        if self.is_prefill:
            return num_prompt
        if not self.is_decode:
            return 0
        claimed = self.params.prefill_tokens or num_prompt
        return claimed - self._groups.has_state if claimed <= num_prompt else 0

    @property
    def num_prompt_chunks(self) -> int:
        """Of its prompt, which grows with a session's inputs; of a decode leg, those of its transfer: its prompt may
        end with the first generated token."""
        num_tokens = self.transfer_tokens if self.is_decode else 0
        return self._groups.whole_chunks(int(num_tokens or self.request.num_prompt_tokens))

    # ---- what becomes void ------------------------------------------------------------------

    def reset(self, fingerprint: bytes) -> None:
        """The engine's cache was reset: the node's answers are void, and the request's keys change."""
        self.keys = RequestKeys(self.request, self._groups, fingerprint)
        self.moving = Moving() if self.moving is not None else None
        self.step(Step.VOID)
        self.decoded_end = self.num_prompt_chunks
        node = self.node
        node.grants.clear()
        node.hits = Hits(lease=node.hits.lease) if self.is_loading else Hits()  # needed until the load ends
        node.reserved = False
        if self.drafts is not None:
            self.drafts.reset(fingerprint)

    def forget_node(self) -> None:
        """The node is gone, and with it all that the request held there."""
        self.node = NodeState()
        self.step(Step.ASK_AGAIN)

    def adopt_epoch(self, epoch: int) -> None:
        """Deal with this life of the node from now on, and forget any other."""
        if self.node.epoch != epoch:
            self.forget_node()
            self.node.epoch = epoch

    # ---- plans for the workers --------------------------------------------------------------

    @property
    def block_ids(self) -> list[int]:
        """Its blocks of the first cache group."""
        return self.tables[self._groups.places[0].table]

    def take_blocks(self, blocks: Sequence[Sequence[int]], *, are_all: bool = True) -> None:
        """Take its blocks, by table: all of them, or those that follow the ones it has."""
        if len(blocks) != len(self.tables):
            name, expected = self.request.request_id, len(self.tables)
            raise LayoutError(f"request {name}: blocks of {len(blocks)} cache groups, expected {expected}")
        for table, of_group in zip(self.tables, blocks, strict=True):
            if are_all:
                table[:] = of_group
            else:
                table += of_group
        if self.drafts is not None:
            self.drafts.take_blocks(blocks, are_all=are_all)

    def plan_load(self, num_external: int, drafts: Sequence[PagesPlan] = ()) -> LoadPlan:
        """Scatter `num_external` tokens behind the local ones into this request's blocks, and its `drafts`' pages. An
        engine may take fewer tokens than were found; with several groups that load fails, because their chunks are
        those that the full length needs. So does a load whose chunks were released after they were promised."""
        request_id, end_tokens, found = self.request.request_id, self.local_tokens + num_external, self.node.hits.tokens
        if end_tokens == found or (self._groups.is_single and end_tokens < found):
            pages = [*self.load_pages(num_external), *drafts]
            return LoadPlan.of(request_id, self.transfer, pages, self.node.epoch)
        blocks = list[int]()  # the engine must hear of every one
        for layout, place in zip(self._groups, self._groups.places, strict=True):
            first, end = self.local_tokens // layout.block_tokens, layout.num_blocks(end_tokens)
            blocks += [block for block in self.tables[place.table][first:end] if block != NULL_BLOCK]
        return LoadPlan.of(request_id, self.transfer, [PagesPlan([], len(blocks), 0, blocks)], NO_EPOCH)

    def sources_of(self, num_external: int) -> Counter[str]:
        """Where `num_external` tokens behind the local ones were found."""
        start, end, size = self.local_tokens, self.local_tokens + num_external, self._groups.chunk_tokens
        runs = [(at * size, (at + 1) * size, source_of(source)) for at, source in enumerate(self.node.sources)]
        if self.node.hits.moved:
            runs = [(run.target, run.target + run.num_tokens, run.whence) for run in self.node.hits.moved]
        found = Counter({SOURCES[0]: num_external})
        for first, stop, source in runs:
            tokens = max(0, min(stop, end) - max(first, start))
            found[source] += tokens
            found[SOURCES[0]] -= tokens
        return +found

    def load_pages(self, num_external: int) -> list[PagesPlan]:
        """The pages of its hits that hold `num_external` tokens behind the local ones, and their target blocks."""
        end_tokens = self.local_tokens + num_external
        if self.node.hits.moved:
            place = self._groups.places[0]
            blocks = self.tables[place.table]
            return pages_of(self.node.hits.moved, self.local_tokens, end_tokens, blocks, self._groups[0], place.number)
        pages = []
        for group, first, slots in self.node.hits.slots:
            layout, place = self._groups[group], self._groups.places[group]
            num_blocks = layout.blocks_in(slots[0].nbytes)
            start = max(first, self.local_tokens // layout.block_tokens)
            end = min(first + num_blocks, layout.num_blocks(end_tokens))
            table = self.tables[place.table]
            if layout.kind != "full":  # a chunk may begin before the tokens that this length attends to
                start = next((at for at in range(start, end) if table[at] != NULL_BLOCK), end)
            if start < end:
                block_ids = table[start:end]
                pages.append(PagesPlan(slots, num_blocks, start - first, block_ids, group=place.number))
        return pages

    def plan_save(
        self, computed: int, end: int, step_end: int | None = None
    ) -> tuple[SavePlan | None, list[SlotGrant]]:
        """Gather the pages that become final in a step that computes tokens [computed, end). Also return the grants
        that will never be whole: the engine has freed their blocks, or kept no state at their end. `step_end`: the
        step's end, including drafts and unknown tokens; None: `end`.

        Pages before `computed` that were not gathered yet belong to blocks that the engine had cached. The first step
        gathers them after the layer's hook, because another request may compute them in this same step.
        """
        num_prompt = int(self.request.num_prompt_tokens)
        self.computed_end = end
        # A step starts from a state and leaves one at its end: for good at a block's end, else until the next step.
        left = end if step_end in (None, end) else 0
        if self._groups.has_state:
            self.state_ends.update(at for at in (computed, left) if at % self._groups.chunk_tokens == 0)
        grants = self.node.grants
        due = list(itertools.takewhile(lambda grant: grant.first_token < end, grants))
        pages: list[PagesPlan] = []
        unfinished, lost = list[SlotGrant](), list[SlotGrant]()
        nbytes = Counter[int]()
        is_over = self.is_prefill and end >= num_prompt  # then the partial block is final, too
        finals = [each.num_blocks(num_prompt) if is_over else end // each.block_tokens for each in self._groups]
        for grant in due:
            layout, place, final = self._groups[grant.group], self._groups.places[grant.group], finals[grant.group]
            start, stop = max(grant.first_block, self.saved_blocks[grant.group]), min(grant.end_block, final)
            block_ids = self.tables[place.table][start:stop]
            if self._is_lost(layout, grant, block_ids, end, left):
                lost.append(grant)
                continue
            if layout.kind == "state" and end < grant.end_token:
                stop = start
            if start < stop:
                is_last = stop == grant.end_block
                num_blocks, first = grant.end_block - grant.first_block, start - grant.first_block
                told = PagesPlan(grant.slots, num_blocks, first, block_ids, is_last, grant.by_layer, place.number)
                pages.append(told)
                nbytes[place.number] += layout.num_blocks_bytes(len(block_ids))
            if stop < grant.end_block:
                unfinished.append(grant)
        grants[: len(due)] = unfinished
        self.saved_blocks = list(map(max, self.saved_blocks, finals))
        is_prefilling = self.is_prefill and computed < num_prompt
        if not pages and not is_prefilling:
            return None, lost
        before = dict(self.gathered_bytes)
        self.gathered_bytes += nbytes
        save = SavePlan(
            self.request.request_id,
            self.transfer if is_prefilling and not self._groups[0].drafter else None,  # for its timeline
            pages,
            ends_transfer=is_prefilling and num_prompt <= end,
            bytes_before=before,
            num_tokens=num_prompt,
        )
        return save, lost

    def _is_lost(self, layout: KvLayout, grant: SlotGrant, block_ids: Sequence[int], end: int, left: int) -> bool:
        """Whether a grant's content is gone: a state unless a step has ended there; a window or a part of the prompt
        once the engine no longer looks back to it. `left`: the number of tokens behind which this step leaves a state;
        0: some of them are not known yet."""
        if layout.kind == "full":
            return False
        at = grant.end_token
        is_passed = layout.kind == "state" and end >= at and at not in self.state_ends
        return (is_passed and not end == left == at) or NULL_BLOCK in block_ids

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of the prompt of a prefill leg is still to be computed."""
        return self.is_prefill and self.computed_end < self.request.num_prompt_tokens
