"""A node among its peers: what they and this node may do in each other's memory, and who hears what.

A peer is a tier to who writes (`tiers`) and a session to who is written to (`receiver`); `fetches` is what this node
has asked peers to push to it. All of it comes through one connection per peer, and lives on the control loop's thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

import zmq

from pdx.config import NodeConfig
from pdx.errors import ConfigError, NodeError, PeerError, ProtocolError
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.node.peers.connection import ConnectionState, ConnectionStep, Identity, PeerConnection, refusal
from pdx.node.peers.connections import Connections
from pdx.node.peers.fetches import Fetches
from pdx.node.peers.notifications import are_digests_due
from pdx.node.peers.peer_tiers import PeerTiers
from pdx.node.peers.receive_thread import ReceiveThread, Verdict
from pdx.node.peers.receiver import Landing, Receiver
from pdx.node.peers.regions import Regions
from pdx.store.chunk import Chunk
from pdx.store.copies import Copies
from pdx.store.lifecycle import State
from pdx.store.paying import Computing
from pdx.store.store import Store
from pdx.store.tier import Grant
from pdx.store.transfers import Transfers
from pdx.telemetry.faults import Faults, counted, printable
from pdx.telemetry.host import host_id
from pdx.telemetry.mailbox import Mailbox
from pdx.telemetry.timeline import Event
from pdx.wire.messages import Admit, Admitted, Cancel, Chosen, Done, PeerBody, Push, Refused, Release, Settle, Welcome
from pdx.wire.proxy import PeerEntry
from pdx.wire.status import PeerStatus
from pdx.wire.verbs import Found

log = logging.getLogger("pdx.node")

MAX_WARM = 8  # with more peers than that, each is dialled when it is needed
WARM_UP_S = 5.0
FIRST_QUESTION = 1 << 40  # above the numbers of copies, which `about` names, too
MAX_ANSWERED = 1024  # that nobody has taken yet
MAX_WANTS = 1000  # pushes under way that one peer asked for; each holds its chunks until it is over


class Peers:
    """All that a node has to do with other nodes; a `connections.Handler`. Nothing works before `open`."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        name: str,
        epoch: int,
        arena: Arena,
        probe: Slot,
        store: Store,
        copies: Copies,
        transfers: Transfers,
        counters: Counter[str],
        faults: Faults,
        mailbox: Mailbox,
        numbers: Iterator[int],
        layouts: Callable[[], Sequence[bytes]],
        mark: Callable[[str, Event, int, int], None],
        clock: Callable[[], float],
    ) -> None:
        """`numbers`: of sessions; `layouts` gives the KV layouts of the engines attached now; `mark` notes (transfer,
        event, bytes, time)."""
        self._config = config
        self._name = name
        self._epoch = epoch
        self._arena = arena
        self._probe = probe
        self._store = store
        self._copies = copies
        self._transfers = transfers
        self._counters = counters
        self._faults = faults
        self._numbers = numbers
        self._layouts = layouts
        self._mark = mark
        self._clock = clock
        self._is_open = False
        self._questions = itertools.count(FIRST_QUESTION)
        self._asked: OrderedDict[int, str] = OrderedDict()  # by the number of a question: the peer that is to answer it
        self.answered: OrderedDict[int, Found | Refused] = OrderedDict()  # by the number of the question
        self.on_settle: Callable[[str, Settle], Found] = _settles_nothing  # what a `Settle` of this peer does
        self._warm_up_at = 0.0
        self._threads: dict[str, ReceiveThread] = {}
        self._schemes: dict[int, str] = {}  # by which peers write here, by the number of their session
        self._mailbox = mailbox

    def open(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listen: str,
        host: str,
        watch: Callable[[zmq.Socket[bytes] | int], None],
        unwatch: Callable[[zmq.Socket[bytes] | int], None],
    ) -> None:
        """Listen for peers at this address; data channels listen at `host`.

        :raises ConfigError: the address, the keys or the roster cannot be used.
        """
        config = self._config
        self.regions = Regions(
            self._arena,
            config.channels,
            host,
            self._mailbox,
            counters=self._counters,
            trusts_network=config.trusted_network,
            codec=config.wire_codec,
        )
        self.connections = Connections(
            context,
            self,
            listen=listen,
            keys=config.keys,
            roster=config.roster,
            timeout_s=config.peer_timeout_s,
            ping_s=config.report_s,
            watch=watch,
            unwatch=unwatch,
            counters=self._counters,
            numbers=self._numbers,
            faults=self._faults,
        )
        self.connections.check_self(self._name)
        self.fetches = Fetches(self.connections.dial, config.fetch_s, self._counters)
        self.tiers = PeerTiers(
            config,
            arena=self._arena,
            probe=self._probe,
            copies=self._copies,
            regions=self.regions,
            connections=self.connections,
            mailbox=self._mailbox,
            counters=self._counters,
            mark=self._mark,
            fetches=self.fetches,
            on_ended=self._leave,
            clock=self._clock,
        )
        self.receiver = Receiver(
            self._store,
            self._transfers,
            regions=self.regions,
            peer_share=config.peer_share,
            push_s=config.push_s,
            counters=self._counters,
        )
        self._is_open = True
        if config.channels or config.roster or config.listen:  # peers are meant to come: be ready before they do
            self.regions.when_open(self.start_threads)

    # ---- what attached processes and the proxy want -----------------------------------------

    def push(self, name: str, keys: Sequence[bytes], shards: int, transfer: str | None, layout: bytes) -> int:
        """See `PeerTiers.push`; nothing is to be done where this node is meant."""
        if name == self._name:
            return 0
        return self.tiers.push(name, keys, shards, transfer=transfer, layout=layout)

    def ask(self, name: str, question: Settle) -> int:
        """Ask a peer, which is dialled if need be; the number under which `answered` will have the answer. 0: it is not
        connected yet.

        :raises PeerUnknown, ConfigError: that peer cannot be dialled.
        """
        peer = self.connections.dial(name)
        if peer.state is not ConnectionState.READY:
            return 0
        number = next(self._questions)
        self._asked[number] = name
        while len(self._asked) > MAX_ANSWERED:
            self._asked.popitem(last=False)
        peer.send(question, number)
        return number

    def _settle(self, peer: PeerConnection, ask: Settle, about: int) -> None:
        try:
            peer.send(self.on_settle(peer.name, ask), about)
        except NodeError as error:
            peer.send(Refused.of(error), about)

    def _note(self, peer: PeerConnection, about: int, answer: Found | Refused) -> None:
        """A peer has answered a question; what nobody asked it is dropped: chunks are given up for what a peer says."""
        if self._asked.get(about) != peer.name:
            text = "%s answers what it was not asked"
            counted(log, self._counters, "answers_dropped", text, peer.name)
            return
        del self._asked[about]
        self.answered[about] = answer
        while len(self.answered) > MAX_ANSWERED:
            self.answered.popitem(last=False)

    def may_come(self, ask: Admit, hits: int, computing: Computing) -> bool:
        """Whether what is missing here may still come from the peer that a question names, sooner than it is computed.

        :raises PeerUnknown, ConfigError: that peer cannot be dialled.
        """
        if ask.source in ("", self._name):
            return False
        return self.fetches.is_waiting(ask, hits, self._clock(), computing)

    def why_not(self, ask: Admit, count: int, chunk_s: float) -> str:
        """Why the peer that a question names was not asked for what is missing, `count` chunks; empty: it may have
        been."""
        if ask.source in ("", self._name) or ask.awaits is not None or not count:
            return ""
        takes_s, computing_s = self.fetches.takes_s(ask.source, count), count * chunk_s
        if takes_s <= computing_s:
            return ""
        return f"not asked of node {ask.source}: it would take {takes_s:.3g} s, and computing takes {computing_s:.3g} s"

    @property
    def ended_fetches(self) -> list[bytes]:
        """See `Fetches.ended`."""
        return self.fetches.ended if self._is_open else []

    def cancel(self, transfer: str) -> None:
        """The transfer was given up here."""
        self.receiver.cancel(transfer, self._clock())

    def told(self, entries: Sequence[PeerEntry]) -> None:
        """The proxy's list of nodes."""
        self.connections.told([entry for entry in entries if entry.name != self._name])

    # ---- connections: connections.Handler ---------------------------------------------------

    def identity(self) -> Identity:
        """This node, as peers are told of it; as long as the arena is not registered, with all it may have."""
        return Identity(
            name=self._name,
            epoch=self._epoch,
            host=host_id(),
            pid=os.getpid(),
            schemes=self.regions.schemes if self.regions.is_open else self.regions.candidates,
            layouts=[layout for layout in self._layouts() if layout],
            without=self.regions.why,
        )

    def greeted(self, peer: PeerConnection, schemes: list[str]) -> None:
        """Open the regions to a peer, as soon as the arena is registered."""
        now = self._clock()
        for old in self.receiver.sessions:
            if old.name == peer.name and old.is_dead_if(peer.epoch, peer.host):
                self.receiver.session_over(old, now, is_dead=True)
        self.regions.when_open(lambda: self._welcome(peer, schemes))

    def _welcome(self, peer: PeerConnection, schemes: Sequence[str]) -> None:
        self.start_threads()
        if peer.state is ConnectionState.CLOSED:
            return
        regions = []
        for scheme in schemes:
            listener = self.regions.listeners.get(scheme)
            if listener is not None:
                regions.append(listener.invite(peer.token))
                listener.grant(peer.token, self._probe.offset, self._probe.nbytes)
        if not regions:
            reasons = "; ".join(f"{scheme}: {self.regions.why.get(scheme, 'closed')}" for scheme in schemes)
            why = f"no channel works at {self._name}: {reasons}; see `pdx doctor` there"
            self.connections.turn_down(peer, why)
            self.over(peer, ConnectionStep.TURN_DOWN, why)
            return
        peer.welcome(self.identity().welcome(regions, self._probe))

    def invited(self, peer: PeerConnection, welcome: Welcome, schemes: list[str]) -> None:
        """The peer may be written to."""
        self.fetches.ready(peer)
        at_once = peer.is_dialled or (bool(self.connections.address_of(peer.name)) and self._is_warm())
        self.regions.when_open(lambda: self.tiers.ready(peer, welcome, schemes, at_once=at_once))

    def over(self, peer: PeerConnection, step: ConnectionStep, why: str) -> None:
        """The connection is over, or never came about."""
        self.tiers.gone(peer.name, why)
        self._session_over(peer, step)

    def _session_over(self, peer: PeerConnection, step: ConnectionStep) -> None:
        """The peer writes nothing more, or may not; one that was only silent may still write until its channel is
        closed to it."""
        for listener in self.regions.listeners.values():
            listener.expel(peer.token)
        self._schemes.pop(peer.number, None)
        # A bye is not believed where writes are not checked: its channel says, too, when the last of them has ended.
        self.receiver.session_over(peer, self._clock(), is_dead=step is ConnectionStep.RESTARTED)

    def _leave(self, peer: PeerConnection) -> None:
        """The channel to this peer broke, and nothing is written by it any more: only a new connection has another."""
        self.fetches.lost(peer.name, self._clock())  # asked since the channel broke
        self.connections.leave(peer)
        self._session_over(peer, ConnectionStep.LEAVE)

    def message(self, peer: PeerConnection, body: PeerBody, about: int) -> None:
        """What a peer asks, as a session of this node, and what it answers."""
        match body:
            case Admit():
                self._admit(peer, body, about)
            case Admitted():
                self._copies.granted(self.tiers.look(peer.name), about, Grant(body.granted, body.granted_slots))
            case Found() | Refused() if about >= FIRST_QUESTION:
                self._note(peer, about, body)
            case Settle():
                self._settle(peer, body, about)
            case Refused():
                self._copies.stopped(self.tiers.look(peer.name), about, body.text)
            case Release():
                self.receiver.let_go(peer, body, self._clock())
            case Push():
                self._push_to(peer, body, about)
            case Cancel(transfer):
                now = self._clock()
                self._transfers.give_up(transfer, now, peer.source)
                self.fetches.over(peer.name, 0, transfer, now)
            case Done():
                self.fetches.answered(peer, about, body.count, self._clock())
            case Chosen():
                self._chose(peer, body.scheme)

    # ---- what peers ask, as sessions --------------------------------------------------------

    def _chose(self, peer: PeerConnection, chosen: str) -> None:
        """The peer will write by this scheme alone: the others are closed to it.

        :raises ProtocolError: it was not welcomed to that, or has chosen before.
        """
        if chosen not in self.regions.listeners or peer.number in self._schemes:
            raise ProtocolError(f"{peer.name} chooses {chosen!r}")
        self._schemes[peer.number] = chosen
        for scheme, listener in self.regions.listeners.items():
            if scheme == chosen:
                listener.revoke(peer.token, self._probe.offset, self._probe.nbytes)
            else:
                listener.expel(peer.token)

    def _admit(self, peer: PeerConnection, ask: Admit, number: int) -> None:
        """Room for chunks that the peer has, or is filling.

        :raises ProtocolError: the question makes no sense, or comes before a channel was chosen.
        """
        scheme = self._schemes.get(peer.number)
        if scheme is None:
            raise ProtocolError(f"{peer.name} asks for room before it has chosen a channel")
        layouts = {layout for layout in self._layouts() if layout}
        if ask.layout and layouts and ask.layout not in layouts:
            text = "%s has chunks of another KV layout than any engine here has"
            counted(log, self._counters, "peer_layouts_differ", text, peer.name)
            peer.send(refusal(f"no engine at {self._name} has the KV layout of these chunks"), number)
            return
        self.receiver.admit(peer, scheme, number, ask, self._clock())

    def _push_to(self, peer: PeerConnection, ask: Push, number: int) -> None:
        """The peer asks for chunks: what is here is pushed to it; of a transfer also what is still being filled.

        :raises ProtocolError: it asks for a push to somebody else.
        """
        if ask.peer:
            raise ProtocolError(f"{peer.name} asks for a push to {ask.peer[:80]!r}")
        if ask.transfer is not None and self.tiers.is_pushing(ask.transfer, peer.name):
            peer.send(Done(len(ask.keys)), number)
            return
        hits = self._leading(peer.name, ask)
        peer.send(Done(hits), number)
        if not hits:
            return
        self.tiers.push(peer.name, ask.keys[:hits], ask.shards, transfer=ask.transfer, layout=b"", want=number)
        self._counters["wants_served"] += 1

    def _leading(self, name: str, want: Push) -> int:
        """How many of the keys are pushed to a peer: those that are here, as far as it may have them held."""
        count, held = self._copies.wants(self.tiers.look(name))
        share = self._store.pools[0].total_bytes * self._config.peer_share
        for index, key in enumerate(want.keys):
            chunks = self._store.known(key, want.shards)
            if chunks is None or (want.transfer is None and any(chunk.state is not State.SEALED for chunk in chunks)):
                return index
            nbytes = sum(chunk.slot.nbytes for chunk in chunks)
            if count >= MAX_WANTS or (held and held + nbytes > share):
                text = "%s wants more than %d pushes with %d bytes"
                counted(log, self._counters, "wants_limited", text, name, count, held)
                return index
            held += nbytes
        return len(want.keys)

    # ---- what lands -------------------------------------------------------------------------

    def start_threads(self) -> None:
        """One thread per listener, as soon as there are listeners. Idempotent."""
        for scheme, listener in self.regions.listeners.items():
            if scheme not in self._threads:
                region = self.regions.regions[scheme]
                self._threads[scheme] = ReceiveThread(
                    scheme,
                    listener=listener,
                    memory=self._arena,
                    grants=self.receiver.grants,
                    wake=self.regions.wakes[scheme],
                    is_polled=region.is_polled,
                    needs_digests=are_digests_due(self._config.digests, region),
                    mailbox=self._mailbox,
                    on_landed=self._landed,
                    on_malformed=self._malformed,
                )

    def _landed(self, scheme: str, verdict: Verdict) -> None:
        self.receiver.landed(scheme, verdict, self._clock())

    def _malformed(self, scheme: str, text: str) -> None:
        about = "dropped a notification by %s: %s"
        counted(log, self._counters, "notifications_dropped", about, scheme, printable(text))

    def _landing_over(self, landing: Landing) -> None:
        offer, now = landing.offer, self._clock()
        if offer.want and offer.transfer is None and landing.landed_bytes:
            name, chunk_bytes = landing.session.name, offer.nbytes * offer.shards
            self.fetches.landed(name, chunk_bytes, landing.landed_bytes, landing.opened_at, now)
        self.fetches.over(landing.session.name, offer.want, offer.transfer, now)
        if offer.transfer is not None and landing.landed_bytes:
            self._mark(offer.transfer, Event.LANDED, landing.landed_bytes, time.monotonic_ns())

    # ---- time and the end -------------------------------------------------------------------

    def turn(self) -> list[Chunk]:
        """After each turn of the control loop: of which chunks slices have landed, or never will."""
        changed: list[Chunk] = []
        with self._faults.contain("the turn of the receiver"):
            self.receiver.pump(self._clock())
            writable = self.receiver.writable
            for scheme, thread in self._threads.items():
                thread.expect(scheme in writable)
            changed, self.receiver.changed = self.receiver.changed, changed
            over, self.receiver.over = self.receiver.over, []
            for landing in over:
                self._landing_over(landing)
        return changed

    def tick(self) -> None:
        """A few times a second."""
        now = self._clock()
        with self._faults.contain("the tick of connections"):
            self.connections.tick()
        with self._faults.contain("the tick of peers that are written to"):
            self.tiers.tick(now)
        with self._faults.contain("the tick of the receiver"):
            self.receiver.tick(now)
        with self._faults.contain("the tick of fetches"):
            late = self.fetches.tick(now, self._room_since)
            if late:
                self._counters["fetches_late"] += late
        if now >= self._warm_up_at:
            self._warm_up_at = now + WARM_UP_S
            with self._faults.contain("dialling peers"):
                self._warm_up()

    def _room_since(self, name: str, number: int) -> float:
        """See `Fetches.tick`."""
        peer = self.connections.of(name)
        landings = self.receiver.of(peer) if peer is not None else []
        landing = next((each for each in landings if each.offer.want == number), None)
        return 0.0 if landing is None else landing.opened_at or self._clock()

    def _is_warm(self) -> bool:
        return len([name for name in self.connections.names if name != self._name]) <= MAX_WARM

    def _warm_up(self) -> None:
        """Dial the peers there are before the first request needs them, unless they are many."""
        self.tiers.forget_strangers()
        self.fetches.forget(self.connections.names)
        for name in self.receiver.landed_bytes.keys() - set(self.connections.names):
            if self.connections.of(name) is None:
                del self.receiver.landed_bytes[name]
        if not self._is_warm():
            return
        for name in self.connections.names:
            if name == self._name:
                continue
            try:
                self.connections.dial(name, is_wanted=False)
                self.tiers.start(name)
            except (PeerError, ConfigError) as error:
                log.debug("%s is not dialled: %s", name, error)

    def statuses(self) -> list[PeerStatus]:
        """One per peer that this node has to do with."""
        return [self._status(name) for name in sorted(self.tiers.names.union(self.connections.known))]

    def _status(self, name: str) -> PeerStatus:
        tier, peer = self.tiers.look(name), self.connections.of(name)
        return PeerStatus(
            name=name,
            address=self.connections.address_of(name),
            state=peer.state if peer is not None else ConnectionState.CLOSED,
            channel=tier.scheme,
            rates=tier.rates,
            pushes=len(self._copies.of(tier)),
            landing=self.receiver.of_peer(name),
            sent_bytes=tier.sent_bytes,
            landed_bytes=self.receiver.landed_bytes[name],
            why=tier.why or (peer.why if peer is not None else ""),
        )

    def close(self) -> None:
        """End what is written, say bye to all peers, close the regions. Idempotent; also before `open`."""
        if self._is_open:
            self._is_open = False
            self.tiers.close()
            self.connections.close()
            for thread in self._threads.values():
                thread.close()
            self.regions.close()


def _settles_nothing(peer: str, ask: Settle) -> Found:
    raise NodeError(f"this node stores nothing in {ask.tier!r:.80} for others")
