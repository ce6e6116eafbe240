"""A node among its peers: what the links, the channels and the pushes have to do with each other.

Policy is in `outgoing`, `incoming` and `fetches`, bytes move on the threads of `sender` and `lander`, messages come
through `links`. This is what ties them to each other, on the control loop's thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import zmq

from pdx.config import NodeConfig
from pdx.errors import ChannelBroken, ChannelError, ConfigError, PdxError, PeerError, ProtocolError
from pdx.handshake import Identity, LinkState, LinkStep, SessionState, SessionStep
from pdx.host import host_id
from pdx.memory import Arena
from pdx.messages import Lookup, PeerEntry, PeerStatus, Slot
from pdx.node.fetches import Fetches
from pdx.node.incoming import Incoming, Landing
from pdx.node.lander import Lander, Verdict
from pdx.node.links import Link, Links, PeerSession
from pdx.node.mailbox import Mailbox
from pdx.node.outgoing import Outgoing, Push
from pdx.node.regions import Regions
from pdx.node.sender import Job, Route, Sender
from pdx.node.transfers import Transfers
from pdx.peer_messages import (
    Chosen,
    Coming,
    Granted,
    LetGo,
    Offer,
    PeerBody,
    PeerWelcome,
    Stop,
    Want,
)
from pdx.store.chunk import Chunk
from pdx.store.store import Store
from pdx.timeline import Event

log = logging.getLogger("pdx.node")

PUMP_S = 0.005
FLOW_S = 60.0
JOIN_S = 5.0


class Way:
    """The way to one peer: the link by which this node writes there, and the thread that does."""

    def __init__(self, name: str, links: Links) -> None:
        self.name = name
        self._links = links
        self.sender: Sender | None = None
        self.scheme = ""  # chosen
        self.rates: dict[str, float] = {}
        self.why = ""

    @property
    def is_usable(self) -> bool:
        """See `pdx.node.outgoing.Way`."""
        link = self._links.link(self.name)
        return bool(self.scheme) and link is not None and link.state is LinkState.READY

    def send(self, body: Offer | LetGo) -> None:
        """See `pdx.node.outgoing.Way`."""
        link = self._links.link(self.name)
        if link is not None:
            link.send(body)

    def submit(self, job: Job) -> None:
        """See `pdx.node.outgoing.Way`."""
        assert self.sender is not None
        self.sender.submit(job)

    def abort(self, push: int) -> None:
        """See `pdx.node.outgoing.Way`."""
        if self.sender is not None:
            self.sender.abort(push)


class Flow(msgspec.Struct):
    """What a peer has acknowledged of a transfer, kept a while beyond its push."""

    acked: int
    across: int  # already told as ACROSS
    deadline: float


class Peers:
    """All that a node has to do with other nodes. Owned by the control loop; implements `links.LinkHandler`."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        name: str,
        epoch: int,
        arena: Arena,
        probe: Slot,
        store: Store,
        transfers: Transfers,
        counters: Counter[str],
        layouts: Callable[[], Sequence[bytes]],
        mark: Callable[[str, Event, int, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._name = name
        self._epoch = epoch
        self._arena = arena
        self._probe = probe
        self._store = store
        self._counters = counters
        self._layouts = layouts
        self._mark = mark
        self._clock = clock
        self.mailbox = Mailbox()
        self._regions: Regions | None = None
        self._links: Links | None = None
        self._ways: dict[str, Way] = {}
        self._landers: dict[str, Lander] = {}
        self._schemes: dict[int, str] = {}  # of the sessions that have chosen
        self._chosen: dict[str, str] = {}  # by peer, also of earlier links: a probe is made once
        self._flows: dict[str, Flow] = {}
        self._landed: Counter[str] = Counter()  # bytes by peer
        self._sent: Counter[str] = Counter()
        self._left: list[Sender] = []  # senders that were told to end
        self._next_pump = 0.0
        self.outgoing = Outgoing(
            store,
            group_bytes=config.group_bytes,
            window_bytes=config.window_bytes,
            counters=counters,
            on_over=self._push_over,
        )
        self.fetches = Fetches(self._dial, config.fetch_s)
        self.incoming: Incoming | None = None
        self._transfers = transfers

    def open(
        self, context: zmq.Context[zmq.Socket[bytes]], listen: str, host: str,
        watch: Callable[[zmq.Socket[bytes]], None], unwatch: Callable[[zmq.Socket[bytes]], None],
    ) -> None:  # fmt: skip
        """Listen for peers at this address; data channels listen at `host`.

        :raises ConfigError: the address, the keys or the roster cannot be used.
        """
        config = self._config
        self._regions = Regions(self._arena, config.channels, host, self.mailbox)
        self.incoming = Incoming(
            self._store,
            self._transfers,
            listeners=self._regions.listeners,
            checks_writes=lambda scheme: self.regions.regions[scheme].checks_writes,
            arena_bytes=config.arena_bytes,
            peer_share=config.peer_share,
            push_s=config.push_s,
            counters=self._counters,
            on_sealed=self._landing_sealed,
            on_over=self._landing_over,
        )
        self._links = Links(
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
        )
        if config.channels or config.roster or config.listen:  # peers are meant to come: be ready before they do
            self._regions.when_open(self._start_landers)

    @property
    def regions(self) -> Regions:
        """The registered arena."""
        assert self._regions is not None
        return self._regions

    @property
    def links(self) -> Links:
        """The links."""
        assert self._links is not None
        return self._links

    @property
    def landings(self) -> Incoming:
        """The pushes to this node."""
        assert self.incoming is not None
        return self.incoming

    # ---- what attached processes and the proxy want -----------------------------------------

    def push(self, name: str, keys: Sequence[bytes], shards: int, transfer: str | None, layout: bytes) -> int:
        """Push what is here of these keys, or being filled; how many chunks that are. Idempotent by transfer.

        :raises PeerUnknown: no roster names that peer.
        """
        if name in ("", self._name):
            return 0
        way = self._way(name)
        if transfer is not None and self.outgoing.of_transfer(transfer, name) is not None:
            return 0
        self._dial(name)
        return self._start(way, keys, shards, transfer, layout)

    def _start(
        self, way: Way, keys: Sequence[bytes], shards: int, transfer: str | None, layout: bytes, want: int = 0
    ) -> int:
        if transfer is not None:
            self._flows.setdefault(transfer, Flow(0, 0, 0.0)).deadline = self._clock() + FLOW_S + self._config.push_s
        return self.outgoing.start(
            way,
            keys,
            shards,
            transfer=transfer,
            layout=layout,
            wait_s=self._config.grant_s,
            now=self._clock(),
            push_s=self._config.push_s,
            want=want,
        )

    def may_come(self, ask: Lookup, hits: int) -> bool:
        """Whether what is missing here may still come from the peer that a lookup names.

        :raises PeerUnknown: no roster names that peer.
        """
        if ask.source in ("", self._name):
            return False
        return self.fetches.is_waiting(ask, hits, self._clock())

    def changed(self, chunks: Sequence[Chunk]) -> None:
        """Slices of these chunks were filled, or their writers gave up."""
        self.outgoing.changed(chunks)

    def cancel(self, transfer: str) -> None:
        """The transfer was given up here."""
        self.outgoing.cancel(transfer)
        if self.incoming is not None:
            self.incoming.cancel(transfer, self._clock())

    def prefill_ended(self, transfer: str, at_ns: int) -> None:
        """A worker's prefill is over: note what the peer had of it by now."""
        flow = self._flows.get(transfer)
        if flow is None:
            return
        acked = self.outgoing.acked_bytes(transfer)
        so_far = flow.acked + sum((acked or {}).values())
        self._mark(transfer, Event.ACROSS, so_far - flow.across, at_ns)
        flow.across = so_far

    def told(self, entries: list[PeerEntry]) -> None:
        """The proxy's list of nodes."""
        self.links.told([entry for entry in entries if entry.name != self._name])

    # ---- the way there ----------------------------------------------------------------------

    def _way(self, name: str) -> Way:
        way = self._ways.get(name)
        if way is None:
            way = self._ways[name] = Way(name, self.links)
        return way

    def _dial(self, name: str) -> Link:
        """The link to a peer, dialling it if need be; the regions are opened first where they are not."""
        link = self.links.dial(name)
        if not self.regions.is_open:
            self.regions.when_open(self._start_landers)
        return link

    def identity(self) -> Identity:
        """See `links.LinkHandler`."""
        return Identity(
            name=self._name,
            epoch=self._epoch,
            host=host_id(),
            pid=os.getpid(),
            schemes=self.regions.schemes if self.regions.is_open else self.regions.candidates,
            layouts=[layout for layout in self._layouts() if layout],
        )

    def link_ready(self, link: Link, welcome: PeerWelcome, schemes: list[str]) -> None:
        """See `links.LinkHandler`."""
        self.fetches.link_ready(link)
        self.regions.when_open(lambda: self._begin(link, welcome, schemes))

    def _begin(self, link: Link, welcome: PeerWelcome, schemes: list[str]) -> None:
        if link.state is not LinkState.READY:
            return
        way = self._way(link.name)
        self._drop_sender(way)
        order = [scheme for scheme in schemes if scheme in self.regions.regions]
        cached = self._chosen.get(link.name)
        if cached in order:
            order = [cached, *(scheme for scheme in order if scheme != cached)]
        route = Route(
            remotes={region.scheme: region for region in welcome.regions},
            order=order,
            measure=not self._config.channels and cached not in order,
            probe=welcome.probe,
            probe_from=self._probe.offset,
        )
        sender = Sender(
            link.name,
            memory=self._arena.data,
            regions=self.regions.regions,
            wakes=self.regions.wakes,
            route=route,
            always_digest=self._config.digests == "always",
            never_digest=self._config.digests == "never",
            mailbox=self.mailbox,
            on_chosen=lambda scheme, rates: self._channel_chosen(way, sender, scheme, rates),
            on_done=lambda job, error: self._written(way, sender, job, error),
            on_broken=lambda why: self._channel_broken(way, sender, why),
            on_ended=lambda: self._sender_ended(way, sender),
        )
        way.sender = sender

    def _channel_chosen(self, way: Way, sender: Sender, scheme: str, rates: dict[str, float]) -> None:
        link = self.links.link(way.name)
        if way.sender is not sender or link is None or link.state is not LinkState.READY:
            return
        way.scheme, way.why = scheme, ""
        way.rates = rates or way.rates
        self._chosen[way.name] = scheme
        link.send(Chosen(scheme))
        log.info("writing to %s by %s %s", way.name, scheme, {name: round(rate, 2) for name, rate in rates.items()})
        self.outgoing.usable(way.name)

    def _written(self, way: Way, sender: Sender, job: Job, error: ChannelError | None) -> None:
        if error is None:
            self._sent[way.name] += job.nbytes
        self.outgoing.written(way.name, job, error)
        if isinstance(error, ChannelBroken) and way.sender is sender:
            self._channel_broken(way, sender, str(error))

    def _channel_broken(self, way: Way, sender: Sender, why: str) -> None:
        if way.sender is not sender:
            return
        self._counters["channels_broken"] += 1
        self._chosen.pop(way.name, None)
        self._gone(way, why)

    def _sender_ended(self, way: Way, sender: Sender) -> None:
        """Its thread writes nothing more: only now the peer may be told so, and a new channel be had."""
        self._left = [each for each in self._left if each is not sender]
        link = self.links.link(way.name)
        if way.sender is not None or link is None or link.state is not LinkState.READY:
            return
        link.leave()
        if self.outgoing.to(way.name):
            self._redial(way)

    def _redial(self, way: Way) -> None:
        try:
            self.links.dial(way.name)
        except (PeerError, ConfigError) as error:
            self._gone(way, str(error))

    def _gone(self, way: Way, why: str) -> None:
        """Nothing more can be written to this peer by its present channel."""
        log.warning("the way to %s is gone: %s", way.name, why)
        way.scheme, way.why = "", why
        self._drop_sender(way)
        self.outgoing.lost(way.name)
        self.fetches.lost(way.name, self._clock())

    def _drop_sender(self, way: Way) -> None:
        if way.sender is not None:
            way.sender.close()
            self._left.append(way.sender)
            way.sender = None

    def link_lost(self, link: Link, step: LinkStep, why: str) -> None:
        """See `links.LinkHandler`."""
        self._counters["links_lost"] += 1
        self._gone(self._way(link.name), why)

    def link_message(self, link: Link, body: PeerBody) -> None:
        """See `links.LinkHandler`."""
        match body:
            case Granted():
                self.outgoing.granted(link.name, body)
            case Stop():
                self.outgoing.stopped(link.name, body.push, body.text)
            case Coming():
                self.fetches.coming(link, body, self._clock())
            case _:
                raise ProtocolError(f"{type(body).__name__} is not for the side that dialled")

    # ---- peers that come --------------------------------------------------------------------

    def peer_hello(self, session: PeerSession, schemes: list[str]) -> None:
        """See `links.LinkHandler`."""
        now = self._clock()
        for landing in self.landings.all():
            old = landing.session
            if old.name == session.name and isinstance(old, PeerSession) and old.epoch != session.epoch:
                self.landings.session_over(old, now, is_dead=True)  # its process is gone, or it would have the name
        self.regions.when_open(lambda: self._welcome(session, schemes))

    def _welcome(self, session: PeerSession, schemes: list[str]) -> None:
        self._start_landers()
        if session.state is SessionState.OVER:
            return
        regions = []
        for scheme in schemes:
            listener = self.regions.listeners.get(scheme)
            if listener is not None:
                regions.append(listener.invite(session.token))
                listener.grant(session.token, self._probe.offset, self._probe.nbytes)
        if not regions:
            session.turn_down(f"none of {', '.join(schemes)} works at {self._name}; see `pdx doctor` there")
            return
        session.welcome(regions, self._probe)

    def session_message(self, session: PeerSession, body: PeerBody) -> None:
        """See `links.LinkHandler`."""
        match body:
            case Chosen():
                self._peer_chose(session, body.scheme)
            case Offer():
                self._offered(session, body)
            case LetGo():
                self.landings.let_go(session, body, self._clock())
            case Want():
                self._wanted(session, body)
            case _:
                raise ProtocolError(f"{type(body).__name__} is not for the side that was dialled")

    def _peer_chose(self, session: PeerSession, chosen: str) -> None:
        if chosen not in self.regions.listeners or session.number in self._schemes:
            raise ProtocolError(f"{session.name} chooses {chosen!r}")
        self._schemes[session.number] = chosen
        for scheme, listener in self.regions.listeners.items():
            if scheme == chosen:
                listener.revoke(session.token, self._probe.offset, self._probe.nbytes)
            else:
                listener.expel(session.token)

    def _offered(self, session: PeerSession, offer: Offer) -> None:
        scheme = self._schemes.get(session.number)
        if scheme is None:
            raise ProtocolError(f"{session.name} offers before it has chosen a channel")
        layouts = {layout for layout in self._layouts() if layout}
        if offer.layout and layouts and offer.layout not in layouts:
            self._counters["layout_mismatches"] += 1
            text = f"no engine at {self._name} has the KV layout of these chunks"
            log.warning("%s offers chunks of another KV layout than any engine here has", session.name)
            session.send(Stop(offer.push, text))
            return
        self.landings.offered(session, scheme, offer, self._clock())

    def _wanted(self, session: PeerSession, want: Want) -> None:
        is_pushed = want.transfer is not None and self.outgoing.of_transfer(want.transfer, session.name) is not None
        hits = 0 if is_pushed else len(self._store.find(want.keys, want.shards))
        if hits:
            try:
                self._dial(session.name)
            except (PeerError, ConfigError) as error:
                log.warning("%s wants chunks and cannot be dialled: %s", session.name, error)
                hits = 0
        session.send(Coming(want.want, hits, is_pushed))
        if hits:
            self._counters["wants_served"] += 1
            way = self._way(session.name)
            self._start(way, want.keys[:hits], want.shards, want.transfer, b"", want.want)

    def session_over(self, session: PeerSession, step: SessionStep) -> None:
        """See `links.LinkHandler`."""
        for listener in self.regions.listeners.values():
            listener.expel(session.token)
        self._schemes.pop(session.number, None)
        is_dead = step in (SessionStep.BYE, SessionStep.RESTARTED)
        if not is_dead:
            self._counters["peers_silent"] += 1
        self.landings.session_over(session, self._clock(), is_dead=is_dead)

    def _start_landers(self) -> None:
        for scheme, listener in self.regions.listeners.items():
            if scheme in self._landers:
                continue
            region = self.regions.regions[scheme]
            self._landers[scheme] = Lander(
                scheme,
                listener=listener,
                memory=self._arena.data,
                rooms=self.landings.rooms,
                wake=self.regions.wakes[scheme],
                is_polled=region.is_polled,
                needs_digests=self._config.digests == "always"
                or (self._config.digests == "wire" and region.crosses_wire),
                mailbox=self.mailbox,
                on_landed=self._slices_landed,
                on_malformed=self._notification_malformed,
            )

    def _slices_landed(self, scheme: str, verdict: Verdict) -> None:
        self.landings.landed(scheme, verdict, self._clock())

    def _notification_malformed(self, scheme: str, token: bytes, text: str) -> None:
        self._counters["dropped_notifications"] += 1
        log.warning("dropped a notification by %s: %s", scheme, text)

    # ---- the ends of pushes -----------------------------------------------------------------

    def _push_over(self, push: Push, is_complete: bool) -> None:
        way = self._ways.get(push.way.name)
        if way is not None and way.sender is not None:
            way.sender.forget(push.number)
        if push.transfer is None:
            return
        flow = self._flows.get(push.transfer)
        if flow is not None:
            flow.acked += push.acked_bytes
        if is_complete:
            self._mark(push.transfer, Event.PUSHED, push.acked_bytes, time.monotonic_ns())

    def _landing_sealed(self, landing: Landing, chunks: list[Chunk]) -> None:
        self._landed[landing.session.name] += sum(chunk.slot.nbytes for chunk in chunks)

    def _landing_over(self, landing: Landing) -> None:
        offer, name, now = landing.offer, landing.session.name, self._clock()
        self.fetches.over(name, offer.want, offer.transfer, now)
        if offer.transfer is not None and landing.landed_bytes:
            self._mark(offer.transfer, Event.LANDED, landing.landed_bytes, time.monotonic_ns())

    # ---- time -------------------------------------------------------------------------------

    def turn(self) -> None:
        """After each turn of the control loop."""
        if self.incoming is None:
            return
        now = self._clock()
        if now >= self._next_pump:
            self._next_pump = now + PUMP_S
            self.incoming.pump(now)
        writable = self.incoming.writable
        for scheme, lander in self._landers.items():
            lander.expect(scheme in writable)

    def tick(self) -> None:
        """A few times a second."""
        now = self._clock()
        self.links.tick()
        self.outgoing.tick(now)
        self.landings.tick(now)
        late = self.fetches.tick(now)
        if late:
            self._counters["fetches_late"] += late
        for transfer in [name for name, flow in self._flows.items() if flow.deadline <= now]:
            del self._flows[transfer]

    def statuses(self) -> list[PeerStatus]:
        """One per peer that this node has to do with."""
        names = {link.name for link in self.links.links} | {session.name for session in self.links.sessions}
        return [self._status(name) for name in sorted(names | set(self._ways))]

    def _status(self, name: str) -> PeerStatus:
        way, link = self._way(name), self.links.link(name)
        landing = sum(each.session.name == name for each in self.landings.all())
        return PeerStatus(
            name=name,
            address=link.address if link is not None else "",
            state=link.state if link is not None else LinkState.CLOSED,
            channel=way.scheme,
            rates=way.rates,
            pushes=len(self.outgoing.to(name)),
            landing=landing,
            sent_bytes=self._sent[name],
            landed_bytes=self._landed[name],
            why=way.why or (link.why if link is not None else ""),
        )

    def close(self) -> None:
        """Say bye to all peers, end the threads, close the regions. Idempotent."""
        for way in self._ways.values():
            self._drop_sender(way)
        for sender in self._left:
            sender.join(JOIN_S)
        if self._links is not None:
            self._links.close()
        for lander in self._landers.values():
            lander.close()
        if self._regions is not None:
            try:
                self._regions.close()
            except PdxError as error:
                log.warning("closing channels: %s", error)
        self.mailbox.close()
