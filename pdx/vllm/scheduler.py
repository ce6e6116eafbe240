"""The scheduler half: asks the node what is there, reserves room, and plans each step for the workers.

Runs on the engine core's thread. It never waits for the node longer than `ASK_S` in one call; while the node has not
decided, the request is skipped and asked for again in the next step, until a deadline of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pdx.config import ConnectorConfig
from pdx.connection import Connection
from pdx.errors import NodeError, ProtocolError
from pdx.layout import KvLayout
from pdx.messages import (
    VERSION,
    Abort,
    Answer,
    Cancel,
    Found,
    Hello,
    Lookup,
    Mark,
    Release,
    Renew,
    Reserve,
    Reserved,
    Slot,
)
from pdx.timeline import Event
from pdx.vllm.link import NodeLink
from pdx.vllm.params import TransferParams, parse_params
from pdx.vllm.plan import LoadPlan, PagesPlan, SavePlan, StepPlan
from pdx.vllm.request import BlockHasher, Grant, TrackedRequest

log = logging.getLogger("pdx")

ASK_S = 0.002
_A = TypeVar("_A", bound=Answer)


class SchedulerHalf:
    """One per engine. All methods are called by vLLM's scheduler, on its thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KvLayout,
        engine: str,
        hasher: BlockHasher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = layout
        self._hasher = hasher
        self._clock = clock
        self._requests: dict[str, TrackedRequest] = {}
        self._loads: list[LoadPlan] = []
        self._aborts: list[list[Slot]] = []
        self._finished_loading: dict[str, tuple[int, int]] = {}  # finished while loading: (epoch, lease)
        hello = Hello(VERSION, os.getpid(), "scheduler", engine=engine, role=config.role, url=config.url)
        self._link = NodeLink(config, hello, starter=True)

    # ---- new requests -----------------------------------------------------------------------

    def track(self, request: Any) -> TrackedRequest:
        """The request's state; made at its first sight."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = TrackedRequest(request, self._layout, self._params(request))
            self._requests[request.request_id] = tracked
            self._tell_load()
        return tracked

    def _params(self, request: Any) -> TransferParams | None:
        try:
            return parse_params(request.kv_transfer_params)
        except ProtocolError as error:
            log.warning("request %s runs without a transfer: %s", request.request_id, error)
            return None

    def _tell_load(self) -> None:
        connection = self._link.connection
        if connection is not None:
            connection.running = len(self._requests)

    # ---- how much is there ------------------------------------------------------------------

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that the store holds for this request; None: ask again."""
        tracked = self.track(request)
        if tracked.scheduled:  # preempted: what the store holds may be more by now
            tracked.scheduled = tracked.decided = False
            tracked.ask_until = self._clock() + self._config.lookup_s
        if tracked.loaded_for == request.num_preemptions:
            return 0  # its load failed: recompute
        connection = self._link.connection
        if connection is None or (tracked.decided and tracked.epoch != connection.epoch):
            self._forget_node(tracked)
            return 0
        if not tracked.decided and not self._decide(tracked, connection):
            return None
        self._keep_lease(tracked, connection)
        return max(0, tracked.hit_tokens - local_tokens)

    def _decide(self, tracked: TrackedRequest, connection: Connection) -> bool:
        """Ask the node, as far as needed; whether all is known now."""
        now = self._clock()
        if tracked.epoch != connection.epoch:
            self._forget_node(tracked)
            tracked.epoch = connection.epoch
            tracked.ask_until = now + self._config.lookup_s
        try:
            return self._look_up(tracked, connection, now) and self._reserve(tracked, connection, now)
        except (NodeError, ProtocolError) as error:
            log.warning("request %s runs without PDX: %s", tracked.request.request_id, error)
            self._forget_asked(tracked, connection)
            self._give_up_transfer(tracked, connection)
            tracked.decided = True
            return True

    def _look_up(self, tracked: TrackedRequest, connection: Connection, now: float) -> bool:
        if tracked.lease or tracked.reserve_seq is not None or tracked.hit_slots:
            return True
        keys, tail = self._prompt_keys(tracked)
        if not keys:
            return True
        if tracked.lookup_seq is None:
            waits_for = tracked.transfer if tracked.is_decode else None
            tracked.lookup_seq = connection.ask(Lookup(keys, self._layout.num_shards, self._config.lease_s, waits_for))
        answer = self._collect(connection, tracked.lookup_seq, Found)
        if answer is None:
            return self._is_too_late(tracked, now, "lookup")
        tracked.lookup_seq = None
        if answer.waiting:
            if tracked.transfer_until is None:
                tracked.transfer_until = now + self._config.transfer_wait_s
            tracked.ask_until = now + self._config.lookup_s
            if now < tracked.transfer_until:
                return False
            log.warning("transfer %s did not arrive within %s s", tracked.transfer, self._config.transfer_wait_s)
            answer = Found(0, [])
        self._take_hits(tracked, answer, connection, has_tail=tail and answer.hits == len(keys))
        return True

    def _prompt_keys(self, tracked: TrackedRequest) -> tuple[list[bytes], bool]:
        """Keys to look up, and whether the last one is a tail."""
        if tracked.is_decode and tracked.transfer_tokens:
            keys = tracked.chunk_keys(tracked.transfer_tokens // self._layout.chunk_tokens)
            tail = tracked.tail(self._hasher)
            if tail is not None:
                return [*keys, tail[0]], True
        return tracked.chunk_keys(tracked.request.num_prompt_tokens // self._layout.chunk_tokens), False

    def _take_hits(self, tracked: TrackedRequest, answer: Found, connection: Connection, *, has_tail: bool) -> None:
        shards = self._layout.num_shards
        tracked.hit_slots = [answer.slots[start : start + shards] for start in range(0, answer.hits * shards, shards)]
        tracked.hit_tokens = tracked.transfer_tokens if has_tail else answer.hits * self._layout.chunk_tokens
        tracked.lease = answer.lease
        tracked.lease_renew_at = self._clock() + self._config.lease_s / 2
        if tracked.is_decode:
            self._mark(tracked, connection, Event.FOUND, tokens=tracked.hit_tokens)

    def _reserve(self, tracked: TrackedRequest, connection: Connection, now: float) -> bool:
        if tracked.reserved or not self._config.save:
            tracked.decided = True
            return True
        if tracked.reserve_seq is None:
            keys = tracked.chunk_keys(tracked.request.num_prompt_tokens // self._layout.chunk_tokens)
            tail = tracked.tail(self._hasher) if tracked.is_prefill else None
            if not keys and not tail and not tracked.is_prefill:
                tracked.decided = tracked.reserved = True
                return True
            tracked.reserve_seq = self._ask_room(tracked, connection, keys, tail)
        answer = self._collect(connection, tracked.reserve_seq, Reserved)
        if answer is None:
            return self._is_too_late(tracked, now, "reservation")
        tracked.reserve_seq = None
        if answer.full and tracked.is_prefill and self._may_wait_for_room(tracked, now):
            connection.tell(Abort(answer.slots, unused=True))
            return False
        self._take_grants(tracked, answer)
        tracked.decided = tracked.reserved = True
        if tracked.is_prefill:
            self._mark(tracked, connection, Event.ADMITTED, tokens=tracked.hit_tokens)
        return True

    def _ask_room(
        self,
        tracked: TrackedRequest,
        connection: Connection,
        keys: list[bytes],
        tail: tuple[bytes, int] | None,
    ) -> int:
        tracked.reserve_keys = [*keys, tail[0]] if tail else keys
        return connection.ask(
            Reserve(
                tracked.reserve_keys,
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
            tracked.ask_until = tracked.room_until + self._config.lookup_s
        if now < tracked.room_until:
            return True
        log.warning(
            "no room in the arena for request %s within %s s: the rest of its prompt is not transferred",
            tracked.request.request_id,
            self._config.reserve_wait_s,
        )
        return False

    def _take_grants(self, tracked: TrackedRequest, answer: Reserved) -> None:
        shards, per_chunk = self._layout.num_shards, self._layout.blocks_per_chunk
        num_blocks = self._layout.num_blocks(tracked.request.num_prompt_tokens)
        for number, index in enumerate(answer.granted):
            slots = answer.slots[number * shards : (number + 1) * shards]
            first = index * per_chunk
            tracked.grants.append(Grant(slots, first, min(first + per_chunk, num_blocks)))

    def _collect(self, connection: Connection, seq: int, kind: type[_A]) -> _A | None:
        answer = connection.collect(seq, ASK_S)
        if answer is not None and not isinstance(answer, kind):
            raise ProtocolError(f"the node answers {type(answer).__name__}, expected {kind.__name__}")
        return answer

    def _is_too_late(self, tracked: TrackedRequest, now: float, what: str) -> bool:
        if tracked.ask_until is None or now < tracked.ask_until:
            return False
        raise NodeError(f"the node did not answer the {what} in time")

    def _keep_lease(self, tracked: TrackedRequest, connection: Connection) -> None:
        if tracked.lease and self._clock() >= tracked.lease_renew_at:
            tracked.lease_renew_at = self._clock() + self._config.lease_s / 2
            connection.tell(Renew(tracked.lease, self._config.lease_s))

    # ---- allocated --------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: list[int], num_external: int) -> None:
        """vLLM gave the request these blocks; `num_external` tokens of them are to be loaded."""
        tracked = self.track(request)
        tracked.block_ids = list(block_ids)
        tracked.scheduled = True
        if num_external:
            tracked.loading = True
            tracked.loaded_for = request.num_preemptions
            self._loads.append(self._load_plan(tracked, num_external))
        elif not tracked.loading:
            self._release(tracked)

    def _load_plan(self, tracked: TrackedRequest, num_external: int) -> LoadPlan:
        per_chunk = self._layout.blocks_per_chunk
        first_block = (tracked.hit_tokens - num_external) // self._layout.block_tokens
        end_block = self._layout.num_blocks(tracked.hit_tokens)
        pages = []
        for index, slots in enumerate(tracked.hit_slots):
            chunk_first = index * per_chunk
            chunk_end = min(chunk_first + per_chunk, end_block)
            start = max(chunk_first, first_block)
            if start < chunk_end:
                pages.append(
                    PagesPlan(
                        slots,
                        num_blocks=chunk_end - chunk_first,
                        first=start - chunk_first,
                        block_ids=tracked.block_ids[start:chunk_end],
                    )
                )
        return LoadPlan(tracked.request.request_id, tracked.transfer, pages)

    def loaded(self, request_id: str) -> None:
        """All workers have scattered the request's chunks, or have given up on them."""
        if request_id in self._finished_loading:
            epoch, lease = self._finished_loading.pop(request_id)
            connection = self._link.connection
            if connection is not None and connection.epoch == epoch:
                connection.tell(Release(lease))
            return
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.loading = False
        self._release(tracked)
        connection = self._link.connection
        if connection is not None and tracked.is_decode:
            self._mark(tracked, connection, Event.RUNNABLE)

    # ---- each step --------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepPlan:
        """What the workers do in this step."""
        connection = self._link.connection
        loads, self._loads = self._loads, []
        aborts, self._aborts = self._aborts, []
        saves = list(self._saves(output, connection))
        return StepPlan(
            connection.epoch if connection is not None else 0,
            saves,
            loads,
            aborts,
            output.total_num_scheduled_tokens,
        )

    def _saves(self, output: Any, connection: Connection | None) -> Iterator[SavePlan]:
        for tracked, computed in self._scheduled(output):
            if connection is None or tracked.epoch != connection.epoch:
                tracked.grants.clear()
                continue
            request = tracked.request
            # Drafts of speculative decoding may be rejected: only known tokens count as final.
            end = min(computed + output.num_scheduled_tokens[request.request_id], request.num_tokens)
            self._reserve_decoded(tracked, connection, end)
            plan = self._save_plan(tracked, computed, end)
            if plan is not None:
                yield plan

    def _scheduled(self, output: Any) -> Iterator[tuple[TrackedRequest, int]]:
        """The requests of this step with the number of tokens computed before it."""
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = list(new.block_ids[0])
                yield tracked, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            new_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = list(new_ids[0])
            elif new_ids is not None:
                tracked.block_ids += new_ids[0]
            yield tracked, cached.num_computed_tokens[index]

    def _save_plan(self, tracked: TrackedRequest, computed: int, end: int) -> SavePlan | None:
        num_prompt = tracked.request.num_prompt_tokens
        ends_prefill = computed < num_prompt <= end
        final = end // self._layout.block_tokens
        if tracked.is_prefill and end >= num_prompt:
            final = self._layout.num_blocks(num_prompt)  # the partial block, too: nothing is added to it here
        pages = [
            PagesPlan(
                grant.slots,
                num_blocks=grant.end_block - grant.first_block,
                first=start - grant.first_block,
                block_ids=tracked.block_ids[start:stop],
                completes=stop == grant.end_block,
            )
            for grant in tracked.grants
            if (start := max(grant.first_block, tracked.saved_blocks)) < (stop := min(grant.end_block, final))
        ]
        tracked.saved_blocks = max(tracked.saved_blocks, final)
        tracked.grants = [grant for grant in tracked.grants if grant.end_block > tracked.saved_blocks]
        if not pages and not (ends_prefill and tracked.is_prefill):
            return None
        return SavePlan(tracked.request.request_id, tracked.transfer, pages, ends_prefill, num_prompt)

    def _reserve_decoded(self, tracked: TrackedRequest, connection: Connection, end: int) -> None:
        """Room for a chunk that generated tokens have just filled; without an answer at once it is not saved."""
        chunk_tokens = self._layout.chunk_tokens
        chunk = end // chunk_tokens
        start = max(tracked.decode_keyed, tracked.request.num_prompt_tokens // chunk_tokens)
        tracked.decode_keyed = max(start, chunk)
        if not self._config.save_decode or chunk <= start:
            return
        keys = tracked.chunk_keys(chunk)[start:]
        seq = self._ask_room(tracked, connection, keys, None)
        try:
            answer = self._collect(connection, seq, Reserved)
        except (NodeError, ProtocolError) as error:
            log.warning("generated chunks are not saved: %s", error)
            return
        if answer is None:
            connection.forget(seq)
            return
        shards, per_chunk = self._layout.num_shards, self._layout.blocks_per_chunk
        for number, index in enumerate(answer.granted):
            first = (start + index) * per_chunk
            slots = answer.slots[number * shards : (number + 1) * shards]
            tracked.grants.append(Grant(slots, first, first + per_chunk))
            tracked.saved_blocks = min(tracked.saved_blocks, first)

    # ---- the end of a request ---------------------------------------------------------------

    def finished(self, request: Any) -> None:
        """The request is over, whatever way: what it still holds is given back."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._tell_load()
        connection = self._link.connection
        if connection is None or tracked.epoch != connection.epoch:
            return
        self._forget_asked(tracked, connection)
        if tracked.loading:
            self._finished_loading[request.request_id] = (tracked.epoch, tracked.lease)
        else:
            self._release(tracked)
        if tracked.grants:
            connection.tell(Abort([slot for grant in tracked.grants for slot in grant.slots]))
            self._aborts += [grant.slots for grant in tracked.grants]
        if tracked.is_prefill and (tracked.grants or not tracked.reserved):
            self._give_up_transfer(tracked, connection)

    def has_unsent_plans(self) -> bool:
        """Whether the workers must still be told of something, although no request needs a step."""
        return bool(self._aborts)

    def _give_up_transfer(self, tracked: TrackedRequest, connection: Connection) -> None:
        if tracked.is_prefill and tracked.transfer is not None:
            connection.tell(Cancel(tracked.transfer))

    def _forget_asked(self, tracked: TrackedRequest, connection: Connection) -> None:
        for seq in (tracked.lookup_seq, tracked.reserve_seq):
            if seq is not None:
                connection.forget(seq)
        tracked.lookup_seq = tracked.reserve_seq = None

    def _forget_node(self, tracked: TrackedRequest) -> None:
        """The node it dealt with is gone, and all that it held there."""
        tracked.lookup_seq = tracked.reserve_seq = None
        tracked.hit_slots, tracked.hit_tokens, tracked.lease = [], 0, 0
        tracked.grants.clear()
        tracked.decided = tracked.reserved = False
        tracked.epoch = 0

    def _release(self, tracked: TrackedRequest) -> None:
        connection = self._link.connection
        if tracked.lease and connection is not None and connection.epoch == tracked.epoch:
            connection.tell(Release(tracked.lease))
        tracked.lease = 0
        tracked.hit_slots, tracked.hit_tokens = [], 0

    def _mark(self, tracked: TrackedRequest, connection: Connection, event: Event, *, tokens: int = 0) -> None:
        if tracked.transfer is not None:
            connection.tell(Mark(tracked.transfer, event, time.monotonic_ns(), tokens=tokens))

    def close(self) -> None:
        """Detach from the node. Idempotent."""
        self._link.close()
