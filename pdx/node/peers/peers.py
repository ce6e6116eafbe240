"""A node among its peers: who hears what. The policy is elsewhere.

`ways` are the peers that this node writes to, `guests` those that write to it, `fetches` what it asked them for;
messages come through `links`. All of it lives on the control loop's thread.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from pdx.config import NodeConfig
from pdx.errors import ConfigError, PeerError, ProtocolError
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.node.peers.fetches import Fetches
from pdx.node.peers.guests import Guests
from pdx.node.peers.handshake import Identity, LinkState, LinkStep, SessionStep
from pdx.node.peers.incoming import Landing
from pdx.node.peers.links import Link, Links, PeerSession
from pdx.node.peers.mailbox import Mailbox
from pdx.node.peers.regions import Regions
from pdx.node.peers.ways import Ways
from pdx.store.chunk import Chunk
from pdx.store.copies import Copies
from pdx.store.store import Store
from pdx.store.tier import Grant
from pdx.store.transfers import Transfers
from pdx.telemetry.faults import Faults
from pdx.telemetry.host import host_id
from pdx.telemetry.timeline import Event
from pdx.wire.messages import Admit, PeerEntry, PeerStatus
from pdx.wire.peer_messages import Chosen, Coming, Granted, LetGo, Offer, PeerBody, PeerWelcome, Stop, Want

log = logging.getLogger("pdx.node")

MAX_WARM = 8  # with more peers than that, each is dialled when it is needed
WARM_UP_S = 5.0


class Peers:
    """All that a node has to do with other nodes; implements `links.LinkHandler`. Nothing works before `open`."""

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
        layouts: Callable[[], Sequence[bytes]],
        mark: Callable[[str, Event, int, int], None],
        on_changed: Callable[[Sequence[Chunk]], None],
        clock: Callable[[], float],
    ) -> None:
        """`layouts` gives the KV layouts of the engines attached now; `mark` notes (transfer, event, bytes, time);
        `on_changed`: something of these chunks has landed, or never will.
        """
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
        self._layouts = layouts
        self._mark = mark
        self._on_changed = on_changed
        self._clock = clock
        self._is_open = False
        self._warm_up_at = 0.0
        self.mailbox = Mailbox(faults)

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
            self.mailbox,
            counters=self._counters,
            trusts_network=config.trusted_network,
        )
        self.links = Links(
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
            faults=self._faults,
        )
        self.links.check_self(self._name)
        self.fetches = Fetches(self.links.dial, config.fetch_s)
        self.ways = self._new_ways()
        self.guests = self._new_guests()
        self._is_open = True
        if config.channels or config.roster or config.listen:  # peers are meant to come: be ready before they do
            self.regions.when_open(self.guests.start_landers)

    def _new_ways(self) -> Ways:
        return Ways(
            self._config,
            arena=self._arena,
            probe=self._probe,
            copies=self._copies,
            regions=self.regions,
            links=self.links,
            mailbox=self.mailbox,
            counters=self._counters,
            mark=self._mark,
            on_gone=lambda name: self.fetches.lost(name, self._clock()),
            clock=self._clock,
        )

    def _new_guests(self) -> Guests:
        return Guests(
            self._config,
            name=self._name,
            arena=self._arena,
            probe=self._probe,
            store=self._store,
            transfers=self._transfers,
            regions=self.regions,
            ways=self.ways,
            mailbox=self.mailbox,
            counters=self._counters,
            layouts=self._layouts,
            mark=self._mark,
            on_push_over=self._landing_over,
            on_changed=self._on_changed,
            clock=self._clock,
        )

    # ---- what attached processes and the proxy want -----------------------------------------

    def push(self, name: str, keys: Sequence[bytes], shards: int, transfer: str | None, layout: bytes) -> int:
        """See `Ways.push`; nothing is to be done where this node is meant."""
        if name == self._name:
            return 0
        return self.ways.push(name, keys, shards, transfer=transfer, layout=layout)

    def may_come(self, ask: Admit, hits: int) -> bool:
        """Whether what is missing here may still come from the peer that a question names.

        :raises PeerUnknown, ConfigError: that peer cannot be dialled.
        """
        if ask.source in ("", self._name):
            return False
        return self.fetches.is_waiting(ask, hits, self._clock())

    @property
    def ended_fetches(self) -> list[bytes]:
        """See `Fetches.ended`."""
        return self.fetches.ended if self._is_open else []

    def cancel(self, transfer: str) -> None:
        """The transfer was given up here."""
        self.guests.incoming.cancel(transfer, self._clock())

    def prefill_ended(self, transfer: str, at_ns: int) -> None:
        """A worker's prefill is over."""
        self.ways.prefill_ended(transfer, at_ns)

    def told(self, entries: Sequence[PeerEntry]) -> None:
        """The proxy's list of nodes."""
        self.links.told([entry for entry in entries if entry.name != self._name])

    # ---- what peers say: links.LinkHandler --------------------------------------------------

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

    def link_ready(self, link: Link, welcome: PeerWelcome, schemes: list[str]) -> None:
        """We dialled, and are welcome."""
        self.fetches.link_ready(link)
        self.regions.when_open(lambda: self.ways.ready(link, welcome, schemes))

    def link_lost(self, link: Link, step: LinkStep, why: str) -> None:
        """We dialled; that is over, or never came about."""
        self._counters["links_lost"] += 1
        self.ways.gone(link.name, why)

    def link_message(self, link: Link, body: PeerBody) -> None:
        """From a peer that we dialled."""
        match body:
            case Granted():
                self._copies.granted(link.name, body.push, Grant(body.granted, body.slots))
            case Stop():
                self._copies.stopped(link.name, body.push, body.text)
            case Coming():
                self.fetches.coming(link, body, self._clock())
            case _:
                raise ProtocolError(f"{type(body).__name__} is not for the side that dialled")

    def peer_hello(self, session: PeerSession, schemes: list[str]) -> None:
        """A peer dialled, and was let in."""
        self.guests.hello(session, schemes)

    def session_message(self, session: PeerSession, body: PeerBody) -> None:
        """From a peer that dialled us."""
        match body:
            case Chosen():
                self.guests.chose(session, body.scheme)
            case Offer():
                self.guests.offered(session, body)
            case LetGo():
                self.guests.incoming.let_go(session, body, self._clock())
            case Want():
                self.guests.wanted(session, body)
            case _:
                raise ProtocolError(f"{type(body).__name__} is not for the side that was dialled")

    def session_over(self, session: PeerSession, step: SessionStep) -> None:
        """A peer that dialled us is gone."""
        self.guests.over(session, step)

    def _landing_over(self, landing: Landing) -> None:
        self.fetches.over(landing.session.name, landing.offer.want, landing.offer.transfer, self._clock())

    # ---- time and the end -------------------------------------------------------------------

    def turn(self) -> None:
        """After each turn of the control loop."""
        with self._faults.contain("the turn of incoming pushes"):
            self.guests.turn()

    def tick(self) -> None:
        """A few times a second."""
        now = self._clock()
        with self._faults.contain("the tick of links"):
            self.links.tick()
        with self._faults.contain("the tick of peers that are written to"):
            self.ways.tick(now)
        with self._faults.contain("the tick of incoming pushes"):
            self.guests.incoming.tick(now)
        with self._faults.contain("the tick of fetches"):
            late = self.fetches.tick(now)
            if late:
                self._counters["fetches_late"] += late
        if now >= self._warm_up_at:
            self._warm_up_at = now + WARM_UP_S
            with self._faults.contain("dialling peers"):
                self._warm_up()

    def _warm_up(self) -> None:
        """Dial the peers there are before the first request needs them, unless they are many."""
        names = [name for name in self.links.names if name != self._name]
        if len(names) > MAX_WARM:
            return
        for name in names:
            link = self.links.link(name)
            if link is None or link.state is LinkState.CLOSED:
                try:
                    self.links.dial(name, is_wanted=False)
                except (PeerError, ConfigError) as error:
                    log.debug("%s is not dialled: %s", name, error)

    def statuses(self) -> list[PeerStatus]:
        """One per peer that this node has to do with."""
        names = {link.name for link in self.links.links} | {session.name for session in self.links.sessions}
        return [self._status(name) for name in sorted(names | self.ways.names)]

    def _status(self, name: str) -> PeerStatus:
        way, link = self.ways.look(name), self.links.link(name)
        return PeerStatus(
            name=name,
            address=link.address if link is not None else "",
            state=link.state if link is not None else LinkState.CLOSED,
            channel=way.scheme,
            rates=way.rates,
            pushes=len(self._copies.of(name)),
            landing=sum(landing.session.name == name for landing in self.guests.incoming.all()),
            sent_bytes=way.sent_bytes,
            landed_bytes=self.guests.landed_bytes[name],
            why=way.why or (link.why if link is not None else ""),
        )

    def close(self) -> None:
        """End what is written, say bye to all peers, close the regions. Idempotent; also before `open`."""
        if self._is_open:
            self._is_open = False
            self.ways.close()
            self.links.close()
            self.guests.close()
            self.regions.close()
        self.mailbox.close()
