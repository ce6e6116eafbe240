"""Chunks that a request finds at other positions: they are looked up, leased and loaded (ADR 80).

This is a second lookup beside the request's own (`pdx.engine.store_lookup`), for requests of the form "moved". The node
says which known chunks the prompt is made of; a usual `Admit` then asks which of them are there.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdx.client.connection import Connection
from pdx.config import ConnectorConfig
from pdx.engine.plan import MovedTokens, PagesPlan
from pdx.errors import NodeError, ProtocolError
from pdx.memory.layout import KvLayout
from pdx.memory.slot import Slot
from pdx.telemetry.names import SOURCES, source_of
from pdx.wire.base import MAX_KEYS, MAX_NAME, MAX_SLOTS
from pdx.wire.hints import Hints, Verdict
from pdx.wire.messages import Admit, Admitted, FindMoved, Moved, Release
from pdx.wire.moved import MAX_TOKENS, Part, Piece

if TYPE_CHECKING:
    from pdx.engine.forms import Forms
    from pdx.engine.request import Asked, Hits, TrackedRequest
    from pdx.engine.store_lookup import StoreLookup


class Run(NamedTuple):
    """Tokens [first, first + num_tokens) of a leased chunk, which are the prompt's from `target` on; their keys turn by
    `shift` positions. `slots`: one per shard. `whence`: one of `pdx.telemetry.names.SOURCES`."""

    slots: list[Slot]
    first: int
    num_tokens: int
    target: int
    shift: int
    whence: str = SOURCES[0]


def pages_of(
    runs: Iterable[Run], local_tokens: int, end_tokens: int, table: Sequence[int], layout: KvLayout, number: int
) -> list[PagesPlan]:
    """What to load from these runs into the blocks of `table`, for tokens [local_tokens, end_tokens) of the prompt.
    `number`: their cache group's."""
    pages = []
    for run in runs:
        start, end = max(run.target, local_tokens), min(run.target + run.num_tokens, end_tokens)
        if start < end:
            first_block = start // layout.block_tokens
            moved = MovedTokens(
                run.first + start - run.target, start - first_block * layout.block_tokens, end - start, run.shift
            )
            block_ids = list(table[first_block : layout.num_blocks(end)])
            num_blocks = layout.blocks_in(run.slots[0].nbytes)
            pages.append(PagesPlan(run.slots, num_blocks, 0, block_ids, group=number, moved=moved))
    return pages


@dataclass(slots=True)
class Moving:
    """What is known of one request's tokens at other positions."""

    epoch: int = 0  # the node's life that all this is about
    asked: Asked | None = None  # pending: which pieces there are, or then, whether they are there
    pieces: list[Piece] | None = None
    hits: Hits | None = None  # the last found
    until: float | None = None  # deadline for loads from a tier
    verdict: Verdict = Verdict("reuse", "refused", "the node was not asked")  # noqa: RUF009 - frozen

    def refuse(self, text: str) -> None:
        """Find nothing more, for this reason."""
        self.pieces, self.verdict = [], Verdict("reuse", "refused", text)


