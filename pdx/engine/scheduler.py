"""The scheduler half: asks the node what is there, reserves room, and plans each step for the workers.

It runs on the thread of the engine's scheduler. While the node has not decided about a request, the engine is told to
ask again in the next step (`pdx.engine.store_lookup`).
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import msgspec

from pdx.client.connection import Connection
from pdx.config import ConnectorConfig
from pdx.engine.link import NodeLink
from pdx.engine.pace import StepTimes
from pdx.engine.plan import NO_EPOCH, LoadPlan, SavePlan, StepPlan, WorkerNews
from pdx.engine.request import TrackedRequest, TransferParams, parse_hints, parse_params
from pdx.engine.step import BlockHasher, EngineRequest, LeftOut, StepLimits, StepRecord, StepRequest
from pdx.engine.store_lookup import StoreLookup
from pdx.engine.trust import NEVER, Trust
from pdx.engine.turns import Turns
from pdx.errors import LayoutError, ProtocolError
from pdx.memory.form import form_of, lossy_fingerprint
from pdx.memory.keys import KEY_BYTES
from pdx.memory.layout import KvLayout
from pdx.memory.slot import Slot
from pdx.telemetry.timeline import Event
from pdx.wire.hints import Envelope, Hints, Verdict
from pdx.wire.messages import VERSION, Abort, Cancel, EngineFacts, Hello, Release

log = logging.getLogger("pdx")

MIN_TOKENS = 64  # fewer are not worth a load as long as no prompt was measured


class SchedulerHalf:
    """One per engine. All methods are called by the engine's scheduler, on its thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KvLayout,
        engine: str,
        hasher: BlockHasher,
        facts: EngineFacts | None = None,
        naming: Mapping[str, str] | None = None,
        keep_apart: Callable[[Any, str], bool] = lambda request, form: not form,
        name_inputs: Callable[[Any, bool], LeftOut | None] = lambda request, is_new: None,
        limits: StepLimits = StepLimits(),  # noqa: B008 - frozen
    ) -> None:
        """`naming`: what others need beside the layout to make this engine's keys (`pdx.wire.tokens`); None: only its
        `hasher` can. `keep_apart`: from now on the engine's own cache gives no blocks of this request to another one,
        nor to it, unless that one was kept apart by the same word; empty: as ever. False: the engine cannot do that.
        `name_inputs`: hashes of this request's blocks are of content alone from now on, or why it is left out. It hears
        whether the request is new: of others the engine has looked hashes up already.
        """
        self._layout = layout
        self._keep_apart = keep_apart
        self._name_inputs = name_inputs
        self._fingerprint = layout.fingerprint()  # what keys are made with
        self._lookup = StoreLookup(config, layout, hasher)
        self._requests: dict[str, TrackedRequest] = {}
        # Nothing of these is asked, saved or found, but others may rest on the same blocks (`pdx.engine.trust`).
        self._left_out: dict[str, TrackedRequest] = {}
        self._turns = Turns(limits)  # of new ones
        self._due: set[str] = set()  # those that the next step may have something to do for
        self._loading: dict[str, TrackedRequest] = {}
        self._loads: list[LoadPlan] = []
        self._aborts: list[tuple[int, list[Slot]]] = []  # (epoch, slots) per chunk
        self._finished_loading: dict[str, tuple[int, int]] = {}  # finished while loading: (epoch, lease)
        self._running: set[str] = set()  # those that have blocks and wait for no load
        self._step = 0
        self._times = StepTimes()
        self._loads_all = config.load == "always"
        self._trust = Trust(layout.block_tokens)
        self._news = WorkerNews()
        hello = Hello(
            VERSION,
            os.getpid(),
            "scheduler",
            engine=engine,
            role=config.role,
            url=config.url,
            layout=layout.fingerprint(),
            shape={**layout.described(), **(naming or {})},
            facts=facts,
        )
        self._link = NodeLink(config, hello, starter=True)

    # ---- new requests -----------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        """A new request is in the engine's queue. What its turn will need is asked now, if its turn may come soon; else
        the node is told what will be wanted."""
        if self._is_left_out(request, is_new=True):
            return
        tracked = self.track(request, is_new=True)
        is_near = self._turns.add(tracked, self._num_running)
        connection = self._link.connection
        if connection is not None:
            (self._lookup.begin if is_near else self._lookup.expect)(tracked, connection)

    def track(self, request: EngineRequest, *, is_new: bool = False) -> TrackedRequest:
        """The request's state; made at its first sight. `is_new`: it has no block of the engine's own cache yet."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            params, envelope = self._params(request)
            envelope = self._with_form(request, envelope, is_new=is_new)
            fingerprint = self._fingerprint_of(envelope.hints)
            tracked = TrackedRequest(request, self._layout, params, fingerprint, envelope)
            self._requests[request.request_id] = tracked
            self._tell_load()
        return tracked

    def _is_left_out(self, request: EngineRequest, *, is_new: bool = False) -> bool:
        """Whether nothing of this request is saved or found: `LeftOut` says why. Asked before it is tracked."""
        request_id = request.request_id
        if request_id in self._requests:
            return False
        if request_id in self._left_out:
            return True
        why = self._name_inputs(request, is_new)
        if why is None:
            return False
        self._left_out[request_id] = TrackedRequest(request, self._layout, None, self._fingerprint)
        if why.reason:
            self._link.count(why.reason, why.text, request_id)
        params, _ = self._params(request)
        connection = self._link.connection
        if params is not None and params.do_remote_decode and params.transfer_id and connection is not None:
            connection.tell(Cancel(params.transfer_id))  # the decoder shall not wait
        return True

    @property
    def _num_running(self) -> int:
        """Requests that have a place among those of a step, or will have one before any that waits."""
        return len(self._running) + len(self._loading)

    def _params(self, request: EngineRequest) -> tuple[TransferParams | None, Envelope]:
        salt = getattr(request, "cache_salt", None)  # which not every engine has
        params, envelope = None, parse_hints(request.kv_transfer_params, salt)
        try:
            params = parse_params(request.kv_transfer_params)
        except ProtocolError as error:
            log.warning("request %s runs without a transfer: %s", request.request_id, error)
        for verdict in envelope.decided:
            text = "request %s runs without its hint %s: %s"
            self._link.count("hints_refused", text, request.request_id, verdict.field, verdict.text)
        return params, envelope

    def _with_form(self, request: EngineRequest, envelope: Envelope, *, is_new: bool) -> Envelope:
        """The envelope with what is left of the request's chunks below memory, where it asks for a lossy codec.

        A request that cannot have the codec gets exact chunks, and never another's that are not.
        """
        codec = envelope.hints.codec
        wants = codec not in (None, "none")
        form, why = "", ""
        if codec is not None and wants:
            try:
                form = str(form_of(self._layout, codec))
            except LayoutError as error:
                why = str(error)
        if not self._keep_apart(request, form if is_new else "") or (form and not is_new):
            form, why = "", "the engine's own cache would give its blocks to requests that are exact"
        if codec is None:
            return envelope
        if wants and not form:
            text = "request %s is stored exactly, not by the codec that it asks for: %s"
            self._link.count("codec_refused", text, request.request_id, why)
        verdict = Verdict("codec", "refused", why[:200]) if wants and not form else Verdict("codec", "accepted")
        hints = msgspec.structs.replace(envelope.hints, form=form, codec=None)  # nodes are told the form
        return Envelope(hints, envelope.said, (*envelope.decided, verdict))

    def _fingerprint_of(self, hints: Hints) -> bytes:
        """What keys are made with: of exact chunks, or of those of one form."""
        return lossy_fingerprint(self._fingerprint, hints.form) if hints.form else self._fingerprint

    def _tell_load(self) -> None:
        connection = self._link.connection
        if connection is not None:
            connection.running = len(self._requests)

    # ---- how much is there ------------------------------------------------------------------

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that the store holds for this request; None: ask again."""
        is_left_out = self._is_left_out(request, is_new=not local_tokens)
        tracked = self._left_out[request.request_id] if is_left_out else self.track(request, is_new=not local_tokens)
        tracked.local_tokens = tracked.vouched = local_tokens
        if tracked.scheduled:
            self._trust.forget(tracked)
        if is_left_out:
            return 0
        if tracked.scheduled:
            self._running.discard(request.request_id)
            self._lookup.restart(tracked)
        if tracked.loaded_for == request.num_preemptions:
            return 0  # its load failed: recompute
        connection = self._link.connection
        if connection is None or (tracked.decided and tracked.epoch != connection.epoch):
            self._link.count("no_node")
            tracked.forget_node()
            return 0
        may_ask = self._turns.is_near(tracked, self._num_running)
        is_decided = self._lookup.advance(tracked, connection, may_ask=may_ask)
        self._turns.pass_by(tracked)
        if not is_decided:
            return None
        tokens = max(0, tracked.hit_tokens - local_tokens)
        if tokens and not self._pays(tracked, tokens):
            self._link.count("load_not_worth")
            return 0
        return tokens

    def _pays(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Whether to load so many tokens before the step that computes the rest (ADR 47).

        The request misses the step that is made up now, which takes its time for those that run whatever is loaded.
        Computing the tokens makes that step longer, for this request and for all that wait behind it. What a transfer
        brings is always loaded: it was computed for this engine.
        """
        if tracked.is_decode or self._loads_all or self._running <= {tracked.request.request_id}:
            return True
        news, chunk_tokens = self._news, self._layout.chunk_tokens
        if not news.chunk_s:  # no prompt was measured
            return tokens >= MIN_TOKENS
        loading_s = max(self._times.step_s, news.load_s * tokens / chunk_tokens)
        computing_s = self._times.token_s(news.chunk_s / chunk_tokens) * tokens
        return computing_s * max(1, len(self._turns)) >= loading_s

    # ---- allocated --------------------------------------------------------------------------

    def allocated(self, request: EngineRequest, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        """The engine gave the request these blocks, by cache group; `num_external` of their tokens are to be loaded.

        :raises LayoutError: as `TrackedRequest.take_blocks`.
        """
        is_left_out = self._is_left_out(request)
        tracked = self._left_out[request.request_id] if is_left_out else self.track(request)
        tracked.take_blocks(blocks)
        tracked.scheduled = True
        if is_left_out:
            return
        self._turns.remove(request.request_id)
        if not num_external:
            self._running.add(request.request_id)
        if num_external:
            tracked.vouched = tracked.local_tokens + num_external
            self._trust.written(tracked.block_ids[tracked.local_tokens // self._layout.block_tokens :])
            tracked.loading, tracked.failed_block = True, None
            tracked.loaded_for = request.num_preemptions
            self._loading[request.request_id] = tracked
            self._loads.append(tracked.plan_load(num_external))
        elif not tracked.loading:
            self._lookup.release(tracked, self._link.connection)

    def not_loaded(self, block_ids: Set[int]) -> Set[int]:
        """These blocks were not loaded, and the engine computes them. They may be another connector's, which had
        promised them for a step that is over.

        :returns: these, and those that were computed from them: nobody should find them in the engine's own cache.
        """
        ours: set[int] = set()
        for tracked in self._loading.values():
            failed = [at for at, block_id in enumerate(tracked.block_ids) if block_id in block_ids]
            ours.update(tracked.block_ids[at] for at in failed)
            before = [] if tracked.failed_block is None else [tracked.failed_block]
            tracked.failed_block = min([*failed, *before], default=None)
        if block_ids <= ours:
            return frozenset()  # the engine's cache has nothing that is being loaded
        others = [tracked for tracked in self._requests.values() if not tracked.loading]
        spoiled, blocks = self._trust.failed(block_ids - ours, [*others, *self._left_out.values()])
        for tracked in spoiled:
            if tracked.request.request_id in self._requests:
                self._spoil(tracked)
        return blocks

    def load_failed(self, request_id: str) -> None:
        """Not all of the request's load has come, and the engine computes the whole prompt."""
        tracked = self._loading.get(request_id)
        if tracked is not None:
            tracked.failed_block = tracked.local_tokens // self._layout.block_tokens

    def _spoil(self, tracked: TrackedRequest) -> None:
        """It was computed from pages that nobody has loaded: nothing of it is saved."""
        connection = self._link.connection
        if connection is not None and tracked.epoch == connection.epoch:
            self._let_go(tracked, connection)
        tracked.grants.clear()
        tracked.is_stale = True
        text = "request %s is not saved: it rests on pages that another connector has promised and not loaded"
        self._link.count("save_spoiled", text, tracked.request.request_id)

    def heard(self, news: Sequence[WorkerNews]) -> None:
        """What the worker halves told after a step, one for each."""
        self._due.update(self._trust.heard(min(each.step for each in news)))
        self._news = WorkerNews(max(each.load_s for each in news), min(each.chunk_s for each in news))

    def loaded(self, request_id: str) -> None:
        """All workers have scattered the request's chunks, or have given up on them."""
        connection = self._link.connection
        if request_id in self._finished_loading:
            epoch, lease = self._finished_loading.pop(request_id)
            if connection is not None and connection.epoch == epoch:
                connection.tell(Release(lease))
            return
        tracked = self._loading.pop(request_id, None)
        if tracked is None:
            return
        tracked.loading = False
        self._running.add(request_id)
        self._lookup.release(tracked, connection)
        has_failed, tracked.failed_block = tracked.failed_block is not None, None
        if connection is None or connection.epoch != tracked.epoch:
            return
        if has_failed:
            self._lookup.reserve_again(tracked, connection)
            self._due.add(request_id)
        if tracked.is_decode:
            self._lookup.mark(tracked, connection, Event.RUNNABLE)

    # ---- each step --------------------------------------------------------------------------

    @property
    def due(self) -> Set[str]:
        """Requests that the next step may have something to do for, whether they get new blocks or not."""
        return self._due

    def request_of(self, request_id: str) -> EngineRequest | None:
        """The request, as the engine has told of it; None: it has not, or the request is finished."""
        tracked = self._requests.get(request_id) or self._left_out.get(request_id)
        return tracked.request if tracked is not None else None

    def plan_step(self, record: StepRecord) -> StepPlan:
        """What the workers do in this step.

        :raises LayoutError: as `TrackedRequest.take_blocks`.
        """
        self._times.step(time.monotonic(), record.num_tokens, goes_on=record.is_busy)
        is_loading = bool(self._loading)
        self._lookup.new_step(is_busy=record.is_busy, is_loading=is_loading, step_s=self._times.step_s)
        connection = self._link.connection
        self._lookup.take_back(connection)
        self._turns.new_walk()
        if connection is not None:
            for tracked in self._turns.next_ones(self._num_running):
                self._lookup.begin(tracked, connection)
        epoch = connection.epoch if connection is not None else 0
        loads, self._loads = self._loads, []
        self._step += 1
        saves = [save for each in record.requests if (save := self._plan_save(each, connection)) is not None]
        aborts, self._aborts = self._aborts, []
        current = [slots for of_epoch, slots in aborts if of_epoch == epoch]
        awaits = self._trust.is_waiting
        return StepPlan(epoch, saves, loads, current, record.num_tokens, self._step, awaits)

    def _plan_save(self, step: StepRequest, connection: Connection | None) -> SavePlan | None:
        left_out = self._left_out.get(step.request_id)
        tracked = left_out or self._requests.get(step.request_id)
        if tracked is None:
            return None
        if step.blocks:
            tracked.take_blocks(step.blocks, are_all=step.has_all_blocks)
        self._trust.scheduled(tracked, step, self._step)
        if left_out is not None:
            self._due.discard(step.request_id)
            return None
        if tracked.doubt == NEVER and not tracked.is_stale:
            self._spoil(tracked)
        if connection is None or tracked.epoch != connection.epoch:
            tracked.grants.clear()
            self._due.discard(step.request_id)
            return None
        # Drafts of speculative decoding may be rejected: only known tokens count as final.
        end = min(step.computed + step.scheduled, step.known)
        save = None
        if not tracked.is_stale and not tracked.doubt:
            self._lookup.reserve_late(tracked, connection, end)
            save = tracked.plan_save(step.computed, end)
        (self._due.add if self._lookup.is_due(tracked) else self._due.discard)(step.request_id)
        return save

    # ---- the end of a request ---------------------------------------------------------------

    def finished(self, request: EngineRequest) -> dict[str, str]:
        """The request is over, whatever way: what it still holds is given back.

        :returns: what became of each field of its hints, in words; empty: it had none.
        """
        left_out = self._left_out.pop(request.request_id, None)
        if left_out is not None:
            self._due.discard(request.request_id)
            self._trust.forget(left_out)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return {}
        self._end(request.request_id, tracked)
        return tracked.hints_answer

    def _end(self, request_id: str, tracked: TrackedRequest) -> None:
        self._turns.remove(request_id)
        self._running.discard(request_id)
        self._due.discard(request_id)
        self._trust.forget(tracked)
        self._loading.pop(request_id, None)
        self._tell_load()
        connection = self._link.connection
        if connection is not None:
            self._lookup.expect_no_more(tracked, connection)
        if connection is None or tracked.epoch != connection.epoch:
            return
        if tracked.loading:
            self._finished_loading[request_id] = (tracked.epoch, tracked.lease)
        self._let_go(tracked, connection)

    def _let_go(self, tracked: TrackedRequest, connection: Connection) -> None:
        """What the request holds in the node is given back, but for what is being loaded."""
        self._lookup.forget_asked(tracked, connection)
        if not tracked.loading:
            self._lookup.release(tracked, connection)
        if tracked.grants:
            connection.tell(Abort([slot for grant in tracked.grants for slot in grant.slots]))
            self._aborts += [(tracked.epoch, grant.slots) for grant in tracked.grants]
        if tracked.is_prefill and (tracked.grants or not tracked.reserved):
            self._lookup.give_up_transfer(tracked, connection)

    def reset(self) -> None:
        """The weights may be other ones from now on: nothing that was saved before is found again by this engine.

        What requests in the engine have computed, or are loading, belongs to the old weights: nothing of it is saved.
        """
        self._fingerprint = secrets.token_bytes(KEY_BYTES)
        self._link.key_by(self._fingerprint)
        connection = self._link.connection
        self._loads = [msgspec.structs.replace(load, epoch=NO_EPOCH) for load in self._loads]
        for tracked in self._requests.values():
            if connection is not None and tracked.epoch == connection.epoch:
                self._let_go(tracked, connection)
            tracked.reset(self._fingerprint_of(tracked.hints))
        self._due.clear()
        log.info("the cache was reset: this engine saves and finds chunks under other keys from now on")

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

    def count(self, reason: str, text: str = "", *args: object, times: int = 1) -> None:
        """See `NodeLink.count`."""
        self._link.count(reason, text, *args, times=times)

    def close(self) -> None:
        """Detach from the node. Idempotent."""
        self._link.close()
