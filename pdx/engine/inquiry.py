"""What the scheduler half asks the node about one request, from the first lookup to the last release.

A request is *decided* when its hits are leased and its misses have slots, or when that is known to be impossible.
Until then vLLM is told to ask again in the next step. All waiting in one step together takes no longer than `ASK_S`,
and every wait has a deadline. What may still come is waited for by the node: it answers when there is more.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from pdx.client.connection import Connection
from pdx.config import ConnectorConfig
from pdx.engine.request import Asked, Grant, TrackedRequest
from pdx.engine.step import BlockHasher
from pdx.errors import ArenaTooSmall, NodeError, ProtocolError
from pdx.memory.layout import KvLayout
from pdx.telemetry.timeline import Event
from pdx.wire.messages import (
    MAX_KEYS,
    MAX_SLOTS,
    Answer,
    Cancel,
    Found,
    Lookup,
    Mark,
    Release,
    Reserve,
    Reserved,
)

log = logging.getLogger("pdx")

ASK_S = 0.002
MISS_S = 1.0  # after so long, what was not there is asked for again; hits, at half of their lease
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
        self._step = 0
        self._patience_s = ASK_S  # what is left of this step's waiting
        self._ahead: deque[tuple[TrackedRequest, Asked]] = deque()  # room that was asked for ahead of a turn
        # What one message may name, and its answer hold.
        self._max_chunks = min(MAX_KEYS - 1, MAX_SLOTS // layout.num_shards - 1)

    def new_step(self, *, is_busy: bool) -> None:
        """A new scheduling step: it may wait again, unless requests are running that would wait with it."""
        self._step += 1
        self._patience_s = 0.0 if is_busy else ASK_S

    def begin(self, tracked: TrackedRequest, connection: Connection) -> None:
        """A new request: ask what vLLM will want to know when the request's turn comes. Never waits."""
        self._try(tracked, connection, self._ask)
        if tracked.reserve is not None and not tracked.is_prefill:  # a transfer whose room goes is given up
            self._ahead.append((tracked, tracked.reserve))

    def take_back(self, connection: Connection | None) -> None:
        """The turn of these has not come soon: others may fill their room sooner, and decoders wait for that."""
        while self._ahead and self._clock() - self._ahead[0][1].at > MISS_S:
            tracked, asked = self._ahead.popleft()
            if tracked.reserve is asked and connection is not None and tracked.epoch == connection.epoch:
                connection.forget(asked.seq)
                tracked.reserve = None

    def advance(self, tracked: TrackedRequest, connection: Connection) -> bool:
        """Ask the node, as far as needed; whether the request is decided now."""
        if not (tracked.decided and self._is_fresh(tracked)):
            self._try(tracked, connection, self._decide)
        return tracked.decided

    def _try(
        self,
        tracked: TrackedRequest,
        connection: Connection,
        step: Callable[[TrackedRequest, Connection], None],
    ) -> None:
        if tracked.epoch != connection.epoch:
            tracked.forget_node()
            tracked.epoch = connection.epoch
        try:
            step(tracked, connection)
        except (NodeError, ProtocolError) as error:
            log.warning("request %s runs without PDX: %s", tracked.request.request_id, error)
            connection.count("request_without_pdx")
            self.forget_asked(tracked, connection)
            self.give_up_transfer(tracked, connection)
            self.release(tracked, connection)
            tracked.found = None  # there is no answer that could be too old
            tracked.looked_up = tracked.reserved = tracked.decided = True

    def _decide(self, tracked: TrackedRequest, connection: Connection) -> None:
        tracked.looked_up = tracked.looked_up and self._is_fresh(tracked)
        tracked.decided = self._look_up(tracked, connection) and self._reserve(tracked, connection)

    def _is_fresh(self, tracked: TrackedRequest) -> bool:
        """Whether the last answer is young enough to say what is there."""
        found = tracked.found
        limit_s = self._config.lease_s / 2 if tracked.hit_slots else MISS_S
        return found is None or self._clock() - found.at <= limit_s

    def restart(self, tracked: TrackedRequest) -> None:
        """The request was preempted: what the store holds may be more by now. Its reservation stays."""
        tracked.scheduled = tracked.looked_up = tracked.decided = tracked.is_stale = False

    # ---- room that is not waited for --------------------------------------------------------

    def reserve_late(self, tracked: TrackedRequest, connection: Connection, end: int) -> None:
        """Room for chunks that generated tokens up to `end` have filled, and what `reserve_again` has asked for.

        Never waits: the answer is there in one of the next steps, and the blocks are still the request's then.
        """
        try:
            if tracked.late is None:
                self._ask_decoded(tracked, connection, end)
            elif (answer := self._collect(connection, tracked.late, Reserved, wait=False)) is not None:
                tracked.late = None
                self._take_grants(tracked, answer, tracked.late_first)
        except (NodeError, ProtocolError) as error:
            log.warning("chunks of request %s are not saved: %s", tracked.request.request_id, error)
            connection.count("save_skipped")
            tracked.late = None

    def _ask_decoded(self, tracked: TrackedRequest, connection: Connection, end: int) -> None:
        first = self._first_decoded(tracked)
        last = end // self._layout.chunk_tokens
        if not self._saves_decoded or last <= first:
            return
        tracked.late_first, tracked.decoded_end = first, last
        keys = tracked.chunk_keys(last)[first:]
        tracked.late = self._ask_now(connection, self._room_for(tracked, keys, None))

    @property
    def _saves_decoded(self) -> bool:
        return self._config.save and self._config.save_decode

    def _first_decoded(self, tracked: TrackedRequest) -> int:
        """The first chunk of generated tokens that has not been asked for."""
        return max(tracked.decoded_end, int(tracked.request.num_prompt_tokens) // self._layout.chunk_tokens)

    def reserve_again(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Chunks of the request were evicted before they were loaded: they are computed again, and saved."""
        if tracked.late is not None or tracked.is_stale or not self._config.save:
            return
        num_chunks = max(tracked.request.num_prompt_tokens // self._layout.chunk_tokens, tracked.decoded_end)
        keys = tracked.chunk_keys(min(num_chunks, self._max_chunks))
        if keys:
            tracked.late_first = 0
            tracked.late = self._ask_now(connection, self._room_for(tracked, keys, None))

    def is_due(self, tracked: TrackedRequest) -> bool:
        """Whether the next step of this request may have something to save, to ask or to tell."""
        if tracked.is_stale:
            return False
        if tracked.grants or tracked.late is not None or tracked.is_prefilling:
            return True
        next_end = (self._first_decoded(tracked) + 1) * self._layout.blocks_per_chunk
        return self._saves_decoded and len(tracked.block_ids) >= next_end

    # ---- looking up -------------------------------------------------------------------------

    def _ask(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Ask what is there; at once for room, too, unless what is missing may still come."""
        keys, _ = self._prompt_keys(tracked)
        may_come = self._may_come(tracked)
        if keys:
            wait_s = self._wait_s(tracked) if may_come else 0.0
            waits_for = tracked.transfer if tracked.is_decode and tracked.waits else None
            shards, lease_s = self._layout.num_shards, self._config.lease_s
            tracked.lookup = self._ask_now(connection, Lookup(keys, shards, lease_s, waits_for, tracked.source, wait_s))
        if not may_come and not tracked.reserved and tracked.reserve is None:
            self._ask_for_room(tracked, connection)

    def _wait_s(self, tracked: TrackedRequest) -> float:
        """How long the node may keep its answer back: so much less than `lookup_s` that silence is still noticed."""
        until = tracked.wait_until
        left_s = self._config.transfer_wait_s if until is None else max(0.0, until - self._clock())
        return min(self._config.lookup_s / 2, left_s)

    def _may_come(self, tracked: TrackedRequest) -> bool:
        return bool(tracked.source) or (tracked.is_decode and tracked.waits)

    def _look_up(self, tracked: TrackedRequest, connection: Connection) -> bool:
        if tracked.looked_up:
            return True
        if tracked.wait_until is None and self._may_come(tracked):
            tracked.wait_until = self._clock() + self._config.transfer_wait_s
        if tracked.lookup is None:
            self._ask(tracked, connection)
        asked = tracked.lookup
        if asked is None:  # no chunk is full
            tracked.looked_up = True
            return True
        answer = self._collect(connection, asked, Found)
        if answer is None:
            return False
        tracked.lookup = None
        if answer.waiting and self._waits_on(tracked, connection):
            return False
        self._take(tracked, connection, answer, asked)
        # One that could not have been taken sooner is taken whatever its age: steps may be as far apart.
        if self._step - asked.step > 1 and not self._is_fresh(tracked):
            self._ask(tracked, connection)
            return False
        tracked.looked_up = True
        tracked.waits = False  # from now on what is being filled may be this request's own to fill
        return True

    def _waits_on(self, tracked: TrackedRequest, connection: Connection) -> bool:
        """Whether to ask again, because what is missing may still come; or for once what is here."""
        now, limit_s = self._clock(), self._config.transfer_wait_s
        if tracked.wait_until is None:
            tracked.wait_until = now + limit_s
        if now < tracked.wait_until:
            return True
        if tracked.source and not tracked.is_decode:
            # The node ends that by its own deadline (`fetch_s`). Should it not, the next question is about this node
            # alone, and its answer has a lease on what is here.
            log.warning("request %s goes on without chunks of %s", tracked.request.request_id, tracked.source)
            connection.count("source_late")
            tracked.asks_source = False
            return True
        log.warning("transfer %s did not arrive within %s s", tracked.transfer, limit_s)
        connection.count("transfer_late")
        tracked.waits = False
        return False

    def _prompt_keys(self, tracked: TrackedRequest) -> tuple[list[bytes], bool]:
        """Keys to look up, and whether the last one is a tail."""
        if tracked.request.num_preemptions:  # what was generated is there, too; the tail was for one reader
            return self._keys(tracked, tracked.request.num_tokens), False
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

    def _take(self, tracked: TrackedRequest, connection: Connection, answer: Found, asked: Asked) -> None:
        """These are the hits now, in the place of those there were."""
        self.release(tracked, connection)
        is_first, tracked.found = tracked.found is None, asked
        tracked.asks_source = False  # it has had its turn
        if not answer.waiting:
            self._take_hits(tracked, answer)
        if tracked.is_decode and is_first:
            self.mark(tracked, connection, Event.FOUND, tokens=tracked.hit_tokens)

    def _take_hits(self, tracked: TrackedRequest, answer: Found) -> None:
        shards, chunk_tokens = self._layout.num_shards, self._layout.chunk_tokens
        keys, has_tail = self._prompt_keys(tracked)
        tracked.hit_slots = [answer.slots[start : start + shards] for start in range(0, answer.hits * shards, shards)]
        has_tail = has_tail and answer.hits == len(keys)
        tracked.hit_tokens = tracked.transfer_tokens if has_tail else answer.hits * chunk_tokens
        tracked.lease = answer.lease
        tracked.reserved = tracked.reserved and self._is_covered(tracked)

    def _is_covered(self, tracked: TrackedRequest) -> bool:
        """Whether all chunks of the prompt are hits or have room. If not, what was there may be gone."""
        granted = {grant.first_block // self._layout.blocks_per_chunk for grant in tracked.grants}
        num_chunks = tracked.request.num_prompt_tokens // self._layout.chunk_tokens
        return granted.issuperset(range(len(tracked.hit_slots), num_chunks))

    # ---- reserving --------------------------------------------------------------------------

    def _ask_for_room(self, tracked: TrackedRequest, connection: Connection) -> None:
        keys = self._keys(tracked, tracked.request.num_prompt_tokens)
        tail = self._tail(tracked) if tracked.is_prefill else None
        if self._config.save and (keys or tail):
            room = self._room_for(tracked, keys, tail, push_to=tracked.push_to)
            tracked.reserve = self._ask_now(connection, room)
        else:
            tracked.reserved = True

    def _reserve(self, tracked: TrackedRequest, connection: Connection) -> bool:
        if not tracked.reserved and tracked.reserve is None:
            self._ask_for_room(tracked, connection)
        if tracked.reserve is None:
            return True
        try:
            answer = self._collect(connection, tracked.reserve, Reserved)
        except ArenaTooSmall:
            answer = Reserved([], [], full=True)
            tracked.room_until = self._clock()  # waiting does not help
        if answer is None:
            return False
        asked, tracked.reserve = tracked.reserve, None
        if answer.full and not tracked.takes_part:
            tracked.takes_part = not self._may_wait_for_room(tracked, connection)
            return False
        self._take_grants(tracked, answer, 0)
        if tracked.found is not None and asked.seq < tracked.found.seq and not self._is_covered(tracked):
            return False  # room was asked for before the hits were, and some had gone meanwhile
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

    def _may_wait_for_room(self, tracked: TrackedRequest, connection: Connection) -> bool:
        now = self._clock()
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
            end = min(first + per_chunk, num_blocks)
            tracked.grants.append(Grant(slots, first, end, is_pushed=answer.is_pushed))
            tracked.saved_blocks = min(tracked.saved_blocks, first)

    # ---- answers, leases, the end -----------------------------------------------------------

    def _ask_now(self, connection: Connection, body: Lookup | Reserve) -> Asked:
        return Asked(connection.ask(body), self._clock(), self._step)

    def _collect(self, connection: Connection, asked: Asked, kind: type[_A], *, wait: bool = True) -> _A | None:
        """The answer, if it is there.

        :raises NodeError: the node refused, or has been silent for too long for somebody who waits.
        """
        start = time.monotonic()
        answer = connection.collect(asked.seq, self._patience_s if wait else 0.0)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - start))
        if answer is None and wait and self._clock() - asked.at >= self._config.lookup_s:
            raise NodeError(f"the node did not answer within {self._config.lookup_s} s")
        if answer is not None and not isinstance(answer, kind):
            raise ProtocolError(f"the node answers {type(answer).__name__}, expected {kind.__name__}")
        return answer

    def release(self, tracked: TrackedRequest, connection: Connection | None) -> None:
        """The request's hits are loaded or not needed."""
        if tracked.lease and connection is not None and connection.epoch == tracked.epoch:
            connection.tell(Release(tracked.lease))
        tracked.lease = 0
        tracked.hit_slots, tracked.hit_tokens = [], 0

    def forget_asked(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Nobody waits for what the node was asked."""
        for asked in (tracked.lookup, tracked.reserve, tracked.late):
            if asked is not None:
                connection.forget(asked.seq)
        tracked.lookup = tracked.reserve = tracked.late = None

    def give_up_transfer(self, tracked: TrackedRequest, connection: Connection) -> None:
        """A decoder that waits for this prefill shall stop waiting."""
        if tracked.is_prefill and tracked.transfer is not None:
            connection.tell(Cancel(tracked.transfer))

    def mark(self, tracked: TrackedRequest, connection: Connection, event: Event, *, tokens: int = 0) -> None:
        """A moment in the timeline of the request's transfer."""
        if tracked.transfer is not None:
            connection.tell(Mark(tracked.transfer, event, time.monotonic_ns(), tokens=tokens))
