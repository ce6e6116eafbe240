"""Handles each message to a node: from typed messages to the store and back. No sockets here."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import msgspec
import zmq

from pdx.config import NodeConfig, handover_path, node_name
from pdx.errors import ChunkMissing, ConfigError, LayoutError, NodeError, PeerError, ProtocolError
from pdx.memory.arena import Arena, round_up
from pdx.memory.slot import Slot
from pdx.node.admissions import Admissions
from pdx.node.arena_tier import ArenaTier
from pdx.node.control.places import Places
from pdx.node.control.verbs import Controls
from pdx.node.events.log import EventLog
from pdx.node.hinting import Hinting
from pdx.node.look_ahead import LookAhead
from pdx.node.peers.peers import Peers
from pdx.node.peers.regions import Regions
from pdx.node.reports import node_status
from pdx.node.sessions import Session, Sessions
from pdx.store.chunk import Chunk
from pdx.store.content_names import ContentNames
from pdx.store.copies import Copies
from pdx.store.lifecycle import State
from pdx.store.policies.by_name import Maker
from pdx.store.policies.by_name import find as find_policy
from pdx.store.store import Store
from pdx.store.tier_setup import open_below
from pdx.store.tiers import Tiers
from pdx.store.transfers import Transfers
from pdx.telemetry.env import Env
from pdx.telemetry.faults import counted, printable
from pdx.telemetry.timeline import Event
from pdx.telemetry.trace import tracer_for
from pdx.wire.base import check_groups, check_slots
from pdx.wire.messages import (
    RIGHTS,
    VERSION,
    Abort,
    Admit,
    Admitted,
    Answer,
    Ask,
    Bye,
    Cancel,
    Delete,
    Done,
    Expect,
    Fill,
    FindMoved,
    Hello,
    Mark,
    Moved,
    Outcome,
    Pin,
    Ping,
    Push,
    Release,
    Renew,
    Welcome,
)
from pdx.wire.verbs import Advise, AnyVerb, Status, Why

log = logging.getLogger("pdx.node")

PROBE_BYTES = 1 << 20  # after the chunks in the arena: peers write there to measure their channels

MAX_MARKS = 4096  # waiting for the next heartbeat
MAX_DEGRADED = 64  # reasons counted by name; further ones are counted together


class Service:
    """A node's state and the handlers that change it. Not thread-safe."""

    def __init__(
        self,
        config: NodeConfig,
        arenas: Sequence[Arena],
        epoch: int,
        env: Env,
        *,
        policy: Maker | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        poller: zmq.Poller | None = None,
    ) -> None:
        """`arenas`: peers read and write the first; the others are on GPUs. `policy`: replaces the eviction policy that
        `config` names. `context`, `poller`: for the sockets between nodes; without them there are no peers.

        :raises ConfigError: there is no such eviction policy.
        """
        arena = arenas[0]
        self.config = config
        self._arenas = arenas
        self.epoch = epoch
        self.env = env
        self.name = node_name(config)
        nbytes = round_up(config.arena_bytes)
        self.store = Store(
            arena,
            env,
            nbytes=nbytes,
            more=arenas[1:],
            policy=policy or find_policy(config.policy, env.clock),
            quota=config.salt_quota,
            lease_share=config.tenant_lease_share,
            kept_share=config.pin_share,
        )
        self.sessions = Sessions()
        self.counters = env.counters
        self._degraded: set[str] = set()  # reasons that are counted by name
        self.transfers = Transfers(env)
        self.copies = Copies(
            self.store, env, group_bytes=config.group_bytes, tracer=tracer_for(config.trace, self.name)
        )
        self.tiers = Tiers(
            self.store,
            self.copies,
            env,
            memory=arenas,
            spills=not arena.gpu,
            choice=config.store,
            window=config.store_window,
            store_s=config.push_s,
            load_s=config.fetch_s,
        )
        self.started_at = env.clock()
        self.marks: deque[Mark] = deque(maxlen=MAX_MARKS)  # for the next heartbeat
        self.has_news = True  # engines have come or gone since the last heartbeat
        self.gpus = [each.gpu for each in arenas]
        chunk_bytes = self.store.pools[0].total_bytes
        regions = Regions(config, env, arena, probe=Slot(chunk_bytes, arena.nbytes - chunk_bytes, 0))
        self.peers = Peers(self, regions, context, poller)
        if len(arenas) > 1:
            self.tiers.arenas = ArenaTier(arenas, self.store, self.copies, env)
        self.look_ahead = LookAhead(self)
        self.places = Places(self)
        self.names = ContentNames()
        self.hinting = Hinting(self)
        self.admissions = Admissions(self)
        self.controls = Controls(self)
        self.events = EventLog(self.store, self.tiers, self.gpus, env)
        self._handlers = self._by_message()

    def open_tiers(self) -> None:
        """Open the configured tiers below memory; `tiers.close` closes them.

        :raises ConfigError: a folder cannot be this node's alone, or an address or file is invalid.
        """
        self.tiers.below += open_below(self.config, self.tiers)

    # ---- attaching --------------------------------------------------------------------------

    def attach(self, route: bytes, hello: Hello, pid: int) -> tuple[Session, Welcome]:
        """`pid`: the process that sent the hello, as the kernel reports it.

        :raises ProtocolError: the process has another version, or may not attach.
        :raises NodeError: too many processes are attached.
        """
        if hello.version != VERSION:
            raise ProtocolError(f"this node speaks version {VERSION}, the process {hello.version}; upgrade the older")
        if hello.kind == "peer":
            raise ProtocolError("a peer connects where peers do (--listen), not where processes attach")
        session = self.sessions.attach(route, hello, pid, self.env.clock())
        if session.unshared:
            error = LayoutError(f"engine {hello.engine!r} shares no chunks {session.unshared}")
            counted(log, self.counters, "engine_layouts_differ", "%s", error)
        self.has_news = True
        if hello.kind == "scheduler":
            log.info("joined: %s (process %d)", printable(session.title), pid)
        session.home = next((at for at, arena in enumerate(self._arenas) if hello.gpu and arena.gpu == hello.gpu), 0)
        arena = self._arenas[session.home]
        pid = os.getpid() if session.is_near else 0
        welcome = Welcome(self.epoch, pid, str(arena.path), arena.nbytes, name=self.name)
        if arena.gpu:
            handover = str(handover_path(self.config.address, session.home))
            welcome = msgspec.structs.replace(welcome, gpu=arena.gpu, handover=handover, ticket=session.ticket)
        return session, welcome

    def end(self, session: Session) -> None:
        """End the session of a process that is dead or said bye: everything it held is given back."""
        self.sessions.detach(session)
        self.has_news = True
        if session.hello.kind == "scheduler":
            log.info("left: %s", printable(session.title))
        with self.env.faults.contain("the end of a session's questions"):
            self.admissions.end_session(session)
            self.look_ahead.end_session(session)
        with self.env.faults.contain("the end of a session's chunks"):
            self._lost(self.store.end_session(session.number))

    def _lost(self, chunks: Sequence[Chunk]) -> None:
        """Note that these chunks will never be whole, so that nothing waits for them any more."""
        self.transfers.aborted(chunks, self.env.clock())
        self._changed(chunks)

    def _changed(self, chunks: Sequence[Chunk]) -> None:
        """Have copies and waiting requests go on: slices of these chunks were filled, or they are whole or aborted."""
        names = self.transfers.filled(chunks, self.env.clock())
        self._note_near(names)
        self.copies.changed(chunks)
        self.tiers.storing.changed(chunks)
        self.admissions.changed(chunks, names)

    def _note_near(self, transfers: Iterable[str]) -> None:
        """Tell the proxy which transfers come near their end: it sends decode legs of long prompts only then, because a
        waiting leg keeps its engine's processes busy."""
        for name in transfers:
            if self.transfers.comes_near(name):
                self.marks.append(Mark(name, Event.NEAR, time.monotonic_ns()))

    def handle(self, session: Session, ask: Ask) -> Answer | None:
        """Answer a message; None: the answer comes later, from `admissions.late_answers`.

        :raises NodeError: refused.
        :raises ProtocolError: the message is invalid from this session or in this state.
        """
        session.last_seen = self.env.clock()
        if type(ask) not in RIGHTS[session.hello.kind]:
            raise ProtocolError(f"{type(ask).__name__} is not for a {session.hello.kind} that is attached")
        return self._handlers[type(ask)](session, ask)

    def tick(self) -> None:
        """Enforce deadlines; call it a few times a second."""
        with self.env.faults.contain("the deadlines of the store"):
            self._lost(self.store.expire())
        with self.env.faults.contain("the deadlines of transfers"):
            for name in self.transfers.expire(self.env.clock()):
                self.store.drop_tails(name)
        with self.env.faults.contain("the deadlines of copies"):
            self.copies.tick(self.env.clock())
        with self.env.faults.contain("what is stored ahead of its eviction"):
            self.tiers.storing.look_ahead()
        with self.env.faults.contain("what is due in the tiers"):
            self.tiers.tick()
        with self.env.faults.contain("the deadlines of the look-ahead"):
            self.look_ahead.tick()
        with self.env.faults.contain("the times of hints"):
            self.hinting.tick()
        self.peers.tick()

    def turn(self) -> None:
        """Carry on after each turn of the control loop."""
        with self.env.faults.contain("the turn of copies"):
            landed, self.copies.landed = self.copies.landed, []
            self.peers.loaded(landed)
            self._changed([*self.peers.turn(), *landed])
            self.tiers.storing.turn()
            self.look_ahead.answered(self.env.news)
            self.look_ahead.landed(landed)
            self.look_ahead.turn()
            self.copies.pump()
        with self.env.faults.contain("the jobs of controllers"):
            self.controls.jobs.turn()

    def due_in(self, now: float) -> float:
        """Seconds until the next turn is due, even if nothing happens before."""
        return min(self.admissions.due_in(now), self.controls.jobs.due_in, self.peers.lookups.due_in(now))

    # ---- one method per message -------------------------------------------------------------

    def _by_message(self) -> dict[type[Ask], Callable[[Session, Any], Answer | None]]:
        return {
            Bye: self._bye,
            Ping: self._ping,
            Admit: self._admit,
            Expect: self._expect,
            FindMoved: self._find_moved,
            Push: self._push,
            Fill: self._fill,
            Abort: self._abort,
            Release: self._release,
            Renew: self._renew,
            Pin: self._pin,
            Delete: self._delete,
            **dict.fromkeys(get_args(AnyVerb), self._verb),
            Advise: self._advise,
            Cancel: self._cancel,
            Mark: self._mark,
        }

    def _bye(self, session: Session, ask: Bye) -> Answer:
        self.end(session)
        return Done()

    def _ping(self, session: Session, ask: Ping) -> Answer:
        session.running, session.chunk_s, session.load_s = ask.running, ask.chunk_s, ask.load_s
        if (layout := ask.keyed or session.hello.layout) != session.layout:
            session.layout = layout
            self.has_news = True
        for reason, count in ask.degraded.items():
            is_known = reason in self._degraded or len(self._degraded) < MAX_DEGRADED
            self._degraded |= {reason} if is_known else set()
            self.counters[f"degraded_{reason if is_known else 'others'}"] += count
        return Done()

    def _admit(self, session: Session, ask: Admit) -> Answer | None:
        if ask.request:
            self.look_ahead.asks(session, ask.request)
        if ask.hints.session and ask.lease_s:
            self.look_ahead.came(session, ask, self.sessions.arenas(session, ask.shards))
        if ask.tokens is not None and session.hello.kind == "scheduler":
            self.names.register(ask.tokens, ask.keys, ask.parent)
        return self.admissions.ask(session, ask)

    def _find_moved(self, session: Session, ask: FindMoved) -> Answer:
        pieces = self.names.find(ask.scope, ask.ids, ask.chunk_tokens, self._may_be_there)
        if not pieces:
            self.admissions.explanations.not_moved(session, ask.request)
        return Moved(pieces)

    def _may_be_there(self, key: bytes) -> bool:
        """Whether a chunk is whole, here or in a tier, as far as is known. It may have been named but never filled."""
        if chunks := self.store.index.of(key):
            return all(chunk.state is State.SEALED for chunk in chunks)
        return any(tier.is_shared or tier.find([key], 1) for level in self.tiers.below for tier in level)

    def _expect(self, session: Session, ask: Expect) -> Answer:
        check_slots(len(ask.keys), ask.shards)
        check_groups(len(ask.keys), len(ask.groups))
        return Done(int(self.look_ahead.expect(session, ask, self.sessions.arenas(session, ask.shards))))

    def _push(self, session: Session, ask: Push) -> Answer:
        arenas = self.sessions.arenas(session, ask.shards)
        found = self.store.find(ask.keys, ask.shards, arenas)
        if ask.dry_run:
            return Done(len(found))
        if len(found) < len(ask.keys):
            raise ChunkMissing(f"{len(ask.keys) - len(found)} of {len(ask.keys)} chunks are not there")
        if ask.peer != self.name:
            self.tiers.storing.bring(ask.keys, ask.shards, arenas, None)
        try:
            copies = self.peers.push(ask.peer, ask.keys, ask.shards, None, session.hello.layout)
        except (PeerError, ConfigError) as error:
            raise NodeError(str(error)) from error
        return Done(sum(len(copy.keys) for copy in copies))

    def _fill(self, session: Session, ask: Fill) -> Answer:
        chunks = self.store.fill(ask.slots, ask.first_layer, ask.layers, session.number)
        count = sum([chunk.state is State.FILLING for chunk in chunks])  # the others have been aborted
        if ask.blended is not None:
            for chunk in chunks:
                chunk.reservation.origin.blended = ask.blended
        if ask.seal:
            self.store.seal(chunks)
            self.transfers.sealed(chunks, self.env.clock())
        self._changed(chunks)
        return Done(count)

    def _abort(self, session: Session, ask: Abort) -> Answer:
        chunks = self.store.unfinished(ask.slots)
        owned = [chunk for chunk in chunks if chunk.reservation.owner == session.number]
        mine = owned if ask.unused else [chunk for chunk in chunks if chunk.writer == session.number]
        self.store.abort(owned)
        self.store.let_go(mine)
        self._lost([*mine, *owned])
        return Done(len({chunk.slot.offset for chunk in [*mine, *owned]}))

    def take_back(self, session: Session, answer: Answer) -> None:
        """Give back what an answer grants that was not sent, because the process does not read."""
        self.counters["answers_dropped"] += 1
        if isinstance(answer, Admitted):
            self._abort(session, Abort(answer.granted_slots, unused=True))
            if answer.lease:
                self.store.release(answer.lease, session.number)

    def _release(self, session: Session, ask: Release) -> Answer:
        if ask.request:  # before `release`, which fails if the lease has ended
            self.admissions.explanations.amend(session, ask.request, ask.failed_chunk)
        self.store.release(ask.lease, session.number)
        return Done(1)

    def _renew(self, session: Session, ask: Renew) -> Answer:
        self.store.renew(ask.lease, session.number, min(ask.lease_s, self.config.max_lease_s))
        return Done(1)

    def _pin(self, session: Session, ask: Pin) -> Answer:
        check_slots(len(ask.keys), ask.shards)
        arenas = self.sessions.arenas(session, ask.shards)
        if ask.pinned:
            found = (self.store.find([key], ask.shards, arenas) for key in ask.keys)
            self.controls.check_pins([chunk for run in found for chunks in run for chunk in chunks])
        count = self.store.pin(ask.keys, ask.shards, pinned=ask.pinned, arenas=arenas)
        if count != len(ask.keys):
            raise ChunkMissing(f"{len(ask.keys) - count} of {len(ask.keys)} chunks are not there")
        return Done(count)

    def _delete(self, session: Session, ask: Delete) -> Answer:
        self.names.forget(ask.keys)
        below = [self.tiers.forget([key], is_named=session.is_client) for key in ask.keys]
        return Done(sum(max(count, self.store.delete([key])) for key, count in zip(ask.keys, below, strict=True)))

    def _advise(self, session: Session, ask: Advise) -> Answer:
        check_slots(len(ask.keys), ask.shards)
        arenas = self.sessions.arenas(session, ask.shards)
        return self.hinting.advise(ask, arenas, is_named=session.is_client)

    def _cancel(self, session: Session, ask: Cancel) -> Answer:
        return Done(int(self.cancel(ask.transfer, session.source)))

    def cancel(self, transfer: str, source: str) -> bool:
        """Give up a transfer at the request of `source`; return whether that is news."""
        news = self.transfers.give_up(transfer, self.env.clock(), source)
        self.copies.cancel(transfer)
        # Even if it was given up before: its chunks may have been aborted one by one.
        self.peers.inbound.cancel(transfer)
        if news:
            self.counters["transfers_given_up"] += 1
            unsealed = [chunk for chunk in self.store.index.transfers.of(transfer) if chunk.state is State.FILLING]
            self.store.abort(unsealed)
            self._changed(unsealed)  # another transfer may push them, or wait for them
            self.store.drop_tails(transfer)
        return news

    def _mark(self, session: Session, ask: Mark) -> Answer:
        self.marks.append(msgspec.structs.replace(ask, engine=session.hello.engine))
        if ask.event == Event.ADMITTED:
            self._note_near([ask.transfer])
        if ask.event == Event.PREFILL_END:
            self.peers.tiers.prefill_ended(ask.transfer, ask.at_ns)
        return Done()

    def _verb(self, session: Session, ask: AnyVerb) -> Answer:
        return self.control(ask)

    def control(self, verb: AnyVerb) -> Outcome:
        """Carry out a controller's verb, by whichever way it came.

        :raises NodeError: refused. :raises ProtocolError: the verb is invalid.
        """
        if isinstance(verb, Status):
            return node_status(self)
        if isinstance(verb, Advise):
            return self.hinting.advise(verb, (), is_named=False)
        if isinstance(verb, Why):
            return self.admissions.explanations.of(verb.request, self.env.clock())
        return self.controls.handle(verb)