class MovedLookup:
    """Asks the node where tokens of requests were computed. One thread: the scheduler's."""

    def __init__(
        self,
        config: ConnectorConfig,
        forms: Forms,
        lookup: StoreLookup,
        layout: KvLayout,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._forms = forms
        self._lookup = lookup
        self._layout = layout
        self._clock = clock
        # As many as one question may name and its answer hold.
        self._max_keys = min(MAX_KEYS, MAX_SLOTS // layout.num_shards)

    def begin(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Ask where the tokens of a new request are, whose turn is near. Never waits."""
        moving = self._moving(tracked, connection)
        if moving is None or tracked.is_decode or self._lookup.is_silent(tracked, connection):
            return
        with contextlib.suppress(NodeError, ProtocolError):  # it is asked again when its turn comes
            self._ask(tracked, moving, connection)

    @staticmethod
    def _moving(tracked: TrackedRequest, connection: Connection) -> Moving | None:
        """What is known from this node; None: the request does not ask for moved tokens."""
        if tracked.moving is not None and tracked.moving.epoch != connection.epoch:
            tracked.moving = Moving(connection.epoch)
        return tracked.moving

    def _ask(self, tracked: TrackedRequest, moving: Moving, connection: Connection) -> None:
        if moving.asked is not None or moving.pieces is not None:
            return
        scope = self._forms.scope(tracked)
        if scope is None:
            moving.refuse("its tokens have no names")
            return
        ids = self._forms.ids(tracked, 0, min(tracked.request.num_prompt_tokens, MAX_TOKENS))
        name = tracked.request.request_id[:MAX_NAME]
        moving.asked = self._lookup.ask(connection, FindMoved(scope, ids, self._layout.chunk_tokens, name))

    def find(self, tracked: TrackedRequest, connection: Connection) -> bool:
        """Look for chunks at other positions, once the request's own are known; if these have more tokens, they become
        its hits. False: not known yet, ask again."""
        moving = self._moving(tracked, connection)
        if moving is not None and tracked.is_decode:
            moving.verdict = Verdict("reuse", "accepted", "as its prefill leg has found it")
        if moving is None or tracked.is_decode or self._lookup.is_silent(tracked, connection):
            return True
        try:
            return self._find(tracked, moving, connection)
        except (NodeError, ProtocolError) as error:
            text = "request %s goes on with its own chunks alone: %s"
            connection.count("moved_failed", text, tracked.request.request_id, error)
            self.forget(tracked, connection)
            moving.refuse("the node did not answer")
            return True

    def _find(self, tracked: TrackedRequest, moving: Moving, connection: Connection) -> bool:
        if moving.hits is not None and tracked.node.hits is moving.hits:
            return True  # as fresh as its own would be
        self._ask(tracked, moving, connection)
        if moving.pieces is None:
            assert moving.asked is not None
            found = self._lookup.collect(connection, moving.asked, Moved)
            if found is None:
                return False
            moving.asked, moving.pieces = None, self._leading(found.pieces, tracked.request.num_prompt_tokens - 1)
            if not moving.pieces:
                moving.refuse("nothing is there that begins as this prompt does")
        if not self._is_more(tracked, sum(piece.count for piece in moving.pieces)):
            self.forget(tracked, connection)
            if max(tracked.node.hits.tokens, tracked.local_tokens):
                moving.verdict = Verdict("reuse", "accepted", "its own chunks have as much")
            elif moving.pieces:
                moving.refuse("less than a block of it is there")
            return True
        if moving.asked is None:
            moving.asked = self._lookup.ask(connection, self._question(tracked, moving.pieces, connection))
        answer = self._lookup.collect(connection, moving.asked, Admitted)
        if answer is None:
            return False
        asked, moving.asked = moving.asked, None
        if answer.waiting:
            moving.until = moving.until or self._clock() + self._config.transfer_wait_s
            if self._clock() < moving.until:
                return False
        self._take(tracked, moving, connection, asked, answer)
        return True

    def _leading(self, pieces: Sequence[Piece], most_tokens: int) -> list[Piece]:
        """The leading pieces: at most so many tokens, of as many chunks as one question may name."""
        found, keys, at = list[Piece](), set[bytes](), 0
        for piece in pieces:
            keys.add(piece.key)
            count = min(piece.count, most_tokens - at)
            if count <= 0 or len(keys) > self._max_keys:
                break
            found.append(msgspec.structs.replace(piece, count=count))
            at += count
        return found

    def _is_more(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Whether so many tokens are worth it: at least a block more than the engine and the store have of its own."""
        return tokens >= max(tracked.node.hits.tokens, tracked.local_tokens) + self._layout.block_tokens

    def _question(self, tracked: TrackedRequest, pieces: Sequence[Piece], connection: Connection) -> Admit:
        parts: dict[bytes, Part] = {}
        for piece in pieces:  # a chunk may occur more than once
            before = parts.get(piece.key)
            parts[piece.key] = Part(piece.count + (before.count if before else 0), piece.shift)
        return Admit(
            list(parts),
            layers=self._layout.num_layers,
            shards=self._layout.num_shards,
            lease_s=self._config.lease_s,
            source=tracked.params.prefix_node or connection.node_name,  # what peers have is not known by names here
            wait_s=self._config.lookup_s / 2,
            request=tracked.request.request_id[:MAX_NAME],
            hints=Hints("", salt=tracked.hints.salt),
            moved=list(parts.values()),
        )

    def _take(
        self, tracked: TrackedRequest, moving: Moving, connection: Connection, asked: Asked, answer: Admitted
    ) -> None:
        """Make the leading pieces that are there the request's hits, if they are more than its own."""
        shards, pieces = self._layout.num_shards, moving.pieces or []
        keys = list(dict.fromkeys(piece.key for piece in pieces))[: 0 if answer.waiting else answer.hits]
        if len(answer.slots) < len(keys) * shards:
            raise ProtocolError(f"the node answers with {len(answer.slots)} slots of {len(keys)} chunks")
        slots = {key: answer.slots[at * shards : (at + 1) * shards] for at, key in enumerate(keys)}
        sources = {key: source_of(source) for key, source in zip(keys, answer.sources, strict=False)}
        runs, at = list[Run](), 0
        for piece in itertools.takewhile(lambda piece: piece.key in slots, pieces):
            whence = "moved" if piece.shift else sources.get(piece.key, SOURCES[0])
            runs.append(Run(slots[piece.key], piece.first, piece.count, at, piece.shift, whence))
            at += piece.count
        if not self._is_more(tracked, at):
            if answer.lease:
                connection.tell(Release(answer.lease))
            moving.refuse("what was known of it is not there any more")
            return
        self._lookup.release(tracked, connection)
        hits = tracked.node.hits._replace(tokens=at, lease=answer.lease, lease_s=answer.lease_s, moved=runs)
        tracked.node.found, tracked.node.hits, moving.hits = asked, hits, hits
        moved = sum(run.num_tokens for run in runs if run.shift)
        moving.verdict = Verdict("reuse", "accepted", f"{moved:,} of {at:,} tokens that are there are moved")

    def forget(self, tracked: TrackedRequest, connection: Connection | None) -> None:
        """Drop the pending question."""
        moving = tracked.moving
        if moving is None or moving.asked is None:
            return
        if connection is not None and moving.epoch == connection.epoch:
            connection.forget(moving.asked.seq)
        moving.asked = None
