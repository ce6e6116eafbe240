"""What the scheduler half asks the node about one request, from the first lookup to the last release.

A request is *decided* when its hits are leased and its misses have slots, or when that is known to be impossible.
Until then every scheduling step asks again; all waiting in one step together takes no longer than `ASK_S`, and every
wait has a deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from pdx.config import ConnectorConfig
from pdx.connection import Connection
from pdx.errors import ArenaTooSmall, NodeError, ProtocolError
from pdx.layout import KvLayout
from pdx.messages import (
    MAX_KEYS,
    MAX_SLOTS,
    Answer,
    Cancel,
    Found,
    Lookup,
    Mark,
    Release,
    Renew,
    Reserve,
    Reserved,
)
from pdx.timeline import Event
from pdx.vllm.request import BlockHasher, Grant, TrackedRequest

log = logging.getLogger("pdx")

ASK_S = 0.002
_A = TypeVar("_A", bound=Answer)


class Inquiry:
    """Asks the node on behalf of requests; what is known is kept in the request. One thread: the scheduler's."""

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KvLayout,
        hasher: BlockHasher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = layout
        self._hasher = hasher
        self._clock = clock
        self._patience_s = ASK_S  # what is left of this step's waiting
        # What one message may name, and its answer hold.
        self._max_chunks = min(MAX_KEYS - 1, MAX_SLOTS // layout.num_shards - 1)

    def new_step(self) -> None:
        """A new scheduling step: it may wait again."""
        self._patience_s = ASK_S

    def advance(self, tracked: TrackedRequest, connection: Connection) -> bool:
        """Ask the node, as far as needed; whether the request is decided now."""
        if tracked.decided:
            self._keep_lease(tracked, connection)
            return True
        now = self._clock()
        if tracked.epoch != connection.epoch:
            tracked.forget_node()
            tracked.epoch = connection.epoch
        try:
            tracked.decided = self._look_up(tracked, connection, now) and self._reserve(tracked, connection, now)
        except (NodeError, ProtocolError) as error:
            log.warning("request %s runs without PDX: %s", tracked.request.request_id, error)
            connection.count("request_without_pdx")
            self.forget_asked(tracked, connection)
            self.give_up_transfer(tracked, connection)
            tracked.decided = True
        return tracked.decided

    def restart(self, tracked: TrackedRequest) -> None:
        """The request was preempted: what the store holds may be more by now. Its reservation stays."""
        tracked.scheduled = tracked.decided = False

    def reserve_decoded(self, tracked: TrackedRequest, connection: Connection, end: int) -> None:
        """Room for chunks that generated tokens up to `end` have filled.

        Never waits: the answer is there in one of the next steps, and the blocks are still the request's then.
        """
        try:
            if tracked.decoded_seq is None:
                self._ask_decoded(tracked, connection, end)
            elif (answer := self._collect(connection, tracked.decoded_seq, Reserved, wait=False)) is not None:
                tracked.decoded_seq = None
                self._take_grants(tracked, answer, tracked.decoded_first)
        except (NodeError, ProtocolError) as error:
            log.warning("generated chunks of request %s are not saved: %s", tracked.request.request_id, error)
            connection.count("save_skipped")
            tracked.decoded_seq = None

    def _ask_decoded(self, tracked: TrackedRequest, connection: Connection, end: int) -> None:
        chunk_tokens = self._layout.chunk_tokens
        first = max(tracked.decoded_end, tracked.request.num_prompt_tokens // chunk_tokens)
        if not (self._config.save and self._config.save_decode) or end // chunk_tokens <= first:
            return
        tracked.decoded_first, tracked.decoded_end = first, end // chunk_tokens
        keys = tracked.chunk_keys(tracked.decoded_end)[first:]
        tracked.decoded_seq = connection.ask(self._room_for(tracked, keys, None))

    # ---- looking up -------------------------------------------------------------------------

    def _look_up(self, tracked: TrackedRequest, connection: Connection, now: float) -> bool:
        if tracked.hit_slots or tracked.reserve_seq is not None:
            return True
        keys, has_tail = self._prompt_keys(tracked)
        if not keys:
            return True
        if tracked.lookup_seq is None:
            waits_for = tracked.transfer if tracked.is_decode else None
            shards, lease_s = self._layout.num_shards, self._config.lease_s
            tracked.ask_until = now + self._config.lookup_s
            tracked.lookup_seq = connection.ask(Lookup(keys, shards, lease_s, waits_for, tracked.source))
        answer = self._collect(connection, tracked.lookup_seq, Found)
        if answer is None:
            return self._is_too_late(tracked, now, "lookup")
        tracked.lookup_seq = None
        if answer.waiting and tracked.source and not tracked.is_decode:
            self._wait_for_source(tracked, connection, now)
            return False
        if answer.waiting and self._may_wait_for_transfer(tracked, connection, now):
            return False
        tracked.asks_source = False  # it has had its turn
        if not answer.waiting:
            self._take_hits(tracked, answer, has_tail=has_tail and answer.hits == len(keys))
        if tracked.is_decode:
            self.mark(tracked, connection, Event.FOUND, tokens=tracked.hit_tokens)
        return True

    def _prompt_keys(self, tracked: TrackedRequest) -> tuple[list[bytes], bool]:
        """Keys to look up, and whether the last one is a tail."""
        if tracked.is_decode and tracked.transfer_tokens:
            keys = self._keys(tracked, tracked.transfer_tokens)
            tail = self._tail(tracked)
            if tail is not None:
                return [*keys, tail[0]], True
        return self._keys(tracked, tracked.request.num_prompt_tokens), False

    def _keys(self, tracked: TrackedRequest, num_tokens: int) -> list[bytes]:
        return tracked.chunk_keys(min(num_tokens // self._layout.chunk_tokens, self._max_chunks))

    def _tail(self, tracked: TrackedRequest) -> tuple[bytes, int] | None:
        """The tail of the request's transfer, unless its prompt is so long that the tail would not follow the keys."""
        if tracked.transfer_tokens // self._layout.chunk_tokens > self._max_chunks:
            return None
        return tracked.tail(self._hasher)

    def _may_wait_for_transfer(self, tracked: TrackedRequest, connection: Connection, now: float) -> bool:
        if tracked.transfer_until is None:
            tracked.transfer_until = now + self._config.transfer_wait_s
        if now < tracked.transfer_until:
            return True
        log.warning("transfer %s did not arrive within %s s", tracked.transfer, self._config.transfer_wait_s)
        connection.count("transfer_late")
        return False

    def _wait_for_source(self, tracked: TrackedRequest, connection: Connection, now: float) -> None:
        """A prefill waits for chunks that a peer sends back. The node ends that by its own deadline (`fetch_s`); should
        it not, the next question is about this node alone, and its answer has a lease on what is here."""
        if tracked.source_until is None:
            tracked.source_until = now + self._config.transfer_wait_s
        if now < tracked.source_until:
            return
        log.warning("request %s goes on without chunks of %s", tracked.request.request_id, tracked.source)
        connection.count("source_late")
        tracked.asks_source = False

    def _take_hits(self, tracked: TrackedRequest, answer: Found, *, has_tail: bool) -> None:
        shards = self._layout.num_shards
        tracked.hit_slots = [answer.slots[start : start + shards] for start in range(0, answer.hits * shards, shards)]
        tracked.hit_tokens = tracked.transfer_tokens if has_tail else answer.hits * self._layout.chunk_tokens
        tracked.lease = answer.lease
        tracked.lease_renew_at = self._clock() + self._config.lease_s / 2

    # ---- reserving --------------------------------------------------------------------------

    def _reserve(self, tracked: TrackedRequest, connection: Connection, now: float) -> bool:
        if tracked.reserved or not self._config.save:
            return True
        if tracked.reserve_seq is None:
            keys = self._keys(tracked, tracked.request.num_prompt_tokens)
            tail = self._tail(tracked) if tracked.is_prefill else None
            if not keys and not tail:
                tracked.reserved = True
                return True
            tracked.ask_until = now + self._config.lookup_s
            tracked.reserve_seq = connection.ask(self._room_for(tracked, keys, tail, push_to=tracked.push_to))
        try:
            answer = self._collect(connection, tracked.reserve_seq, Reserved)
        except ArenaTooSmall:
            answer = Reserved([], [], full=True)
            tracked.room_until = now  # waiting does not help
        if answer is None:
            return self._is_too_late(tracked, now, "reservation")
        tracked.reserve_seq = None
        if answer.full and not tracked.takes_part:
            tracked.takes_part = not self._may_wait_for_room(tracked, connection, now)
            return False
        self._take_grants(tracked, answer, 0)
        tracked.reserved = True
        if tracked.is_prefill:
            self.mark(tracked, connection, Event.ADMITTED, tokens=tracked.hit_tokens)
        return True

    def _room_for(
        self, tracked: TrackedRequest, keys: list[bytes], tail: tuple[bytes, int] | None, *, push_to: str = ""
    ) -> Reserve:
        """A prefill leg wants all or nothing as long as it may wait; everybody else takes what there is.

        What is pushed are all keys, so this is asked even where all of them are here.
        """
        return Reserve(
            [*keys, tail[0]] if tail else keys,
            self._layout.chunk_bytes,
            self._layout.num_layers,
            self._layout.num_shards,
            self._layout.num_blocks_bytes(tail[1]) if tail else 0,
            partial=tracked.takes_part,
            transfer=tracked.transfer if tracked.is_prefill else None,
            push_to=push_to,
        )

    def _may_wait_for_room(self, tracked: TrackedRequest, connection: Connection, now: float) -> bool:
        if tracked.room_until is None:
            tracked.room_until = now + self._config.reserve_wait_s
        if now < tracked.room_until:
            return True
        log.warning(
            "no room in the arena for request %s within %s s: the rest of its prompt is not transferred",
            tracked.request.request_id,
            self._config.reserve_wait_s,
        )
        connection.count("no_room")
        return False

    def _take_grants(self, tracked: TrackedRequest, answer: Reserved, first_chunk: int) -> None:
        """Keep the slots of the chunks `first_chunk` + granted index; the last one may be a tail."""
        shards, per_chunk = self._layout.num_shards, self._layout.blocks_per_chunk
        num_blocks = max(self._layout.num_blocks(tracked.request.num_prompt_tokens), tracked.decoded_end * per_chunk)
        for number, index in enumerate(answer.granted):
            slots = answer.slots[number * shards : (number + 1) * shards]
            first = (first_chunk + index) * per_chunk
            tracked.grants.append(Grant(slots, first, min(first + per_chunk, num_blocks)))
            tracked.saved_blocks = min(tracked.saved_blocks, first)

    # ---- answers, leases, the end -----------------------------------------------------------

    def _collect(self, connection: Connection, seq: int, kind: type[_A], *, wait: bool = True) -> _A | None:
        start = time.monotonic()
        answer = connection.collect(seq, self._patience_s if wait else 0.0)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - start))
        if answer is not None and not isinstance(answer, kind):
            raise ProtocolError(f"the node answers {type(answer).__name__}, expected {kind.__name__}")
        return answer

    def _is_too_late(self, tracked: TrackedRequest, now: float, what: str) -> bool:
        if now < tracked.ask_until:
            return False
        raise NodeError(f"the node did not answer the {what} in time")

    def _keep_lease(self, tracked: TrackedRequest, connection: Connection) -> None:
        if tracked.lease and self._clock() >= tracked.lease_renew_at:
            tracked.lease_renew_at = self._clock() + self._config.lease_s / 2
            connection.tell(Renew(tracked.lease, self._config.lease_s))

    def release(self, tracked: TrackedRequest, connection: Connection | None) -> None:
        """The request's hits are loaded or not needed."""
        if tracked.lease and connection is not None and connection.epoch == tracked.epoch:
            connection.tell(Release(tracked.lease))
        tracked.lease = 0
        tracked.hit_slots, tracked.hit_tokens = [], 0

    def forget_asked(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Nobody waits for what the node was asked."""
        for seq in (tracked.lookup_seq, tracked.reserve_seq, tracked.decoded_seq):
            if seq is not None:
                connection.forget(seq)
        tracked.lookup_seq = tracked.reserve_seq = tracked.decoded_seq = None

    def give_up_transfer(self, tracked: TrackedRequest, connection: Connection) -> None:
        """A decoder that waits for this prefill shall stop waiting."""
        if tracked.is_prefill and tracked.transfer is not None:
            connection.tell(Cancel(tracked.transfer))

    def mark(self, tracked: TrackedRequest, connection: Connection, event: Event, *, tokens: int = 0) -> None:
        """A moment in the timeline of the request's transfer."""
        if tracked.transfer is not None:
            connection.tell(Mark(tracked.transfer, event, time.monotonic_ns(), tokens=tokens))
