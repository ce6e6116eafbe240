"""One request as the scheduler half sees it: its claims, its life, its chunks, what the node said, what is saved.

Its life is one table, `TRANSITIONS`:

    WAITING ──decide──► DECIDED ──load──► LOADING ──loaded──► RUNNING ──void──► VOID
       ▲  ◄─ask again─────┘ └─────run───────────────────────────▲                 │
       └────────────────────────────preempt─────────────────────┴─────────────────┘

A request is tracked from its first sight until the engine says that it is over. LEFT_OUT is for good: nothing of it is
asked, found or saved, but others may rest on the same blocks (`pdx.engine.trust`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from pdx.engine.plan import LoadPlan, PagesPlan, SavePlan
from pdx.engine.step import BlockHasher, EngineRequest
from pdx.errors import LayoutError, ProtocolError
from pdx.memory.keys import KEY_BYTES, chunk_key, root_key, short_key, tail_key
from pdx.memory.layout import KvLayout
from pdx.memory.slot import Slot
from pdx.wire.base import TransferId
from pdx.wire.hints import Envelope, Hints, Verdict, parse, worst

NodeName = Annotated[str, Meta(max_length=256)]  # looked up in the node's roster, never an address


class TransferParams(msgspec.Struct, frozen=True):
    """A request's part in a transfer. Names that PDX does not know are left to whoever put them there.

    No address, key or block id is taken from here: a transfer is found by its unguessable id, and its bytes by the
    content of the request's own prompt.
    """

    do_remote_decode: bool = False  # this engine prefills for another
    do_remote_prefill: bool = False  # another engine has prefilled for this one
    transfer_id: TransferId | None = None
    decode_node: NodeName = ""  # of a prefill leg: the node that its chunks are pushed to
    prefill_node: NodeName = ""  # of a decode leg: the node that has them, should some be missing
    is_early: bool = False  # a decode leg sent together with the prefill leg: nodes may not know of the transfer yet
    prefill_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None  # prompt tokens of the prefill leg


def parse_params(params: Any) -> TransferParams:
    """The request's part in a transfer, if it has one. A ProtocolError if what it claims makes no sense."""
    if params is None:
        return TransferParams()
    try:
        parsed = msgspec.convert(params, TransferParams)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"kv_transfer_params: {error}") from error
    if not parsed.do_remote_decode and not parsed.do_remote_prefill:
        return TransferParams()
    if parsed.do_remote_decode and parsed.do_remote_prefill:
        raise ProtocolError("kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
    if parsed.transfer_id is None:
        raise ProtocolError("kv_transfer_params: transfer_id is missing")
    return parsed


def parse_hints(params: Any, salt: str | None = None) -> Envelope:
    """What a request says of the future of its chunks: the envelope `pdx_hints` among its parameters. Never fails.

    `salt`: its cache salt.
    """
    return parse(params.get("pdx_hints") if isinstance(params, Mapping) else None, salt)


class State(IntEnum):
    """Where a request is in its life."""

    LEFT_OUT = auto()
    WAITING = auto()  # for its turn, and for the node's last word
    DECIDED = auto()  # for its turn: its hits are leased and its misses have slots, or nothing of that can be
    LOADING = auto()  # it has blocks, and its hits are on their way into them
    LOADING_VOID = auto()  # likewise, and nothing of its blocks will be saved
    RUNNING = auto()  # it has blocks and waits for no load
    VOID = auto()  # likewise, and nothing of its blocks is saved: computed before a reset, or from pages that failed


class Step(IntEnum):
    """What can happen to a request."""

    DECIDE = auto()
    ASK_AGAIN = auto()  # what the node has said is void, or too old
    LOAD = auto()  # the engine gave it blocks, some of them to be loaded
    RUN = auto()  # the engine gave it blocks, none of them to be loaded
    LOADED = auto()  # its load is over, whatever came of it
    PREEMPT = auto()  # it has lost its blocks
    VOID = auto()  # what its blocks hold is not what its keys say


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

LOADING = (State.LOADING, State.LOADING_VOID)
SEATED = (*LOADING, State.RUNNING, State.VOID)  # has a place in the engine's steps, or will before any that waits


class Asked(NamedTuple):
    """A question to the node: the number of its message, when it was sent, and in which scheduling step."""

    seq: int
    at: float
    step: int
    first_chunk: int = 0  # that it is about


class Hits(NamedTuple):
    """What of a prompt can be loaded: the only place that says which of its blocks those are."""

    slots: Sequence[list[Slot]] = ()  # of its leading chunks, for each one slot per shard
    num_whole: int = 0  # of these; the last one may be there in part
    tokens: int = 0  # in them
    lease: int = 0
    lease_s: float = 0.0  # from the answer on


@dataclass(slots=True)
class SlotGrant:
    """A reserved chunk: blocks [first_block, end_block) of the request go into `slots`, one per shard."""

    slots: list[Slot]
    first_block: int
    end_block: int
    by_layer: bool = False  # the node wants to hear of layers as they are filled


class Awaited(IntEnum):
    """What may still come for a request: it goes down only, as long as the node lives."""

    NOTHING = 0
    TRANSFER = 1  # its own, until the node has said what came of it
    SOURCE = 2  # and what a peer or a tier may have


@dataclass(slots=True)
class NodeState:
    """What a node, in one of its lives, was asked for a request, and what it has said and granted."""

    epoch: int = 0  # its life; 0: of none
    asked: Asked | None = None  # what is there of the prompt, and for room for what is not
    late: Asked | None = None  # room that is not waited for
    found: Asked | None = None  # the question that the hits are the answer to
    awaited: Awaited = Awaited.SOURCE
    fits: bool = True  # into the arena, as far as is known: a chunk of it at least
    reserved: bool = False  # what is missing has room, or will have none
    hits: Hits = Hits()  # noqa: RUF009  it is a tuple
    grants: list[SlotGrant] = field(default_factory=list)  # in the order of their blocks: a step costs what it saves


class RequestKeys:
    """The keys of one request's chunks."""

    def __init__(self, request: EngineRequest, layout: KvLayout, fingerprint: bytes) -> None:
        """`fingerprint`: what they are made with; the layout's, until the engine's cache was reset."""
        self._request = request
        self._layout = layout
        self._fingerprint = fingerprint
        self._keys: list[bytes] = []
        self._hashes: list[bytes] = []  # the block hash that each of the keys was made of
        self._tail: tuple[bytes, int] | None = None
        self._tail_tokens = -1  # how many tokens led up to it

    def leading(self, num_chunks: int) -> list[bytes]:
        """Of the leading full chunks; their blocks must be full of known tokens.

        They are kept, but a session whose input goes on loses its last token: chunks that had it have another key then.
        """
        per_chunk = self._layout.blocks_per_chunk
        hashes = self._request.block_hashes
        while self._hashes and not self._is_last_hash_valid(hashes):
            self._hashes.pop()
            self._keys.pop()
        for index in range(len(self._keys), num_chunks):
            self._hashes.append(bytes(hashes[(index + 1) * per_chunk - 1]))
            self._keys.append(chunk_key(self._fingerprint, self._hashes[-1]))
        return self._keys[:num_chunks]

    def _is_last_hash_valid(self, hashes: Sequence[bytes]) -> bool:
        """Hashes are chained: if the last one is what it was, so are all before it."""
        last = len(self._hashes) * self._layout.blocks_per_chunk - 1
        return last < len(hashes) and bytes(hashes[last]) == self._hashes[-1]

    def block_names(self, first: int, end: int) -> bytes:
        """What the node calls blocks [first, end), as far as they are full of known tokens: the end of the engine's
        hashes, by which others who hear of blocks know them (`pdx.wire.kv_events`)."""
        hashes = self._request.block_hashes[first:end]
        return b"".join([bytes(one)[-KEY_BYTES:].rjust(KEY_BYTES, b"\0") for one in hashes])

    def parent(self, chunk: int) -> bytes:
        """What leads up to the chunk of this number."""
        return self.leading(chunk)[-1] if chunk else root_key(self._fingerprint)

    def end(self, num_tokens: int) -> tuple[bytes, int] | None:
        """Key and number of the full blocks behind the last whole chunk, up to `num_tokens`; None: there are none."""
        end = num_tokens // self._layout.block_tokens
        count = end % self._layout.blocks_per_chunk
        return (short_key(self._fingerprint, bytes(self._request.block_hashes[end - 1])), count) if count else None

    def tail(self, hasher: BlockHasher, tokens: int, transfer: str) -> tuple[bytes, int] | None:
        """Key and number of blocks of the tail of a transfer of so many tokens; None where it ends with a full
        chunk."""
        if tokens != self._tail_tokens:
            self._tail, self._tail_tokens = self._make_tail(hasher, tokens, transfer), tokens
        return self._tail

    def _make_tail(self, hasher: BlockHasher, tokens: int, transfer: str) -> tuple[bytes, int] | None:
        first = tokens - tokens % self._layout.chunk_tokens
        if tokens == first:
            return None
        parent = self._request.block_hashes[first // self._layout.block_tokens - 1] if first else None
        key = tail_key(self._fingerprint, hasher(self._request, parent, first, tokens), transfer)
        return key, self._layout.num_blocks(tokens - first)


class TrackedRequest:
    """One request from its first sight to its end. Owned by the scheduler's thread."""

    def __init__(
        self,
        request: EngineRequest,
        layout: KvLayout,
        params: TransferParams,
        fingerprint: bytes,
        envelope: Envelope = Envelope(),  # noqa: B008 - frozen
        state: State = State.WAITING,
        counts: Counter[State] | None = None,
    ) -> None:
        """`fingerprint`: see `RequestKeys`. `counts`: of its engine's requests in each state."""
        self.request = request
        self.params = params
        self.envelope = envelope
        self.verdicts: list[Verdict] = []  # what became of its hints, as far as the node has answered
        self._layout = layout
        self.keys = RequestKeys(request, layout, fingerprint)
        self.state = state
        self._counts = Counter[State]() if counts is None else counts
        self._counts[state] += 1
        self.node = NodeState()
        self.expected_epoch = 0  # the node's life in which it was told that this request will come
        self.wait_until: float | None = None  # for what may still come; None: not waiting yet
        self.room_until: float | None = None
        self.takes_part = not self.is_prefill  # room for a part of the prompt will do
        self.block_ids: list[int] = []
        self.saved_blocks = 0  # blocks before this one need no more saving
        self.gathered_blocks = 0
        self.computed_end = 0
        self.decoded_end = 0  # chunks before this one were considered for saving
        self.local_tokens = 0  # that the engine's own cache had, when it asked last
        self.vouched = 0  # tokens that this cache had, or that are loaded from the store: nobody else's promise
        self.doubt = 0  # see `pdx.engine.trust`
        self.failed_block: int | None = None  # the first of its blocks that could not be loaded
        self.loaded_for = -1  # the request's count of preemptions when its load was planned

    def step(self, step: Step) -> None:
        """Go on in its life. A step that is not in the table is a bug of ours: PDX goes off for this engine."""
        before, self.state = self.state, TRANSITIONS[self.state, step]
        if self.state is not before:
            self._counts[before] -= 1
            self._counts[self.state] += 1

    def end(self) -> None:
        """It is over: it counts no more."""
        self._counts[self.state] -= 1

    @property
    def is_decided(self) -> bool:
        """Whether the node has said its last word about it, and it waits for its turn."""
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
        """Whether what its blocks hold is what its keys say."""
        return self.state not in (State.LEFT_OUT, State.VOID, State.LOADING_VOID)

    @property
    def stands_aside(self) -> bool:
        """Whether it waits for what may come, as decode legs do, or for room: it has none meanwhile."""
        if self.state is not State.WAITING:
            return False
        return self.wait_until is not None or self.room_until is not None or self.is_decode

    # ---- its hints and its transfer ---------------------------------------------------------

    @property
    def hints(self) -> Hints:
        return self.envelope.hints

    def take_verdicts(self, verdicts: list[Verdict]) -> None:
        """The node has answered to its hints: of the last chunks of the request not as of the first, perhaps."""
        self.verdicts = worst([*self.verdicts, *verdicts])

    @property
    def hints_answer(self) -> dict[str, str]:
        """What became of each field of its envelope, in words; empty: it had none."""
        return {verdict.field: verdict.told for verdict in self.envelope.answer(self.verdicts)}

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

    @property
    def part(self) -> Literal["reads", "writes", "expects", "keeps"]:
        if self.is_prefill:
            return "writes"
        if self.is_decode:
            return "expects" if self.params.is_early else "reads"
        return "keeps"

    @property
    def source(self) -> str:
        """The peer that may have what is missing here; empty: nobody is asked."""
        if self.node.awaited is not Awaited.SOURCE:
            return ""
        return self.params.decode_node if self.is_prefill else self.params.prefill_node

    @property
    def push_to(self) -> str:
        """The peer that decodes what this request prefills; empty: this node itself."""
        return self.params.decode_node if self.is_prefill else ""

    @property
    def transfer_tokens(self) -> int:
        """How many leading tokens the transfer carries; 0 if this request is in none, or its claim is absurd."""
        num_prompt = int(self.request.num_prompt_tokens)
        if self.is_prefill:
            return num_prompt
        if not self.is_decode:
            return 0
        claimed = self.params.prefill_tokens or num_prompt
        return claimed if claimed <= num_prompt else 0

    # ---- what becomes void ------------------------------------------------------------------

    def reset(self, fingerprint: bytes) -> None:
        """The engine's cache was reset: what the node said of it is void, its keys are other ones from now on."""
        self.keys = RequestKeys(self.request, self._layout, fingerprint)
        self.step(Step.VOID)
        self.decoded_end = 0
        node = self.node
        node.grants.clear()
        node.hits = Hits(lease=node.hits.lease) if self.is_loading else Hits()  # until that has ended it is needed
        node.reserved = False

    def forget_node(self) -> None:
        """The node it dealt with is gone, and all that it held there."""
        self.node = NodeState()
        self.step(Step.ASK_AGAIN)

    # ---- plans for the workers --------------------------------------------------------------

    def take_blocks(self, blocks: Sequence[Sequence[int]], *, are_all: bool = True) -> None:
        """These are its blocks, for each cache group; or those that follow what it has. A LayoutError of more than one
        group: this is the only place where several groups would become one."""
        if len(blocks) != 1:
            raise LayoutError(f"request {self.request.request_id}: blocks of {len(blocks)} cache groups, expected 1")
        if are_all:
            self.block_ids = list(blocks[0])
        else:
            self.block_ids += blocks[0]

    def plan_load(self, num_external: int) -> LoadPlan:
        """Scatter `num_external` tokens behind the local ones into this request's blocks: an engine may take fewer than
        were found."""
        first_block = self.local_tokens // self._layout.block_tokens
        end_block = self._layout.num_blocks(self.local_tokens + num_external)
        pages = []
        for index, slots in enumerate(self.node.hits.slots):
            chunk_first = index * self._layout.blocks_per_chunk
            chunk_end = min(chunk_first + self._layout.blocks_per_chunk, end_block)
            start = max(chunk_first, first_block)
            if start < chunk_end:
                block_ids = self.block_ids[start:chunk_end]
                num_blocks = self._layout.blocks_in(slots[0].nbytes)
                pages.append(PagesPlan(slots, num_blocks, start - chunk_first, block_ids))
        return LoadPlan.of(self.request.request_id, self.transfer, pages, self.node.epoch)

    def plan_save(self, computed: int, end: int) -> SavePlan | None:
        """Gather the pages that become final in a step that computes tokens [computed, end).

        Pages before `computed` that were not gathered yet belong to blocks that the engine had cached. The first step
        gathers them after the layer's hook, because another request may compute them in this same step.
        """
        num_prompt = int(self.request.num_prompt_tokens)
        self.computed_end = end
        final = end // self._layout.block_tokens
        if self.is_prefill and end >= num_prompt:
            final = self._layout.num_blocks(num_prompt)  # the partial block, too
        due = list(itertools.takewhile(lambda grant: grant.first_block < final, self.node.grants))
        pages = [
            PagesPlan(
                grant.slots,
                num_blocks=grant.end_block - grant.first_block,
                first=start - grant.first_block,
                block_ids=self.block_ids[start:stop],
                completes=stop == grant.end_block,
                by_layer=grant.by_layer,
            )
            for grant in due
            if (start := max(grant.first_block, self.saved_blocks)) < (stop := min(grant.end_block, final))
        ]
        self.saved_blocks = max(self.saved_blocks, final)
        del self.node.grants[: sum(grant.end_block <= self.saved_blocks for grant in due)]
        is_prefilling = self.is_prefill and computed < num_prompt
        if not pages and not is_prefilling:
            return None
        before = self.gathered_blocks
        self.gathered_blocks += sum(len(plan.block_ids) for plan in pages)
        return SavePlan(
            self.request.request_id,
            self.transfer if is_prefilling else None,
            pages,
            ends_transfer=is_prefilling and num_prompt <= end,
            blocks_before=before,
            num_tokens=num_prompt,
        )

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of the prompt of a prefill leg is still to be computed."""
        return self.is_prefill and self.computed_end < self.request.num_prompt_tokens
