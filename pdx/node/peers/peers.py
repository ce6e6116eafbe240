"""A node among its peers: what they may do in each other's memory, and where their messages go.

A peer is a tier to the node that writes (`tiers`) and a session to the node that is written to (`inbound`); `fetches`
are this node's requests that peers push to it. All messages come through one connection per peer, and everything is on
the control loop's thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq
from msgspec.structs import replace

from pdx.config import NodeConfig, node_name
from pdx.errors import ConfigError, NodeError, PeerError, ProtocolError
from pdx.node.peers.connection import ConnectionState, Ending, PeerConnection, refusal, welcome
from pdx.node.peers.connections import Connections
from pdx.node.peers.fetches import Fetches
from pdx.node.peers.inbound_push import InboundPush
from pdx.node.peers.inbound_pushes import InboundPushes
from pdx.node.peers.lookups import Lookups
from pdx.node.peers.peer_tiers import PeerTiers
from pdx.node.peers.regions import Regions
from pdx.store.cache_groups import Goal, restorable
from pdx.store.chunk import Chunk, Wanted
from pdx.store.copy import Copy, Priority
from pdx.store.deadlines import Deadlines
from pdx.store.index import Groups
from pdx.store.lifecycle import State
from pdx.store.paying import Computing, patience_s
from pdx.store.tier import Grant
from pdx.telemetry.env import Env
from pdx.telemetry.faults import counted
from pdx.telemetry.host import host_id
from pdx.telemetry.recent import remember
from pdx.telemetry.timeline import Event
from pdx.wire import messages
from pdx.wire.base import check_groups
from pdx.wire.proxy import PeerEntry
from pdx.wire.status import PeerStatus
from pdx.wire.verbs import Found

if TYPE_CHECKING:
    from pdx.node.service import Service

log = logging.getLogger("pdx.node")

MAX_WARM = 8  # with more peers than that, each is dialled only when needed
WARM_UP_S = 5.0
FIRST_QUESTION = 1 << 40  # above the numbers of copies, for which `about` stands, too
MAX_ASKED = 1024  # questions without an answer, or with one that was not taken yet
MAX_WANTS = 1000  # pushes that one peer asked for and that are not over; each holds its chunks until then


class Load(msgspec.Struct, eq=False):
    """Chunks that a peer asked for and this node loads; pushed when all have come, or at the deadline."""

    peer: PeerConnection
    number: int
    push: messages.Push
    left: set[bytes]
    deadline: float
    nbytes: int


class Peers:
    """A node's dealings with all its peers."""

    def __init__(
        self,
        node: Service,
        regions: Regions,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        poller: zmq.Poller | None = None,
    ) -> None:
        """`context`, `poller`: see `Connections`.

        :raises ConfigError: the address to listen at, the keys or the roster cannot be used.
        """
        config, env = node.config, node.env
        self.config: NodeConfig = config
        self.env: Env = env
        self._name, self._epoch = node_name(config), node.epoch
        self._store, self.copies, self._below = node.store, node.copies, node.tiers
        self._loads: Groups[bytes, Load] = Groups()  # by each key that is still to come
        self._loads_late: Deadlines[Load] = Deadlines()
        self._loading_bytes, self._share_bytes = 0, node.store.pools[0].total_bytes * config.peer_share
        self._transfers = node.transfers
        self._sessions = node.sessions  # of attached processes; peers get numbers from the same sequence
        self.marks = node.marks  # of transfers, for the proxy
        self._numbers = itertools.count(FIRST_QUESTION)
        self._asked: OrderedDict[int, str | Found | messages.Refused] = (
            OrderedDict()
        )  # by number: the peer that is to answer, or the answer
        self.on_settle: Callable[[str, messages.Settle], Found]  # handles a peer's `Settle`; set by `Controls`
        self._warm_up_at = 0.0
        self.regions = regions
        self.connections = Connections(self, config, env, node.sessions.numbers, context, poller)
        self.fetches = Fetches(self.connections, config.fetch_s, env)
        self.lookups = Lookups(self.connections, config.peer_lookup_s, env, self._numbers)
        self.inbound = InboundPushes(
            config, env, store=node.store, tiers=node.tiers, transfers=node.transfers, regions=regions
        )
        self.tiers = PeerTiers(self)
        if context is not None and (config.channels or config.roster or config.listen):
            regions.when_open(self.inbound.start_threads)  # peers are expected: be ready before they come

    # ---- for attached processes and the proxy -----------------------------------------------

    def push(self, name: str, keys: Sequence[bytes], shards: int, transfer: str | None, layout: bytes) -> list[Copy]:
        """See `PeerTiers.push`; no-op if `name` is this node."""
        if name == self._name:
            return []
        return self.tiers.push(name, keys, shards, transfer=transfer, layout=layout)

    def ask(self, name: str, question: messages.Settle) -> int:
        """Ask a peer, dialling it if needed; return the question's number for `answer`. 0: it is not connected yet.

        :raises PeerUnknown, ConfigError: that peer cannot be dialled.
        """
        peer = self.connections.dial(name)
        if peer.state is not ConnectionState.READY:
            return 0
        number = next(self._numbers)
        remember(self._asked, number, name, MAX_ASKED)
        peer.send(question, number)
        return number

    def answer(self, number: int) -> Found | messages.Refused | None:
        """Take out the answer to the question of this number; None: it has not come."""
        answer = self._asked.get(number)
        if answer is None or isinstance(answer, str):
            return None
        del self._asked[number]
        return answer

    def _settle(self, peer: PeerConnection, ask: messages.Settle, about: int) -> None:
        try:
            peer.send(self.on_settle(peer.name, ask), about)
        except NodeError as error:
            peer.send(messages.Refused.of(error), about)

    def _note(self, peer: PeerConnection, about: int, answer: Found | messages.Refused) -> None:
        """Keep a peer's answer if it was asked; else drop it, because chunks are dropped on the strength of answers."""
        if self._asked.get(about) != peer.name:
            text = "%s answers what it was not asked"
            counted(log, self.env.counters, "answers_dropped", text, peer.name)
            return
        self._asked[about] = answer

    def may_come(self, ask: messages.Admit, goal: Goal, arenas: Sequence[int], computing: Computing) -> bool:
        """Whether missing chunks may still come from a peer, sooner than computing them takes: from the peer that the
        request names, or else from the one that has the most of the prompt, after asking several.

        :raises PeerUnknown, ConfigError: that peer cannot be dialled.
        """
        now = self.env.clock()
        if not ask.source and ask.wait_s and ask.awaits is None:
            count = (len(goal.keys) if ask.groups else ask.sought) - goal.hits
            source = self.lookups.source(ask, now, computing.seconds(count), lambda: self._hits(ask, goal, arenas))
            if source is None:
                return True
            ask = replace(ask, source=source)
        if ask.source in ("", self._name):
            return False
        return self.fetches.is_waiting(ask, goal.hits, now, computing, goal.keys if ask.groups else ())

    def _hits(self, ask: messages.Admit, goal: Goal, arenas: Sequence[int]) -> int:
        """How many leading chunks of a prompt can be restored here."""
        if not ask.groups:
            return goal.hits
        return restorable(self._store, Wanted(ask.sought_keys, ask.shards, arenas, rules=ask.groups))[0]

    def why_not(self, ask: messages.Admit, count: int, chunk_s: float) -> str:
        """Why the peer that a request names or has found was not asked for `count` chunks; empty: it may have been."""
        if ask.awaits is not None or count <= 0:
            return ""
        source = ask.source or self.lookups.known(ask)
        if source in ("", self._name):
            return ""
        takes_s, computing_s = self.fetches.takes_s(source, count), count * chunk_s
        if takes_s <= computing_s:
            return ""
        return f"not asked of node {source}: it would take {takes_s:.3g} s, and computing takes {computing_s:.3g} s"

    def take_proxy_list(self, entries: Sequence[PeerEntry]) -> None:
        """Take in the proxies' list of nodes; new ones are dialled at the next tick, unless there are many."""
        before = self.connections.roster.names
        self.connections.take_proxy_list([entry for entry in entries if entry.name != self._name])
        if {*before} != {*self.connections.roster.names}:
            self._warm_up_at = 0.0

    # ---- for `Connections` ------------------------------------------------------------------

    def _layouts(self) -> list[bytes]:
        return sorted({session.hello.layout for session in self._sessions} - {b""})

    def identity(self) -> messages.Hello:
        """This node as it introduces itself to peers; until the arena is registered, with all schemes it may have."""
        return messages.Hello(
            messages.VERSION,
            os.getpid(),
            "peer",
            self._name,
            epoch=self._epoch,
            host=host_id(),
            schemes=self.regions.schemes if self.regions.is_open else self.regions.candidates,
            layouts=self._layouts(),
        )

    def greeted(self, peer: PeerConnection, schemes: list[str]) -> None:
        """Welcome a peer to write by these schemes, once the arena is registered; its earlier connections are over."""
        self.lookups.ready()
        for old in self.inbound.sessions:
            if old.name == peer.name and old.is_dead_if(peer.epoch, peer.host):
                self.inbound.session_over(old, is_dead=True)
        self.regions.when_open(lambda: self._welcome(peer, schemes))

    def _welcome(self, peer: PeerConnection, schemes: Sequence[str]) -> None:
        if peer.state is ConnectionState.CLOSED:
            return
        regions = self.inbound.invite(peer, schemes)
        if not regions:
            reasons = "; ".join(f"{scheme}: {self.regions.why.get(scheme, 'closed')}" for scheme in schemes)
            why = f"no channel works at {self._name}: {reasons}; see `pdx doctor` there"
            self.connections.leave(peer, why)
            self.connection_over(peer, Ending.TURN_DOWN, why)
            return
        peer.welcome(welcome(self.identity(), regions, self.regions.probe))

    def invited(self, peer: PeerConnection, welcome: messages.Welcome, schemes: list[str]) -> None:
        """Take in a peer's welcome: where it may be written, by these schemes of this node, the best first."""
        self.fetches.ready(peer)
        at_once = peer.is_dialled or (bool(self.connections.roster.address_of(peer.name)) and self._is_warm())
        self.regions.when_open(lambda: self.tiers.ready(peer, welcome, schemes, at_once=at_once))

    def connection_over(self, peer: PeerConnection, ending: Ending, why: str) -> None:
        """A connection is over, or was never set up; not called if this node itself left or closed it."""
        self.tiers.gone(peer.name, why)
        # A bye does not prove that no write is in flight: only the channel can tell when the last one has ended.
        self.inbound.session_over(peer, is_dead=ending is Ending.RESTARTED)

    def message(self, peer: PeerConnection, body: messages.PeerBody, about: int) -> None:
        """Handle a peer's request, as a session of this node, or answer. Numbers in it are valid only between these two
        nodes.

        :raises ProtocolError: the message is invalid; the caller drops and counts it.
        """
        match body:
            case messages.Admit():
                self._admit(peer, body, about)
            case messages.Admitted():
                self.copies.granted(self.tiers.look(peer.name), about, Grant(body.granted, body.granted_slots))
            case Found() | messages.Refused() if about >= FIRST_QUESTION:
                self._note(peer, about, body)
            case messages.Settle():
                self._settle(peer, body, about)
            case messages.Refused():
                self.copies.stopped(self.tiers.look(peer.name), about, body.text)
            case messages.Release():
                self.inbound.let_go(peer, body)
            case messages.Push():
                self._push_to(peer, body, about)
            case messages.Cancel(transfer):
                now = self.env.clock()
                self._transfers.give_up(transfer, now, peer.source)
                self.fetches.over(peer.name, 0, transfer, now)
            case messages.Done() if about >= FIRST_QUESTION:
                self.lookups.answered(peer, about, body.count, self.env.clock())
            case messages.Done():
                self.fetches.answered(peer, about, body.count, self.env.clock())
            case messages.Chosen():
                self.inbound.choose(peer, body.scheme)

    # ---- requests of peers, as sessions -----------------------------------------------------

    def _admit(self, peer: PeerConnection, ask: messages.Admit, number: int) -> None:
        """Take in a peer's offer of chunks. :raises ProtocolError: see `InboundPushes.admit`."""
        layouts = self._layouts()
        if ask.layout and layouts and ask.layout not in layouts:
            text = "%s has chunks of another KV layout than any engine here has"
            counted(log, self.env.counters, "peer_layouts_differ", text, peer.name)
            peer.send(refusal(f"no engine at {self._name} has the KV layout of these chunks"), number)
            return
        self.inbound.admit(peer, number, ask)

    def _push_to(self, peer: PeerConnection, ask: messages.Push, number: int) -> None:
        """Push to a peer the chunks that it asks for and that are here; of a transfer, also those being filled.

        :raises ProtocolError: it asks for a push to another node, or its cache groups have unequal numbers of keys.
        """
        if ask.peer:
            raise ProtocolError(f"{peer.name} asks for a push to {ask.peer[:80]!r}")
        check_groups(len(ask.keys), len(ask.groups))
        if ask.transfer is not None and self.tiers.is_pushing(ask.transfer, peer.name):
            peer.send(messages.Done(len(ask.keys)), number)
            return
        length, keys = self._restorable(ask) if ask.groups else (0, ask.keys)
        hits = self._leading(peer.name, replace(ask, keys=keys))
        hits = 0 if ask.groups and hits < len(keys) else hits  # part of what a length needs is of no use
        coming = self._load(peer, ask, number, hits) if ask.within_s and not ask.groups and ask.transfer is None else 0
        peer.send(messages.Done(length if hits and ask.groups and ask.dry_run else hits + coming), number)
        if not hits or coming or ask.dry_run:
            return
        self.tiers.push(peer.name, keys[:hits], ask.shards, transfer=ask.transfer, layout=b"", want=number)
        self.env.counters["wants_served"] += 1

    def _load(self, peer: PeerConnection, ask: messages.Push, number: int, hits: int) -> int:
        """How many chunks after those here this node's tiers can load in time; begins to, unless it is a dry run."""
        if hits == len(ask.keys):
            return 0
        wanted = Wanted(ask.keys, ask.shards, is_named=True, who=f"node {peer.name}")
        within_s = min(ask.within_s, self.config.fetch_s)  # the time limit of a load
        room_bytes = self._share_bytes - self._loading_bytes
        found = self._below.loadable(wanted, hits, room_bytes, Computing(within_s / (len(ask.keys) - hits)))
        found = found[: MAX_WANTS - len(self._loads)]
        if ask.dry_run or not found or len(self._loads.of(found[0][0])) >= MAX_WARM:
            return len(found) if ask.dry_run else 0
        deadline = self.env.clock() + patience_s(within_s, self.config.fetch_s)
        self.copies.load(found, replace(wanted, is_named=False), priority=Priority.AWAITED, deadline=deadline)
        left = {key for key, _, _ in found if self.copies.is_filled_here(key, ask.shards)}
        nbytes = sum(each.nbytes for _, _, each in found) * ask.shards if left else 0
        load = Load(peer, number, replace(ask, within_s=0.0), left, deadline, nbytes)
        self._loading_bytes += nbytes
        for key in left:
            self._loads.add(key, [load])
        self._loads_late.add([load] if left else (), deadline)
        return len(left)

    def loaded(self, chunks: Sequence[Chunk]) -> None:
        """Note that slices of these chunks were loaded, or never will be."""
        for key in {chunk.key for chunk in chunks} if len(self._loads) else ():
            for load in self._loads.of(key):
                if not self.copies.is_filled_here(key, load.push.shards):
                    self._loads.discard(key, load)
                    load.left.discard(key)
                    if not load.left:
                        self._push_loaded(load)

    def _push_loaded(self, load: Load) -> None:
        """Push what has come of a load, when all has come or it is late: no event tells, for one, of deleted chunks."""
        self._loads_late.discard(load, load.deadline)
        self._loading_bytes -= load.nbytes
        for key in load.left:
            self._loads.discard(key, load)
        with self.env.faults.contain("a push of what was loaded"):
            if load.peer.state is ConnectionState.READY:
                self._push_to(load.peer, load.push, load.number)

    def _restorable(self, want: messages.Push) -> tuple[int, list[bytes]]:
        """The length of the longest part of a prompt of several cache groups that is here, and the keys it needs."""
        length, found = restorable(self._store, Wanted(want.keys, want.shards, rules=want.groups))
        return length, [chunks[0].key for chunks in found]

    def _leading(self, name: str, want: messages.Push) -> int:
        """How many leading keys to push to a peer: those that are here, within what the peer's pushes may hold."""
        queue = self.copies.queue(self.tiers.look(name))
        count, held = queue.wants, queue.wanted_bytes
        for index, key in enumerate(want.keys):
            chunks = self._store.index.known(key, want.shards)
            if chunks is None or (want.transfer is None and any(chunk.state is not State.SEALED for chunk in chunks)):
                return index
            nbytes = sum(chunk.slot.nbytes for chunk in chunks)
            if count >= MAX_WANTS or (held and held + nbytes > self._share_bytes):
                text = "%s wants more than %d pushes with %d bytes"
                counted(log, self.env.counters, "wants_limited", text, name, count, held)
                return index
            held += nbytes
        return len(want.keys)

    # ---- pushes to this node ----------------------------------------------------------------

    def _push_over(self, push: InboundPush) -> None:
        offer, name, now = push.offer, push.session.name, self.env.clock()
        if offer.want and offer.transfer is None and push.landed_bytes:
            self.fetches.landed(name, offer.nbytes * offer.shards, push.landed_bytes, push.opened_at, now)
        if not (offer.want and push.writer.wants[offer.want]):  # else another push brings chunks of another size
            self.fetches.over(name, offer.want, offer.transfer, now)
        if offer.transfer is not None and push.landed_bytes:
            self.marks.append(messages.Mark(offer.transfer, Event.LANDED, time.monotonic_ns(), push.landed_bytes))

    # ---- time and the end -------------------------------------------------------------------

    def turn(self) -> list[Chunk]:
        """After each turn of the control loop; returns chunks of which slices have landed, or never will."""
        changed: list[Chunk] = []
        with self.env.faults.contain("the turn of questions to peers"):
            self.lookups.turn(self.env.clock())
        with self.env.faults.contain("the turn of pushes from peers"):
            self.inbound.turn()
            changed, self.inbound.changed = self.inbound.changed, changed
            over, self.inbound.over = self.inbound.over, []
            for push in over:
                self._push_over(push)
        return changed

    def tick(self) -> None:
        """Enforce deadlines; call it a few times a second."""
        now = self.env.clock()
        with self.env.faults.contain("the tick of connections"):
            self.connections.tick()
        with self.env.faults.contain("the tick of pushes from peers"):
            self.inbound.tick()
        with self.env.faults.contain("what peers wait for in tiers"):
            for load in self._loads_late.take(now):
                self._push_loaded(load)
        with self.env.faults.contain("the tick of fetches"):
            late = self.fetches.tick(now, self._room_since)
            if late:
                self.env.counters["fetches_late"] += late
        if now >= self._warm_up_at:
            self._warm_up_at = now + WARM_UP_S
            with self.env.faults.contain("dialling peers"):
                self._warm_up()

    def _room_since(self, name: str, number: int) -> float:
        peer = self.connections.of(name)
        pushes = self.inbound.of(peer) if peer is not None else []
        push = next((each for each in pushes if each.offer.want == number), None)
        return 0.0 if push is None else push.opened_at or self.env.clock()

    def _is_warm(self) -> bool:
        return len([name for name in self.connections.roster.names if name != self._name]) <= MAX_WARM

    def _warm_up(self) -> None:
        """Dial all peers before the first request needs them, unless they are many."""
        self.tiers.forget_strangers()
        self.fetches.forget(self.connections.roster.names)
        self.inbound.forget({*self.connections.roster.names, *self.connections.known})
        if not self._is_warm():
            return
        for name in self.connections.roster.names:
            if name == self._name:
                continue
            try:
                self.connections.dial(name, is_wanted=False)
                self.tiers.start(name)
            except (PeerError, ConfigError) as error:
                log.debug("%s is not dialled: %s", name, error)

    def statuses(self) -> list[PeerStatus]:
        return [self._status(name) for name in sorted(self.tiers.names.union(self.connections.known))]

    def _status(self, name: str) -> PeerStatus:
        tier, peer, account = self.tiers.look(name), self.connections.of(name), self.inbound.account(name)
        return PeerStatus(
            name=name,
            address=self.connections.roster.address_of(name),
            state=peer.state if peer is not None else ConnectionState.CLOSED,
            channel=tier.scheme,
            rates=tier.rates,
            pushes=len(self.copies.of(tier)),
            landing=account.pushes,
            sent_bytes=tier.sent_bytes,
            landed_bytes=account.landed_bytes,
            why=tier.why or (peer.why if peer is not None else ""),
        )

    def close(self) -> None:
        """End all writing, say bye to all peers, close the regions. Idempotent."""
        self.tiers.close()
        self.connections.close()
        self.inbound.close()
        self.regions.close()
