"""What the scheduler half asks the node about one request, from the first lookup to the last release.

A request is *decided* when its hits are leased and its misses have slots, or when that is known to be impossible.
Until then every scheduling step asks again; no call waits longer than `ASK_S`, and every wait has a deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from pdx.config import ConnectorConfig
from pdx.connection import Connection
from pdx.errors import NodeError, ProtocolError
from pdx.layout import KvLayout
from pdx.messages import Abort, Answer, Cancel, Found, Lookup, Mark, Release, Renew, Reserve, Reserved
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

    def advance(self, tracked: TrackedRequest, connection: Connection) -> bool:
        """Ask the node, as far as needed; whether the request is decided now."""
        if tracked.decided:
            self._keep_lease(tracked, connection)
            return True
        now = self._clock()
        if tracked.epoch != connection.epoch:
            tracked.forget_node()
            tracked.epoch = connection.epoch
            tracked.ask_until = now + self._config.lookup_s
        try:
            tracked.decided = self._look_up(tracked, connection, now) and self._reserve(tracked, connection, now)
        except (NodeError, ProtocolError) as error:
            log.warning("request %s runs without PDX: %s", tracked.request.request_id, error)
            self.forget_asked(tracked, connection)
            self.give_up_transfer(tracked, connection)
            tracked.decided = True
        return tracked.decided

    def restart(self, tracked: TrackedRequest) -> None:
        """The request was preempted: what the store holds may be more by now. Its reservation stays."""
        tracked.scheduled = tracked.decided = False
        tracked.ask_until = self._clock() + self._config.lookup_s

    def reserve_decoded(self, tracked: TrackedRequest, connection: Connection, end: int) -> None:
        """Room for chunks that generated tokens up to `end` have filled.

        Never waits: the answer is there in one of the next steps, and the blocks are still the request's then.
        """
        try:
            if tracked.decoded_seq is None:
                self._ask_decoded(tracked, connection, end)
            elif (answer := self._collect(connection, tracked.decoded_seq, Reserved, 0.0)) is not None:
                tracked.decoded_seq = None
                self._take_grants(tracked, answer, tracked.decoded_first)
        except (NodeError, ProtocolError) as error:
            log.warning("generated chunks of request %s are not saved: %s", tracked.request.request_id, error)
            tracked.decoded_seq = None

    def _ask_decoded(self, tracked: TrackedRequest, connection: Connection, end: int) -> None:
        chunk_tokens = self._layout.chunk_tokens
        first = max(tracked.decoded_end, tracked.request.num_prompt_tokens // chunk_tokens)
        if not self._config.save_decode or end // chunk_tokens <= first:
            return
        tracked.decoded_first, tracked.decoded_end = first, end // chunk_tokens
        keys = tracked.chunk_keys(tracked.decoded_end)[first:]
        tracked.decoded_seq = self._ask_room(tracked, connection, keys, None)

    # ---- looking up -------------------------------------------------------------------------

    def _look_up(self, tracked: TrackedRequest, connection: Connection, now: float) -> bool:
        if tracked.hit_slots or tracked.reserve_seq is not None:
            return True
        keys, has_tail = self._prompt_keys(tracked)
        if not keys:
            return True
        if tracked.lookup_seq is None:
            waits_for = tracked.transfer if tracked.is_decode else None
            tracked.lookup_seq = connection.ask(Lookup(keys, self._layout.num_shards, self._config.lease_s, waits_for))
        answer = self._collect(connection, tracked.lookup_seq, Found)
        if answer is None:
            return self._is_too_late(tracked, now, "lookup")
        tracked.lookup_seq = None
        if answer.waiting and self._may_wait_for_transfer(tracked, now):
            return False
        if not answer.waiting:
            self._take_hits(tracked, answer, has_tail=has_tail and answer.hits == len(keys))
        if tracked.is_decode:
            self.mark(tracked, connection, Event.FOUND, tokens=tracked.hit_tokens)
        return True

    def _prompt_keys(self, tracked: TrackedRequest) -> tuple[list[bytes], bool]:
        """Keys to look up, and whether the last one is a tail."""
        if tracked.is_decode and tracked.transfer_tokens:
            keys = tracked.chunk_keys(tracked.transfer_tokens // self._layout.chunk_tokens)
            tail = tracked.tail(self._hasher)
            if tail is not None:
                return [*keys, tail[0]], True
        return tracked.chunk_keys(tracked.request.num_prompt_tokens // self._layout.chunk_tokens), False

    def _may_wait_for_transfer(self, tracked: TrackedRequest, now: float) -> bool:
        if tracked.transfer_until is None:
            tracked.transfer_until = now + self._config.transfer_wait_s
        tracked.ask_until = now + self._config.lookup_s
        if now < tracked.transfer_until:
            return True
        log.warning("transfer %s did not arrive within %s s", tracked.transfer, self._config.transfer_wait_s)
        return False

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
            keys = tracked.chunk_keys(tracked.request.num_prompt_tokens // self._layout.chunk_tokens)
            tail = tracked.tail(self._hasher) if tracked.is_prefill else None
            if not keys and not tail:
                tracked.reserved = True
                return True
            tracked.reserve_seq = self._ask_room(tracked, connection, keys, tail)
        answer = self._collect(connection, tracked.reserve_seq, Reserved)
        if answer is None:
            return self._is_too_late(tracked, now, "reservation")
        tracked.reserve_seq = None
        if answer.full and tracked.is_prefill and self._may_wait_for_room(tracked, now):
            connection.tell(Abort(answer.slots, unused=True))
            return False
        self._take_grants(tracked, answer, 0)
        tracked.reserved = True
        if tracked.is_prefill:
            self.mark(tracked, connection, Event.ADMITTED, tokens=tracked.hit_tokens)
        return True

    def _ask_room(
        self, tracked: TrackedRequest, connection: Connection, keys: list[bytes], tail: tuple[bytes, int] | None
    ) -> int:
        return connection.ask(
            Reserve(
                [*keys, tail[0]] if tail else keys,
                self._layout.chunk_bytes,
                self._layout.num_layers,
                self._layout.num_shards,
                self._layout.num_blocks_bytes(tail[1]) if tail else 0,
                partial=True,
                transfer=tracked.transfer if tracked.is_prefill else None,
            )
        )

    def _may_wait_for_room(self, tracked: TrackedRequest, now: float) -> bool:
        if tracked.room_until is None:
            tracked.room_until = now + self._config.reserve_wait_s
        tracked.ask_until = now + self._config.lookup_s
        if now < tracked.room_until:
            return True
        log.warning(
            "no room in the arena for request %s within %s s: the rest of its prompt is not transferred",
            tracked.request.request_id,
            self._config.reserve_wait_s,
        )
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

    def _collect(self, connection: Connection, seq: int, kind: type[_A], timeout_s: float = ASK_S) -> _A | None:
        answer = connection.collect(seq, timeout_s)
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
