"""The scheduler half: asks the node what is there, reserves room, and plans each step for the workers.

Runs on the engine core's thread. While the node has not decided about a request, vLLM is told to ask again
in the next step (`pdx.vllm.inquiry`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from pdx.config import ConnectorConfig
from pdx.connection import Connection
from pdx.errors import ProtocolError
from pdx.layout import KvLayout
from pdx.messages import VERSION, Abort, Hello, Release, Slot
from pdx.timeline import Event
from pdx.vllm.inquiry import Inquiry
from pdx.vllm.link import NodeLink
from pdx.vllm.params import TransferParams, parse_params
from pdx.vllm.plan import LoadPlan, SavePlan, StepPlan
from pdx.vllm.request import BlockHasher, TrackedRequest

log = logging.getLogger("pdx")


class SchedulerHalf:
    """One per engine. All methods are called by vLLM's scheduler, on its thread."""

    def __init__(self, config: ConnectorConfig, layout: KvLayout, engine: str, hasher: BlockHasher) -> None:
        self._layout = layout
        self._inquiry = Inquiry(config, layout, hasher)
        self._requests: dict[str, TrackedRequest] = {}
        self._loads: list[LoadPlan] = []
        self._aborts: list[list[Slot]] = []
        self._finished_loading: dict[str, tuple[int, int]] = {}  # finished while loading: (epoch, lease)
        hello = Hello(
            VERSION,
            os.getpid(),
            "scheduler",
            engine=engine,
            role=config.role,
            url=config.url,
            layout=layout.fingerprint(),
        )
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
        if tracked.scheduled:
            self._inquiry.restart(tracked)
        if tracked.loaded_for == request.num_preemptions:
            return 0  # its load failed: recompute
        connection = self._link.connection
        if connection is None or (tracked.decided and tracked.epoch != connection.epoch):
            self._link.count("no_node")
            tracked.forget_node()
            return 0
        if not self._inquiry.advance(tracked, connection):
            return None
        return max(0, tracked.hit_tokens - local_tokens)

    # ---- allocated --------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: list[int], num_external: int) -> None:
        """vLLM gave the request these blocks; `num_external` tokens of them are to be loaded."""
        tracked = self.track(request)
        tracked.block_ids = list(block_ids)
        tracked.scheduled = True
        if num_external:
            tracked.loading = True
            tracked.loaded_for = request.num_preemptions
            self._loads.append(tracked.plan_load(num_external))
        elif not tracked.loading:
            self._inquiry.release(tracked, self._link.connection)

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
        self._inquiry.release(tracked, self._link.connection)
        connection = self._link.connection
        if connection is not None and tracked.is_decode:
            self._inquiry.mark(tracked, connection, Event.RUNNABLE)

    # ---- each step --------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepPlan:
        """What the workers do in this step."""
        self._inquiry.new_step()
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
            self._inquiry.reserve_decoded(tracked, connection, end)
            plan = tracked.plan_save(computed, end)
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
        self._inquiry.forget_asked(tracked, connection)
        if tracked.loading:
            self._finished_loading[request.request_id] = (tracked.epoch, tracked.lease)
        else:
            self._inquiry.release(tracked, self._link.connection)
        if tracked.grants:
            connection.tell(Abort([slot for grant in tracked.grants for slot in grant.slots]))
            self._aborts += [grant.slots for grant in tracked.grants]
        if tracked.is_prefill and (tracked.grants or not tracked.reserved):
            self._inquiry.give_up_transfer(tracked, connection)

    def has_unsent_plans(self) -> bool:
        """Whether the workers must still be told of something, although no request needs a step."""
        return bool(self._aborts)

    @property
    def is_attached(self) -> bool:
        """Whether this half is attached to a living node."""
        return self._link.connection is not None

    def wait_attached(self, timeout_s: float) -> bool:
        """For start-up only: whether this half is attached to a node within `timeout_s`."""
        return self._link.wait_attached(timeout_s)

    def count(self, reason: str) -> None:
        """See `NodeLink.count`."""
        self._link.count(reason)

    def close(self) -> None:
        """Detach from the node. Idempotent."""
        self._link.close()
