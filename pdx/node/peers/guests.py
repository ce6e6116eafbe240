"""The peers that write to this node: what they are let into, what they offer, and what lands."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pdx.config import NodeConfig
from pdx.errors import ConfigError, PeerError, ProtocolError
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.node.peers.announcer import are_digests_due
from pdx.node.peers.handshake import SessionState, SessionStep
from pdx.node.peers.incoming import Incoming, Landing
from pdx.node.peers.lander import Lander, Verdict
from pdx.node.peers.links import PeerSession
from pdx.node.peers.mailbox import Mailbox
from pdx.node.peers.regions import Regions
from pdx.node.peers.ways import Ways
from pdx.store.chunk import Chunk
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.transfers import Transfers
from pdx.telemetry.faults import printable
from pdx.telemetry.timeline import Event
from pdx.wire.peer_messages import Coming, Offer, Stop, Want

log = logging.getLogger("pdx.node")

MAX_WANTS = 1000  # pushes under way that one peer asked for; each holds its chunks until it is over


class Guests:
    """All peers that dialled this node. Owned by the control loop."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        name: str,
        arena: Arena,
        probe: Slot,
        store: Store,
        transfers: Transfers,
        regions: Regions,
        ways: Ways,
        mailbox: Mailbox,
        counters: Counter[str],
        layouts: Callable[[], Sequence[bytes]],
        mark: Callable[[str, Event, int, int], None],
        on_push_over: Callable[[Landing], None],
        on_changed: Callable[[Sequence[Chunk]], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._name = name
        self._arena = arena
        self._probe = probe
        self._store = store
        self._regions = regions
        self._ways = ways
        self._mailbox = mailbox
        self._counters = counters
        self._layouts = layouts
        self._mark = mark
        self._on_push_over = on_push_over
        self._on_changed = on_changed
        self._clock = clock
        self._landers: dict[str, Lander] = {}
        self._schemes: dict[int, str] = {}  # of the sessions that have chosen
        self.landed_bytes: Counter[str] = Counter()  # by peer
        self.incoming = Incoming(
            store,
            transfers,
            listeners=regions.listeners,
            checks_writes=lambda scheme: regions.regions[scheme].checks_writes,
            arena_bytes=store.total_bytes,
            peer_share=config.peer_share,
            push_s=config.push_s,
            counters=counters,
            on_changed=self._on_changed,
            on_sealed=self._landing_sealed,
            on_over=self._landing_over,
        )

    # ---- sessions ---------------------------------------------------------------------------

    def hello(self, session: PeerSession, schemes: Sequence[str]) -> None:
        """A peer was let in: open its regions, as soon as the arena is registered."""
        now = self._clock()
        for landing in self.incoming.all():
            old = landing.session
            if not isinstance(old, PeerSession) or old.name != session.name:
                continue
            if old.is_dead_if(session.epoch, session.host):
                self.incoming.session_over(old, now, is_dead=True)
        self._regions.when_open(lambda: self._welcome(session, schemes))

    def _welcome(self, session: PeerSession, schemes: Sequence[str]) -> None:
        self.start_landers()
        if session.state is SessionState.OVER:
            return
        regions = []
        for scheme in schemes:
            listener = self._regions.listeners.get(scheme)
            if listener is not None:
                regions.append(listener.invite(session.token))
                listener.grant(session.token, self._probe.offset, self._probe.nbytes)
        if not regions:
            reasons = "; ".join(f"{scheme}: {self._regions.why.get(scheme, 'closed')}" for scheme in schemes)
            session.turn_down(f"no channel works at {self._name}: {reasons}; see `pdx doctor` there")
            return
        session.welcome(regions, self._probe)

    def chose(self, session: PeerSession, chosen: str) -> None:
        """The peer will write by this scheme alone: the others are closed to it.

        :raises ProtocolError: it was not invited to that, or has chosen before.
        """
        if chosen not in self._regions.listeners or session.number in self._schemes:
            raise ProtocolError(f"{session.name} chooses {chosen!r}")
        self._schemes[session.number] = chosen
        for scheme, listener in self._regions.listeners.items():
            if scheme == chosen:
                listener.revoke(session.token, self._probe.offset, self._probe.nbytes)
            else:
                listener.expel(session.token)

    def over(self, session: PeerSession, step: SessionStep) -> None:
        """The session is over; a peer that was only silent may still write until its channel is closed to it."""
        for listener in self._regions.listeners.values():
            listener.expel(session.token)
        self._schemes.pop(session.number, None)
        self._counters["peers_silent"] += step is SessionStep.SILENT
        # A bye is not believed where writes are not checked: its channel says, too, when the last of them has ended.
        self.incoming.session_over(session, self._clock(), is_dead=step is SessionStep.RESTARTED)

    # ---- what they say ----------------------------------------------------------------------

    def offered(self, session: PeerSession, offer: Offer) -> None:
        """Chunks that it has or is filling.

        :raises ProtocolError: the offer makes no sense, or comes before a channel was chosen.
        """
        scheme = self._schemes.get(session.number)
        if scheme is None:
            raise ProtocolError(f"{session.name} offers before it has chosen a channel")
        layouts = {layout for layout in self._layouts() if layout}
        if offer.layout and layouts and offer.layout not in layouts:
            self._counters["layout_mismatches"] += 1
            if self._counters["layout_mismatches"] == 1:
                log.warning(
                    "%s offers chunks of another KV layout than any engine here has "
                    "(further ones are counted as layout_mismatches)",
                    session.name,
                )
            session.send(Stop(offer.push, f"no engine at {self._name} has the KV layout of these chunks"))
            return
        self.incoming.offered(session, scheme, offer, self._clock())

    def wanted(self, session: PeerSession, want: Want) -> None:
        """It asks for chunks: what is here is pushed to it; of a transfer also what is still being filled."""
        is_pushed = want.transfer is not None and self._ways.is_pushing(want.transfer, session.name)
        hits = 0 if is_pushed else self._leading(session.name, want)
        session.send(Coming(want.want, hits, is_pushed))
        if not hits:
            return
        try:
            self._ways.push(
                session.name,
                want.keys[:hits],
                want.shards,
                transfer=want.transfer,
                layout=b"",
                want=want.want,
            )
        except (PeerError, ConfigError) as error:
            log.warning("%s wants chunks and cannot be dialled: %s", session.name, error)
            session.send(Coming(want.want, 0))
            return
        self._counters["wants_served"] += 1

    def _leading(self, name: str, want: Want) -> int:
        """How many of the keys are pushed to a peer: those that are here, as far as it may have them held."""
        count, held = self._ways.copies.wants(name)
        share = self._store.total_bytes * self._config.peer_share
        for index, key in enumerate(want.keys):
            chunks = self._store.known(key, want.shards)
            if chunks is None or (want.transfer is None and any(chunk.state is not State.SEALED for chunk in chunks)):
                return index
            nbytes = sum(chunk.slot.nbytes for chunk in chunks)
            if count >= MAX_WANTS or (held and held + nbytes > share):
                self._counters["wants_limited"] += 1
                if self._counters["wants_limited"] == 1:
                    text = "further ones are counted as wants_limited"
                    log.warning("%s wants more than %d pushes with %d bytes (%s)", name, count, held, text)
                return index
            held += nbytes
        return len(want.keys)

    # ---- what lands -------------------------------------------------------------------------

    def start_landers(self) -> None:
        """One thread per listener, as soon as there are listeners. Idempotent."""
        for scheme, listener in self._regions.listeners.items():
            if scheme not in self._landers:
                region = self._regions.regions[scheme]
                self._landers[scheme] = Lander(
                    scheme,
                    listener=listener,
                    memory=self._arena,
                    rooms=self.incoming.rooms,
                    wake=self._regions.wakes[scheme],
                    is_polled=region.is_polled,
                    needs_digests=are_digests_due(self._config.digests, region),
                    mailbox=self._mailbox,
                    on_landed=self._landed,
                    on_malformed=self._malformed,
                )

    def _landed(self, scheme: str, verdict: Verdict) -> None:
        self.incoming.landed(scheme, verdict, self._clock())

    def _malformed(self, scheme: str, token: bytes, text: str) -> None:
        self._counters["dropped_notifications"] += 1
        if self._counters["dropped_notifications"] == 1:
            log.warning(
                "dropped a notification by %s: %s (further ones are counted as dropped_notifications)",
                scheme,
                printable(text),
            )

    def _landing_sealed(self, landing: Landing, chunks: list[Chunk]) -> None:
        self.landed_bytes[landing.session.name] += sum(chunk.slot.nbytes for chunk in chunks)

    def _landing_over(self, landing: Landing) -> None:
        self._on_push_over(landing)
        if landing.offer.transfer is not None and landing.landed_bytes:
            self._mark(landing.offer.transfer, Event.LANDED, landing.landed_bytes, time.monotonic_ns())

    # ---- time and the end -------------------------------------------------------------------

    def turn(self) -> None:
        """After each turn of the control loop."""
        self.incoming.pump(self._clock())
        writable = self.incoming.writable
        for scheme, lander in self._landers.items():
            lander.expect(scheme in writable)

    def close(self) -> None:
        """End the threads. Idempotent."""
        for lander in self._landers.values():
            lander.close()
        self._landers.clear()
