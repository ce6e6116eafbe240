"""The scheduler half: asks the node what is there, reserves room, and plans each step for the workers.

It runs on the engine's scheduler thread. Until the node has decided about a request, the engine is told to ask again in
the next step (`pdx.engine.store_lookup`).
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

from pdx.client.connection import Connection
from pdx.config import ConnectorConfig
from pdx.engine import spans
from pdx.engine.drafts import Drafts
from pdx.engine.forms import Forms
from pdx.engine.link import NodeLink
from pdx.engine.moved import MovedLookup
from pdx.engine.pace import StepTimes
from pdx.engine.params import TransferParams, parse_hints, parse_params
from pdx.engine.plan import NO_EPOCH, LoadPlan, PagesPlan, SavePlan, StepPlan, WorkerNews
from pdx.engine.request import LOADING, SEATED, Load, SlotGrant, State, Step, TrackedRequest
from pdx.engine.step import BlockHashing, EngineRequest, StepLimits, StepRecord, StepRequest
from pdx.engine.store_lookup import StoreLookup
from pdx.engine.tally import Tally
from pdx.engine.trust import NEVER, Trust
from pdx.engine.turns import Turns
from pdx.errors import ProtocolError
from pdx.memory.keys import KEY_BYTES
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.memory.slot import Slot
from pdx.telemetry.timeline import Event
from pdx.wire.hints import Envelope
from pdx.wire.messages import VERSION, Abort, EngineFacts, Hello

log = logging.getLogger("pdx.engine")


class SchedulerHalf:
    """One per engine. All methods are called by the engine's scheduler, on its thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KvLayout | Sequence[KvLayout],
        engine: str,
        hashing: BlockHashing,
        facts: EngineFacts | None = None,
        naming: Mapping[str, str] | None = None,
        limits: StepLimits = StepLimits(),  # noqa: B008 - frozen
        *,
        names_transfers: bool = True,
        drafts: CacheGroups | None = None,
        not_moved: str = "this engine does not say how its keys turn with their positions",
    ) -> None:
        """`layout`: of one shard, or one for each cache group, in the engine's order. `naming`: what other processes
        need beside the layout to make this engine's keys (`pdx.wire.tokens`); None: only `hashing` can.
        `names_transfers`: draw an id for transfers without one, as no other connector can be meant. `drafts`: a draft
        model's cache groups. `not_moved`: why the worker halves cannot load tokens at other positions; empty: they
        can."""
        self._groups = groups = CacheGroups.of(layout)
        self._hashing = hashing
        if not config.moved:
            not_moved = "this engine runs without the option moved"
        elif not groups.is_single or drafts is not None:
            not_moved = "it is for models of one cache group of full attention, without a draft model"
        self._forms = forms = Forms(groups, hashing, not_moved=not_moved)
        self._lookup = StoreLookup(config, groups, hashing.tail, forms=forms)
        self._moved = MovedLookup(config, forms, self._lookup, groups[0])
        self._drafts = None if drafts is None else Drafts(drafts, StoreLookup(config, drafts, hashing.tail))
        self._requests: dict[str, TrackedRequest] = {}
        self._counts = Counter(dict.fromkeys(State, 0))  # of `_requests`, by state
        self._turns = Turns(limits)  # of requests without blocks
        self._due: set[str] = set()  # ids; the next step may have something to do for these
        self._loads: list[LoadPlan] = []
        self._aborts: list[tuple[int, list[Slot]]] = []  # (epoch, slots) per chunk
        self._ending: dict[str, TrackedRequest] = {}  # finished, with loads in flight
        self._step = 0
        self.tally = Tally()
        self._names_transfers = names_transfers
        self._times = StepTimes(groups.chunk_tokens)
        self._loads_all = config.load == "always"
        self._trust = Trust(groups[0].block_tokens)
        hello = Hello(
            VERSION,
            os.getpid(),
            "scheduler",
            engine=engine,
            role=config.role,
            url=config.url,
            layout=forms.fingerprint,
            shape={**groups.described(), **(naming or {})},
            groups=groups.described_groups(),
            facts=facts,
        )
        self.link = NodeLink(config, hello, starter=True)

    # ---- new requests -----------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        """A new request is in the engine's queue. If its turn may come soon, ask now for what it will need; otherwise
        tell the node what it will want."""
        tracked = self.track(request, is_new=True)
        if tracked.state is State.LEFT_OUT:
            return
        is_near = self._turns.add(tracked, self._num_seated)
        connection = self.link.connection
        if connection is not None:
            if is_near:
                self._begin(tracked, connection)
            else:
                self._lookup.expect(tracked, connection)

    def _begin(self, tracked: TrackedRequest, connection: Connection) -> None:
        self._lookup.begin(tracked, connection)
        self._moved.begin(tracked, connection)
        if self._drafts is not None:
            self._drafts.begin(tracked, connection)

    def track(self, request: EngineRequest, *, is_new: bool = False) -> TrackedRequest:
        """The request's state, created at first sight. `is_new`: it has no block of the engine's own cache yet."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            return tracked
        why = self._hashing.name_inputs(request, is_new)
        params, envelope = self._params(request)
        if why is None:
            envelope = self._forms.of(request, envelope, is_new=is_new, count=self.link.count)
            state = State.WAITING
        else:
            envelope, state = Envelope(), State.LEFT_OUT
        if params.do_remote_decode:
            params = msgspec.structs.replace(params, prefill_tokens=request.num_prompt_tokens)
            if is_new and self._groups.has_state:
                self._hashing.shorten(request)
        fingerprint = self._forms.fingerprint_of(envelope)
        tracked = TrackedRequest(request, self._groups, params, fingerprint, envelope, state, self._counts)
        self._requests[request.request_id] = tracked
        if self._drafts is not None:
            self._drafts.track(tracked, self._forms.fingerprint)
        connection = self.link.connection
        if connection is not None:
            self._tell_load(connection)
            if why is not None:
                self._lookup.give_up_transfer(tracked, connection)
        if why is not None and why.reason:
            self.link.count(why.reason, why.text, request.request_id)
        return tracked

    @property
    def _num_seated(self) -> int:
        """The number of requests that have a place in the engine's steps, or will before any waiting request."""
        return sum(map(self._counts.__getitem__, SEATED))  # asked for each request that waits

    def _params(self, request: EngineRequest) -> tuple[TransferParams, Envelope]:
        salt = getattr(request, "cache_salt", None)  # which not every engine has
        params, envelope = TransferParams(), parse_hints(request.kv_transfer_params, salt)
        try:
            params = parse_params(request.kv_transfer_params, may_name=self._names_transfers)
        except ProtocolError as error:
            self.link.count("transfer_refused", "request %s runs without a transfer: %s", request.request_id, error)
        for verdict in envelope.decided:
            text = "request %s runs without its hint %s: %s"
            self.link.count("hints_refused", text, request.request_id, verdict.field, verdict.text)
        return params, envelope

    def _tell_load(self, connection: Connection) -> None:
        connection.running = len(self._requests)

    # ---- how much is there ------------------------------------------------------------------

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that the store holds for this request; None: ask again."""
        tracked = self.track(request, is_new=not local_tokens)
        tracked.local_tokens = tracked.vouched = local_tokens
        if not tracked.is_queued:  # preempted: the store may hold more by now; the reservation stays
            tracked.step(Step.PREEMPT)
            tracked.node.sources = b""
            self._trust.forget(tracked)
        has_loaded = tracked.load is not None and tracked.load.preemptions == request.num_preemptions
        if tracked.state is State.LEFT_OUT or has_loaded:  # asked again: the load failed
            return 0
        connection = self.link.connection
        if connection is None or (tracked.is_decided and tracked.node.epoch != connection.epoch):
            self.link.count("no_node")
            tracked.forget_node()
            return 0
        may_ask = self._turns.is_near(tracked, self._num_seated)
        is_decided = self._lookup.advance(tracked, connection, may_ask=may_ask)
        self._turns.pass_by(tracked)
        if not is_decided or not self._moved.find(tracked, connection):
            return None
        tokens = max(0, self._usable(tracked) - local_tokens)
        # A transfer was computed for this engine; and if no other request runs, there is no step to miss.
        loads_all = self._loads_all or tracked.is_decode or not self._counts[State.RUNNING] + self._counts[State.VOID]
        if tokens and not (loads_all or self._times.pays(tokens, len(self._turns))):
            self.link.count("load_not_worth")
            return 0
        if self._drafts is None:
            return tokens
        found = self._drafts.worth_loading(tracked, connection, local_tokens + tokens)
        return None if found is None else max(0, found - local_tokens)

    def _usable(self, tracked: TrackedRequest) -> int:
        """How many leading tokens to report to the engine. It recomputes a prompt's last token, so with several cache
        groups that token must be left out: otherwise windows would begin one token too late."""
        found, most = tracked.node.hits.tokens, tracked.request.num_tokens - 1
        if self._groups.is_single or found <= most:
            return found
        tracked.node.hits = tracked.node.hits._replace(tokens=most)
        return most

    # ---- allocated --------------------------------------------------------------------------

    def allocated(self, request: EngineRequest, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        """The engine gave the request these blocks, by cache group (`TrackedRequest.take_blocks`); `num_external` of
        their tokens are to be loaded."""
        tracked = self.track(request)
        tracked.take_blocks(blocks)
        is_void = num_external > 0 and not tracked.is_decided  # a reset came between: engines allocate later
        tracked.step(Step.LOAD if num_external else Step.RUN)
        self._turns.remove(tracked)
        connection = self.link.connection
        drafts: list[PagesPlan] = []
        if self._drafts is not None:
            drafts, lost = self._drafts.allocated(tracked, num_external, connection)
            if lost and connection is not None:
                self._abort(connection, connection.epoch, lost)
        for _, each in self._asked_for(tracked) if is_void else ():  # nor are older blocks saved
            each.step(Step.VOID)
        if num_external:
            tracked.vouched = tracked.local_tokens + num_external
            self._trust.written(tracked.block_ids[tracked.local_tokens // self._groups[0].block_tokens :])
            self._loads.append(tracked.plan_load(num_external, drafts))
            tracked.load = Load(tracked.sources_of(num_external), request.num_preemptions, time.monotonic())
            for source, tokens in tracked.load.sources.items():
                self.tally.add("hit_tokens", source, tokens)
        else:
            self._lookup.release(tracked, connection)

    def sources(self, request: EngineRequest) -> Mapping[str, int]:
        """Where the tokens of the request's latest load were found."""
        load = self.track(request).load
        return load.sources if load is not None else {}

    def not_loaded(self, block_ids: Set[int]) -> Set[int]:
        """These blocks were not loaded, and the engine recomputes them. Another connector may have promised them.

        :returns: blocks to evict from the engine's own cache: these, and all that were computed from them.
        """
        ours, others = set[int](), list[TrackedRequest]()
        for tracked in self._requests.values():
            if tracked.load is None or not tracked.is_loading:
                others.append(tracked)
                continue
            failed = [at for at, block_id in enumerate(tracked.block_ids) if block_id in block_ids]
            ours.update(tracked.block_ids[at] for at in failed)
            before = [] if tracked.load.failed_block is None else [tracked.load.failed_block]
            tracked.load.failed_block = min([*failed, *before], default=None)
        if block_ids <= ours:
            return frozenset()  # the engine's cache has nothing that is being loaded
        spoiled, blocks = self._trust.failed(block_ids - ours, others)
        for tracked in spoiled:
            self._spoil(tracked)
        return blocks

    def withdrawn(self, request_id: str, num_drafts: int) -> Sequence[bytes]:
        """The request was preempted while a step was being planned.

        :returns: the hashes of its blocks that this step may have been the first to fill. `num_drafts`: at most so many
            tokens of its last blocks are drafts, rejected or not computed yet.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            return ()
        layout, computed = self._groups[0], tracked.local_tokens
        if tracked.load is None:  # a load gives it blocks that may still be empty; else only the last one may be
            computed = (len(tracked.block_ids) - 1) * layout.block_tokens - num_drafts
        return tracked.request.block_hashes[max(0, computed) // layout.tokens_per_hash :]

    def load_failed(self, request_id: str) -> None:
        """A part of the request's load failed, and the engine recomputes the whole prompt."""
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.load is not None and tracked.is_loading:
            tracked.load.failed_block = tracked.local_tokens // self._groups[0].block_tokens

    def _spoil(self, tracked: TrackedRequest) -> None:
        """Save nothing of a request that was computed from pages that were never loaded."""
        if tracked.state is State.LEFT_OUT:
            return
        self._let_go(tracked)
        for _, each in self._asked_for(tracked):
            each.node.grants.clear()
        tracked.step(Step.VOID)
        text = "request %s is not saved: it rests on pages that another connector has promised and not loaded"
        self.link.count("save_spoiled", text, tracked.request.request_id)

    def heard(self, news: Sequence[WorkerNews]) -> None:
        """The worker halves' reports after a step, one per worker."""
        self._due.update(self._trust.heard(min(each.step for each in news)))
        # Ranks that save nothing, since others have the same heads, do not measure computing.
        known = [each.chunk_s for each in news if each.chunk_s]
        self._times.news = WorkerNews(max(each.load_s for each in news), min(known, default=self._times.news.chunk_s))

    def loaded(self, request_id: str) -> None:
        """All workers have scattered the request's chunks, or have given up on them."""
        connection = self.link.connection
        if (ended := self._ending.pop(request_id, None)) is not None:
            self._release(ended)
            return
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.load is None or not tracked.is_loading:
            return
        tracked.step(Step.LOADED)
        self._release(tracked)
        load = tracked.load
        has_failed, load.failed_block = load.failed_block is not None, None
        took_s, tokens = time.monotonic() - load.planned_at, load.sources.total()
        spans.tell(tracked.request, "pdx.load", took_s, failed=has_failed, tokens=tokens, transfer=tracked.transfer)
        self.tally.add("loads", "failed" if has_failed else "loaded", 1)
        if connection is None or connection.epoch != tracked.node.epoch:
            return
        if has_failed:
            self._lookup.reserve_again(tracked, connection)
            self._due.add(request_id)
        if tracked.is_decode:
            self._lookup.mark(tracked, connection, Event.RUNNABLE)

    # ---- each step --------------------------------------------------------------------------

    @property
    def is_single(self) -> bool:
        """`CacheGroups.is_single`."""
        return self._groups.is_single

    @property
    def due(self) -> Set[str]:
        """Requests that the next step may have something to do for, whether they get new blocks or not."""
        return self._due

    def request_of(self, request_id: str) -> EngineRequest | None:
        """The request as the engine has it; None: unknown, or finished."""
        tracked = self._requests.get(request_id)
        return tracked.request if tracked is not None else None

    def plan_step(self, record: StepRecord) -> StepPlan:
        self._times.step(time.monotonic(), record.num_tokens, goes_on=record.is_busy)
        is_loading = any(self._counts[state] for state in LOADING)
        connection = self.link.connection
        for lookup in (self._lookup, self._drafts.lookup) if self._drafts is not None else (self._lookup,):
            lookup.new_step(is_busy=record.is_busy, is_loading=is_loading, step_s=self._times.step_s)
            lookup.take_back(connection)
        self._turns.new_walk()
        if connection is not None:
            for tracked in self._turns.next_ones(self._num_seated):
                self._begin(tracked, connection)
        epoch = connection.epoch if connection is not None else 0
        loads, self._loads = self._loads, []
        self._step += 1
        saves = [save for each in record.requests for save in self._plan_saves(each, connection)]
        aborts, self._aborts = self._aborts, []
        current = [slots for of_epoch, slots in aborts if of_epoch == epoch]
        awaits = self._trust.is_waiting
        return StepPlan(epoch, saves, loads, current, record.num_tokens, self._step, awaits)

    def _plan_saves(self, step: StepRequest, connection: Connection | None) -> list[SavePlan]:
        tracked = self._requests.get(step.request_id)
        if tracked is None:
            return []
        if step.blocks:
            tracked.take_blocks(step.blocks, are_all=step.has_all_blocks)
            if self._drafts is not None and tracked.drafts is not None:
                self._drafts.computing(tracked.drafts, step)
        doubt = self._trust.scheduled(tracked, step, self._step)
        if doubt == NEVER and tracked.saves:
            self._spoil(tracked)
        # Drafts of speculative decoding may be rejected: only known tokens count as final.
        step_end = step.computed + step.scheduled
        end = min(step_end, step.known)
        saves, is_due = list[SavePlan](), False
        for lookup, each in self._asked_for(tracked):
            if connection is None or each.node.epoch != connection.epoch:
                each.node.grants.clear()
                continue
            if each.saves and not doubt:
                lookup.reserve_late(each, connection, end)
                save, lost = each.plan_save(step.computed, end, step_end)
                if lost:
                    self._abort(connection, each.node.epoch, lost)
                if save is not None:
                    saves.append(save)
            is_due = is_due or lookup.is_due(each)
        (self._due.add if is_due else self._due.discard)(step.request_id)
        return saves

    def _asked_for(self, tracked: TrackedRequest) -> Iterator[tuple[StoreLookup, TrackedRequest]]:
        """The lookups for a request, each with its state: of the request's own chunks, and of its drafts'."""
        yield self._lookup, tracked
        if self._drafts is not None and tracked.drafts is not None:
            yield self._drafts.lookup, tracked.drafts

    def _release(self, tracked: TrackedRequest) -> None:
        for lookup, each in self._asked_for(tracked):
            lookup.release(each, self.link.connection)

    # ---- the end of a request ---------------------------------------------------------------

    def finished(self, request: EngineRequest) -> dict[str, Any]:
        """The request is over, for whatever reason: release what it still holds.

        :returns: the `kv_transfer_params` of its answer: the outcome of each hint, in words, and what its decode leg
        needs.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return {}
        if tracked.is_queued and self.link.connection is not None:  # a decoder may wait for it at this node
            tracked.adopt_epoch(self.link.connection.epoch)
        tracked.end()
        self._turns.remove(tracked)
        self._due.discard(request.request_id)
        self._trust.forget(tracked)
        told: dict[str, Any] = {"pdx_hints": hints} if (hints := tracked.hints_answer) else {}
        connection = self.link.connection
        if connection is not None:
            self._tell_load(connection)
            self._lookup.expect_no_more(tracked, connection)
            if tracked.node.epoch == connection.epoch:
                if tracked.is_loading:
                    self._ending[request.request_id] = tracked
                told |= tracked.handed_on(connection.node_name)
        self._let_go(tracked)
        return told

    def _let_go(self, tracked: TrackedRequest) -> None:
        """Release what the request holds in the node, except for a load in flight."""
        connection = self.link.connection
        self._moved.forget(tracked, connection)
        for lookup, each in self._asked_for(tracked):
            node = each.node
            if connection is None or node.epoch != connection.epoch:
                continue
            lookup.forget_asked(each, connection)
            if not each.is_loading:
                lookup.release(each, connection)
            if node.grants:
                self._abort(connection, node.epoch, node.grants)
            if each.is_prefilling:  # whether or not there was room for it
                lookup.give_up_transfer(each, connection)

    def _abort(self, connection: Connection, epoch: int, grants: Sequence[SlotGrant]) -> None:
        """Abort these grants at the node, and at the workers with the next plan."""
        connection.tell(Abort([slot for grant in grants for slot in grant.slots]))
        self._aborts += [(epoch, grant.slots) for grant in grants]

    def reset(self) -> None:
        """The weights may change now: this engine no longer finds anything that was saved before.

        What current requests have computed or are loading belongs to the old weights, and is not saved.
        """
        self._forms.fingerprint = secrets.token_bytes(KEY_BYTES)
        self.link.key_by(self._forms.fingerprint)
        self._loads = [msgspec.structs.replace(load, epoch=NO_EPOCH) for load in self._loads]
        for tracked in self._requests.values():
            self._let_go(tracked)
            tracked.reset(self._forms.fingerprint_of(tracked.envelope))
        self._due.clear()
        log.info("the cache was reset: this engine saves and finds chunks under other keys from now on")

    def has_unsent_plans(self) -> bool:
        """Whether the workers still need a plan although no request needs a step."""
        return bool(self._aborts)

    def close(self) -> None:
        """Detach from the node. Idempotent."""
        self.link.close()
