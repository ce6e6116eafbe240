"""All links of a node: those it dialled (`Link`) and, through `Reception`, the peers that dialled it (`PeerSession`).

One ROUTER that peers dial, one DEALER per peer that is dialled; with keys, all of them CURVE. Who may come in and who
may be dialled is the roster's word; what is said once a link stands is the handler's business. One thread, the control
loop's, and nothing blocks; what was said last has FAREWELL_MS to leave while the context ends.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import zmq

from pdx.errors import ConfigError, NodeRunning, PeerRefused, PeerUnknown, ProtocolError
from pdx.node.peers.handshake import LinkState, LinkStep, check_welcome
from pdx.node.peers.link import Link, LinkHandler, PeerSession
from pdx.node.peers.lives import Lives
from pdx.node.peers.reception import Reception
from pdx.security.address import check_listen, needs_ipv6
from pdx.security.curve_keys import KeyPair, secure_client
from pdx.security.door import Door, limit
from pdx.security.roster import Roster
from pdx.telemetry.clock import WakingClock
from pdx.telemetry.faults import Faults
from pdx.wire.burst import burst
from pdx.wire.messages import PeerEntry, Refused
from pdx.wire.peer_messages import Coming, Granted, PeerBody, PeerBye, PeerPing, PeerWelcome, Stop

__all__ = ["Link", "LinkHandler", "Links", "PeerSession"]

log = logging.getLogger(__name__)

_RECONNECT_MS = 1000  # at most, between ZMQ's attempts to reach a peer that is dialled


class Links:
    """See the module. The sockets are open from construction to `close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        handler: LinkHandler,
        *,
        listen: str,
        keys: str,
        roster: str,
        timeout_s: float,
        ping_s: float,
        watch: Callable[[zmq.Socket[bytes] | int], None],
        unwatch: Callable[[zmq.Socket[bytes] | int], None],
        counters: Counter[str],
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`context`: of this node alone, because the gate is for all CURVE servers in it. `watch` and `unwatch` add
        and remove a socket, or a descriptor, of the poller that decides when to call `serve`.

        :raises ConfigError: an address, the keys or the roster are wrong, or the address cannot be had.
        :raises NodeRunning: another node owns the address.
        """
        check_listen(listen, has_keys=bool(keys and roster))
        self._own = KeyPair.load(keys) if keys else None
        if self._own is None and listen.startswith("tcp://"):
            log.warning("%s has no keys: every user of this host may say hello, offer chunks and end sessions", listen)
        self._roster = Roster(roster, has_keys=self._own is not None)
        self._context, self._handler, self._counters = context, handler, counters
        self._faults = faults or Faults(counters)
        self._timeout_s, self._ping_s = timeout_s, ping_s
        self._watch, self._unwatch = watch, unwatch
        # A node that was stopped, or starved, heard nobody; that is not the others' silence.
        self._clock = WakingClock(timeout_s / 4, clock)
        self._now = self._clock()
        self._links: dict[str, Link] = {}
        self._by_socket: dict[zmq.Socket[bytes], Link] = {}
        self._lives = Lives()
        self._door = Door(
            context,
            listen,
            own=self._own,
            admits=lambda key: self._roster.name_of(key) is not None,
            timeout_s=timeout_s,
            taken=lambda _: NodeRunning(f"another node already listens at {listen}; give this one another --listen"),
            counters=counters,
        )
        self._reception = Reception(
            self._door,
            handler,
            roster=self._roster,
            has_keys=self._own is not None,
            lives=self._lives,
            on_life=self._begin_life,
            counters=counters,
            faults=self._faults,
        )
        for source in self._door_sources():
            watch(source)

    @property
    def address(self) -> str:
        """Where peers reach this node, as bound."""
        return self._door.address

    @property
    def public_key(self) -> str:
        """This node's, empty without CURVE."""
        return self._own.public if self._own is not None else ""

    def check_self(self, name: str) -> None:
        """Compare this node, of that name, with its own entry in the roster; what may be wrong is warned about.

        :raises ConfigError: no peer would let it in.
        """
        warning = self._roster.check_self(name, self.public_key, self.address)
        if warning:
            log.warning("%s", warning)

    @property
    def names(self) -> list[str]:
        """All nodes that the roster names, this one perhaps included."""
        return self._roster.names

    @property
    def links(self) -> list[Link]:
        """All peers ever dialled."""
        return list(self._links.values())

    @property
    def sessions(self) -> list[PeerSession]:
        """All peers that dialled and are not over."""
        return self._reception.sessions

    def link(self, name: str) -> Link | None:
        """The link to a peer, if it was ever dialled."""
        return self._links.get(name)

    def dial(self, name: str, *, is_wanted: bool = True) -> Link:
        """The link to that peer; if it is closed, it is dialled now, and `link_ready` or `link_lost` will follow.

        `is_wanted`: something waits for the link. The first that does has the whole timeout for it, however long it
        was dialled before for nobody; those after it share that time, or a dead peer would keep them all.

        :raises PeerUnknown: the roster does not name it, or it is this node itself.
        :raises ConfigError: it has a key and this node has none, or the other way round.
        """
        link = self._links.get(name)
        if link is not None and link.state is not LinkState.CLOSED:
            if link.state is LinkState.DIALING and is_wanted and not link.is_wanted:
                link.is_wanted = True
                link.heard_at = self._now
            return link
        own = self._handler.identity()
        if name == own.name:
            raise PeerUnknown(f"{name!r} is this node itself")
        entry = self._roster.entry(name)
        socket = self._connected(entry)
        if link is None:
            link = self._links[name] = Link(name, watch=self._watch, unwatch=self._forget_socket)
        self._by_socket[socket] = link
        link.is_wanted = is_wanted
        link.dial(socket, entry, own, self._now)
        return link

    def told(self, entries: list[PeerEntry]) -> None:
        """What the proxy says of the nodes there are; believed as far as `pdx.security.roster` says."""
        self._roster.believe(entries)

    def secure_proxy(self, socket: zmq.Socket[bytes], address: str = "") -> None:
        """Before a socket connects to the proxy at `address`: CURVE, if this node has keys.

        A Unix socket that the roster does not name as the proxy's is this user's alone, and needs none.

        :raises ConfigError: it has keys, and the roster does not say the proxy's.
        """
        proxy = self._roster.proxy
        if address.startswith("ipc://") and (proxy is None or proxy.address != address):
            return
        secure_client(socket, own=self._own, server_key=proxy.key if proxy is not None else "")

    # ---- the loop ---------------------------------------------------------------------------

    def serve(self, socket: object) -> bool:
        """Take what is waiting on a socket or a descriptor that can be read; False: it is none of ours."""
        if socket == self._door.fd:
            self._heed_door()
            return True
        if not isinstance(socket, zmq.Socket):
            return False
        if socket.closed or self._door.answer_gate(socket):
            return True  # closed: by what was handled in this very turn
        if socket in self._door.sockets:
            self._reception.serve(self._now)
            return True
        link = self._by_socket.get(socket)
        if link is None:
            return False
        self._serve_link(link)
        return True

    def tick(self) -> None:
        """A few times a second: signs of life, silences, and whether the roster changed."""
        self._now = self._clock()
        with self._faults.contain("the look at the roster"):
            if self._roster.refresh():
                self._obey_roster()
        for link in self.links:
            with self._faults.contain("the tick of a link") as part:
                if link.state is not LinkState.CLOSED:
                    self._tick_link(link)
            if part.has_failed:
                self._end_failed(link)
        self._heed_door()
        self._reception.tick(self._now, ping_s=self._ping_s, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Say bye to all and close the sockets. From before that nothing may be written to a peer any more.

        The handler is not called. Idempotent.
        """
        for link in self.links:
            link.leave()
        for source in self._door_sources():
            self._unwatch(source)
        self._reception.close()

    def _door_sources(self) -> list[zmq.Socket[bytes] | int]:
        """Nothing once the door is closed."""
        sockets = self._door.sockets
        return [*sockets, self._door.fd] if sockets and self._door.fd >= 0 else [*sockets]

    def _heed_door(self) -> None:
        with self._faults.contain("letting peers in"):
            self._door.heed()

    # ---- links ------------------------------------------------------------------------------

    def _serve_link(self, link: Link) -> None:
        for _ in burst():
            try:
                body = link.read()
                if body is None:
                    return
                link.heard_at = self._now
                with self._faults.contain("a message of a dialled peer", passing=(ProtocolError,)) as part:
                    self._hear(link, body)
                if part.has_failed:
                    self._end_failed(link)
            except ProtocolError as error:
                self._faults.dropped(repr(link.name), error)

    def _hear(self, link: Link, body: PeerBody) -> None:
        match body:
            case PeerPing():
                pass
            case Refused(text=text):
                step = LinkStep.TURNED_DOWN if link.state is LinkState.DIALING else LinkStep.LOST
                self._lose(link, step, f"it says: {text}")
            case PeerBye():
                self._lose(link, LinkStep.LOST, "it said bye")
            case PeerWelcome() if link.state is LinkState.DIALING:
                self._hear_welcome(link, body)
            case Granted() | Stop() | Coming() if link.state is LinkState.READY:
                self._handler.link_message(link, body)
            case _:
                raise ProtocolError(f"a {type(body).__name__} to a node whose link is {link.state}")

    def _hear_welcome(self, link: Link, welcome: PeerWelcome) -> None:
        try:
            schemes = check_welcome(self._handler.identity(), link.name, welcome)
            if self._lives.is_over(link.name, welcome.epoch):
                raise PeerRefused(f"this life of {link.name!r} (epoch {welcome.epoch}) has ended")
        except PeerRefused as error:
            self._counters["peers_refused"] += 1
            self._lose(link, LinkStep.TURNED_DOWN, str(error), is_told=True)
            return
        self._begin_life(link.name, welcome.epoch, welcome.host)
        link.welcomed(welcome)
        self._handler.link_ready(link, welcome, schemes)

    def _obey_roster(self) -> None:
        self._reception.obey_roster()
        for link in self.links:
            if link.state is not LinkState.CLOSED and not self._is_named(link):
                self._lose(link, LinkStep.LOST, "the roster has changed")

    def _end_failed(self, link: Link) -> None:
        """What was done for this link ended in an internal error: the link ends, too."""
        if link.state is not LinkState.CLOSED:
            with self._faults.contain("the end of a link"):
                self._lose(link, LinkStep.LOST, "an internal error")

    def _begin_life(self, name: str, epoch: int, host: str) -> None:
        """`name` was heard in this life; what belongs to another one is over."""
        self._lives.begin(name, epoch)
        self._reception.end_other_life(name, epoch, host)
        link = self._links.get(name)
        if link is not None and link.state is LinkState.READY and link.epoch != epoch:
            self._lose(link, LinkStep.LOST, f"it was started anew (epoch {epoch})")

    def _tick_link(self, link: Link) -> None:
        if self._now - link.pinged_at >= self._ping_s:
            link.ping(self._now)
        if link.fault:
            self._lose(link, LinkStep.LOST, link.fault)
        elif self._now - link.heard_at > self._timeout_s:
            hint = ""
            if link.state is LinkState.DIALING:
                keys = ", and does its roster have this node's key" if self._own is not None else ""
                hint = f"; does {link.name!r} run there{keys}?"
            self._lose(link, LinkStep.LOST, f"nothing heard from {link.address} for {self._timeout_s:g} s{hint}")

    def _lose(self, link: Link, step: LinkStep, why: str, *, is_told: bool = False) -> None:
        was_ready = link.state is LinkState.READY
        link.close(step, why, is_told=is_told)
        # A peer that is not there is dialled again and again: said once.
        level = logging.WARNING if was_ready or why != link.said else logging.DEBUG
        link.said = why
        log.log(level, "the link to peer %r %s: %s", link.name, "is lost" if was_ready else "did not come about", why)
        self._handler.link_lost(link, step, why)

    def _is_named(self, link: Link) -> bool:
        try:
            entry = self._roster.entry(link.name)
        except PeerUnknown:
            return False
        return (entry.address, entry.public_key) == (link.address, link.server_key)

    def _connected(self, entry: PeerEntry) -> zmq.Socket[bytes]:
        socket = None
        try:
            socket = self._context.socket(zmq.DEALER)
            limit(socket, self._timeout_s)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            socket.setsockopt(zmq.IPV6, int(needs_ipv6(entry.address)))
            secure_client(socket, own=self._own, server_key=entry.public_key)
            socket.connect(entry.address)
        except (ConfigError, zmq.ZMQError) as error:
            if socket is not None:
                socket.close()
            raise ConfigError(f"peer {entry.name!r} at {entry.address!r}: {error}") from error
        return socket

    def _forget_socket(self, socket: zmq.Socket[bytes]) -> None:
        del self._by_socket[socket]
        self._unwatch(socket)
