"""The chunks of a draft model's layers: beside those of the model, under keys of their own.

A draft model's KV decides which tokens are proposed, never which are right. So a missing chunk of it is no miss: the
engine drafts from whatever its pages hold, and some of these drafts are rejected. Engines with other draft models, or
with none, share the model's own chunks.

The scheduler half tracks a request with drafts twice (`TrackedRequest.drafts`). Both share one life cycle, except as
said here.
"""

from __future__ import annotations

import bisect
import hashlib
import time
from collections.abc import Callable

import msgspec

from pdx.client.connection import Connection
from pdx.engine.plan import PagesPlan
from pdx.engine.request import SlotGrant, State, Step, TrackedRequest
from pdx.engine.step import StepRequest
from pdx.engine.store_lookup import StoreLookup
from pdx.memory.layout import CacheGroups
from pdx.wire.hints import Envelope, Hints

# How long a request whose own chunks are there waits for those of its drafts: for the node's answer, or for the end of
# a transfer or of loads from a tier, which may bring them last.
WAIT_S = 0.2


class Drafts:
    """The draft model of one engine. One thread: the scheduler's."""

    def __init__(self, groups: CacheGroups, lookup: StoreLookup, clock: Callable[[], float] = time.monotonic) -> None:
        """`groups`: those of its layers, which `lookup` asks about."""
        self.lookup = lookup
        self._groups = groups
        self._clock = clock
        self._bare: set[int] = set()  # blocks that were filled from the store, without its KV

    def track(self, tracked: TrackedRequest, fingerprint: bytes) -> None:
        """Track a new request's drafts. Its own keys are made with `fingerprint`. A lossy form has no drafts."""
        if tracked.state is State.LEFT_OUT or tracked.hints.form:
            return
        params, hints = tracked.params, tracked.hints
        if params.transfer_id is not None:  # both legs derive the same name
            name = hashlib.sha256(f"drafts of {params.transfer_id}".encode()).hexdigest()[:32]
            params = msgspec.structs.replace(params, transfer_id=name, is_early=False)
        envelope = Envelope(Hints("", salt=hints.salt, ttl_s=hints.ttl_s))
        tracked.drafts = TrackedRequest(tracked.request, self._groups, params, fingerprint, envelope)

    def begin(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Ask what is there. Decode legs do not ask yet: the prefill leg may begin the transfer as late as its end."""
        if (own := tracked.drafts) is not None and not own.is_decode:
            self.lookup.begin(own, connection)

    def worth_loading(self, tracked: TrackedRequest, connection: Connection, tokens: int) -> int | None:
        """How many of the leading `tokens`, which the store has of the model, to load; None: ask again. A part of a
        chunk comes without drafts' KV, so it is computed if the drafts have everything before it."""
        own = tracked.drafts
        if own is None or (own.is_decode and tokens <= tracked.local_tokens):
            return tokens
        if not self.lookup.advance(own, connection):
            if own.needed_since is None:
                own.needed_since = self._clock()
            if self._clock() - own.needed_since < WAIT_S:
                return None
        found = own.node.hits.tokens if own.is_decided else 0
        is_part = tracked.is_single and not own.is_decode and tokens - found < self._groups.chunk_tokens
        return found if found and is_part else tokens

    def allocated(
        self, tracked: TrackedRequest, num_external: int, connection: Connection | None
    ) -> tuple[list[PagesPlan], list[SlotGrant]]:
        """The request has got blocks, for so many tokens from the store. Returns what to load of its drafts, and what
        will not be saved because it would be computed from missing drafts' KV."""
        own = tracked.drafts
        if own is None or not own.is_queued:  # or its load is over
            return [], []
        own.local_tokens, own.needed_since = tracked.local_tokens, None
        epoch = connection.epoch if connection is not None else 0
        is_known = own.is_decided and own.node.epoch == epoch
        pages = own.load_pages(num_external) if num_external and is_known else []
        own.step(Step.LOAD if pages else Step.RUN)
        lost = list[SlotGrant]()
        if self._is_bare(own, num_external, {block for each in pages for block in each.block_ids}):
            lost = self._doubted(own, tracked.local_tokens + num_external)
            if num_external and connection is not None:
                text = "request %s is loaded without some of its draft model's KV: fewer of its drafts are accepted"
                connection.count("drafts_missing", text, tracked.request.request_id)
        if connection is not None and not pages:
            self.lookup.forget_asked(own, connection)
            self.lookup.release(own, connection)
            if not is_known and own.node.epoch == epoch:
                self.lookup.reserve_again(own, connection)
        return pages, lost

    def _is_bare(self, own: TrackedRequest, num_external: int, loaded: set[int]) -> bool:
        """Whether a part of the prompt's beginning has no KV of drafts."""
        is_bare, end_tokens = False, own.local_tokens + num_external
        for layout, place in zip(self._groups, self._groups.places, strict=True):
            table = own.tables[place.table]
            first, end = own.local_tokens // layout.block_tokens, layout.num_blocks(end_tokens)
            self._bare.difference_update(table[first:])
            self._bare.update(set(table[first:end]) - loaded)
            is_bare = is_bare or not self._bare.isdisjoint(table[:end])
        return is_bare

    def _doubted(self, own: TrackedRequest, end_tokens: int) -> list[SlotGrant]:
        """The grants to drop: of chunks without drafts' KV, or computed from such. One layer's KV depends on no other
        token's."""
        grants = own.node.grants
        count = bisect.bisect_left(grants, end_tokens, key=lambda grant: grant.first_token)
        if sum(each.num_layers for each in self._groups) > 1:
            own.step(Step.VOID)
            count = len(grants)
        own.node.grants = grants[count:]
        return grants[:count]

    def computing(self, own: TrackedRequest, step: StepRequest) -> None:
        """The step overwrites the new blocks of its request, drafts' KV included."""
        if self._bare:
            for layout, place in zip(self._groups, self._groups.places, strict=True):
                new = own.tables[place.table][layout.num_blocks(step.computed) :]
                self._bare.difference_update(new if step.has_all_blocks else step.blocks[place.table])
