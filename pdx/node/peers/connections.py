"""All connections of a node to its peers, one per peer: which to dial, which to admit, which epoch of each is alive.

One ROUTER that peers dial, one DEALER per dialled peer; with keys, all of them CURVE. The roster decides which peers
may connect or be dialled; `Peers` handles the messages of ready connections. Everything runs on the control loop's
thread, and nothing blocks; last messages have LINGER_MS to leave while the context ends.

Two nodes may dial each other at the same time. Then the connection that the node with the lesser name dialled wins, and
the other node's hello waits there as a rival. It is accepted when that connection fails or ends: the peer may have
ended it and dialled anew, and its two sockets are read in any order. The rival is refused if that connection is still
heard half the timeout later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import zmq

from pdx.config import NodeConfig, listen_address, node_name
from pdx.errors import ConfigError, NodeRunning, PeerRefused, PeerUnknown, ProtocolError
from pdx.node.peers.connection import (
    ConnectionState,
    Ending,
    Epochs,
    PeerConnection,
    Rival,
    check_hello,
    check_welcome,
    key_after,
    refusal,
)
from pdx.security.address import check_address
from pdx.security.curve_keys import KeyPair
from pdx.security.own_key import OwnKey
from pdx.security.peer_socket import Arrival, PeerSocket, dialled, receive
from pdx.security.roster import Roster
from pdx.telemetry.env import Env, WakingClock
from pdx.wire.burst import burst
from pdx.wire.messages import PEER_ANSWERS, RIGHTS, Bye, Hello, PeerFrame, Ping, Refused, Welcome, decode_peer, encode
from pdx.wire.proxy import PeerEntry

if TYPE_CHECKING:
    from pdx.discovery.discovery import Discovery
    from pdx.node.peers.peers import Peers

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024  # connected peers that have dialled
LINGER_MS = 200  # for a closed socket to send its last messages
_LAST_SEQ = (1 << 63) - 1  # of a message to a node without a session, the last one it gets
_HEARD = RIGHTS["peer"] | PEER_ANSWERS


class Connections:
    """See the module. The sockets are open from construction to `close`."""

    def __init__(
        self,
        node: Peers,
        config: NodeConfig,
        env: Env,
        numbers: Iterator[int],
        context: zmq.Context[zmq.Socket[bytes]] | None,
        poller: zmq.Poller | None,
    ) -> None:
        """`node` says what it is (`identity`), and is notified of connections: `greeted`, `invited`, `message` and
        `connection_over`. `numbers`: of sessions. `context`: this node's own, because ZMQ has one ZAP socket per
        context; the owner of `poller` calls `serve`. Without them the node has no peers.

        :raises ConfigError: an address, the keys or the roster are wrong, no peer would admit this node by its own
            entry in the roster, or the address cannot be bound.
        :raises NodeRunning: another node owns the address.
        """
        listen = listen_address(config)
        check_address(listen, has_keys=bool(config.keys and config.roster), listens=True)
        self._node, self._env, self._numbers = node, env, numbers
        self._context, self._poller = context, poller or zmq.Poller()
        self._timeout_s, self._ping_s = config.peer_timeout_s, config.report_s
        self._own_key = OwnKey(config.keys, env.counters)
        self.own = self._own_key.in_file  # the keys that this node proves here and at its other sockets
        self._is_proved = True  # False: changing to a new key failed halfway
        self.roster = Roster(config.roster, has_keys=self.own is not None, counters=env.counters)
        self._discovery: Discovery | None = None
        if config.discover:
            from pdx.discovery.discovery import discovery  # it brings an HTTP client

            self._discovery = discovery(config.discover, env.counters, has_keys=self.own is not None)
        # While this node was stopped or starved it heard no peer, which does not make the peers silent.
        self._clock = WakingClock(self._timeout_s / 4, env.clock)
        self._now = self._next_ping = self._clock()
        self._last: dict[str, PeerConnection] = {}  # by name: the present one, or the last there was
        self._by_route: dict[bytes, PeerConnection] = {}  # of peers that dialled
        self._by_socket: dict[zmq.Socket[bytes], PeerConnection] = {}  # of dialled peers
        self._rivals: dict[str, Rival] = {}
        self._epochs = Epochs()
        self._name = node_name(config)
        self._peer_socket: PeerSocket | None = None
        if context is not None:
            self._peer_socket = PeerSocket(
                context,
                listen,
                own=self.own,
                admits=self.roster,
                timeout_s=self._timeout_s,
                taken=NodeRunning(f"another node already listens at {listen}; give this one another --listen"),
                counters=env.counters,
            )
            try:
                warning = self.roster.check_self(self._name, self.public_key, self._peer_socket.address)
            except ConfigError:
                self._peer_socket.close()
                raise
            if warning:
                log.warning("%s", warning)
            for source in self._peer_socket.sources:
                self._poller.register(source, zmq.POLLIN)
            if self._discovery is not None:
                self._discovery.start("nodes", self._name, self.address)

    @property
    def address(self) -> str:
        """The address at which peers reach this node; empty: none."""
        socket = self._peer_socket
        return self.roster.published_address(self._name, socket.address) if socket is not None else ""

    @property
    def _listening(self) -> PeerSocket:
        assert self._peer_socket is not None, "a node without sockets hears nobody"
        return self._peer_socket

    @property
    def public_key(self) -> str:
        """This node's public key; empty without CURVE."""
        return self.own.public if self.own is not None else ""

    @property
    def peers(self) -> list[PeerConnection]:
        """The connections that are not closed."""
        return [peer for peer in self._last.values() if peer.state is not ConnectionState.CLOSED]

    @property
    def known(self) -> list[str]:
        """Connected peers, and those whose connection has ended, as long as the roster names them."""
        return list(self._last)

    def of(self, name: str) -> PeerConnection | None:
        """The connection to a peer, or the last there was."""
        return self._last.get(name)

    def _open_connection(self, name: str) -> PeerConnection | None:
        """The connection to a peer that is not closed."""
        peer = self._last.get(name)
        return peer if peer is not None and peer.state is not ConnectionState.CLOSED else None

    def dial(self, name: str, *, is_wanted: bool = True) -> PeerConnection:
        """The connection to a peer; without one, the peer is dialled now; `invited` or `connection_over` follows.

        `is_wanted`: something waits for it. The first such call restarts the timeout, however long ago the peer was
        dialled ahead of need; later ones do not, or a dead peer would keep all callers waiting.

        :raises PeerUnknown: the roster does not name the peer, or it is this node itself.
        :raises ConfigError: the peer has a key and this node has none, or the other way round.
        """
        if (peer := self._open_connection(name)) is not None:
            if peer.state is ConnectionState.DIALING and is_wanted and not peer.is_wanted:
                peer.is_wanted = True
                peer.heard_at = self._now
            return peer
        own = self._node.identity()
        if name == own.name or self._context is None:
            raise PeerUnknown(f"{name!r} is this node itself")
        found = self.roster.entry(name)
        entry = PeerEntry(name, found.address, key_after(self._last.get(name), found.keys))
        socket = dialled(self._context, entry, self.own, self._timeout_s)
        peer = self._new(name, socket)
        peer.address, peer.key, peer.is_wanted = entry.address, entry.public_key, is_wanted
        self._by_socket[socket] = peer
        self._poller.register(socket, zmq.POLLIN)
        peer.post(own)
        return peer

    def leave(self, peer: PeerConnection, refusal: str = "") -> None:
        """End a connection: this node writes no more to that peer, so close the channels to it before. `refusal`: why a
        peer that dialled is turned down. No-op if the connection is over already."""
        if peer.state is not ConnectionState.CLOSED:
            self._close(peer, Ending.TURN_DOWN if refusal else Ending.LEAVE, refusal or "left")
            self._accept_rival(peer.name)

    def take_proxy_list(self, entries: list[PeerEntry]) -> None:
        """Take in the proxy's list of nodes, trusted as far as `pdx.security.roster` says."""
        self.roster.take_proxy_list(entries)
        self._forget_strangers()

    # ---- the loop ---------------------------------------------------------------------------

    def serve(self, socket: object) -> bool:
        """Take in what waits on a readable socket or descriptor; False: it is not one of this object's."""
        if socket == self._listening.fd:
            self._heed()
            return True
        if not isinstance(socket, zmq.Socket):
            return False
        if socket.closed or self._listening.answer_zap(socket):
            return True  # it may have been closed earlier in this turn
        if socket not in self._by_socket and socket not in self._listening.sockets:
            return False
        self._serve(socket)
        return True

    def tick(self) -> None:
        """A few times a second: send pings, end silent connections, reread the roster."""
        self._now = self._clock()
        with self._env.faults.contain("the look at the roster"):
            if self.roster.refresh():
                self._forget_strangers()
            if self._discovery is not None:
                self.roster.find(self._discovery.found)
            own = self._own_key.after(self.own, self.roster, self._name, self.address)
            if own is not None and not (own == self.own and self._is_proved):
                self._prove(own)
        self._heed()
        is_ping_due = self._now >= self._next_ping
        if is_ping_due:
            self._next_ping = self._now + self._ping_s
        for peer in self.peers:
            with self._env.faults.contain("the tick of a connection") as failures:
                self._tick(peer)
                if is_ping_due:
                    peer.send(Ping())
            if failures:
                self._end_failed(peer)

    def _prove(self, own: KeyPair) -> None:
        """Change to this key; if that fails, it is retried at the next tick."""
        self._is_proved = False
        try:
            self._listening.prove(own, self._poller)
        except (ConfigError, OSError, zmq.ZMQError) as error:
            self._env.faults.warn("the node's key", f"the node's new key is not used yet: {error}")
            return
        self.own, self._is_proved = own, True
        log.info("new connections have the node's new key, %s", own.public)

    def close(self) -> None:
        """Say bye to all peers and close the sockets. All writing to peers must have ended before.

        Does not call `Peers.connection_over`. Idempotent.
        """
        self._rivals.clear()
        for peer in self.peers:
            self._close(peer, Ending.LEAVE, "left")
        if self._discovery is not None:
            self._discovery.close()
        if self._peer_socket is not None:
            for source in self._peer_socket.sources:
                self._poller.unregister(source)
            self._peer_socket.close(linger_ms=LINGER_MS)

    def _heed(self) -> None:
        if self._peer_socket is not None:
            with self._env.faults.contain("letting peers in"):
                self._peer_socket.admit_waiting()

    # ---- messages ---------------------------------------------------------------------------

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        for _ in burst():
            peer = self._by_socket.get(socket)
            try:
                arrival = self._listening.receive() if peer is None else receive(socket)
                if arrival is None:
                    return
                peer = peer or self._by_route.get(arrival.route)
                with self._env.faults.contain("a message of a peer", passing=(ProtocolError,)) as failures:
                    frame = decode_peer(arrival.frame)
                    if peer is not None:
                        self._hear(peer, arrival.key, frame)
                    else:
                        self._hear_stranger(arrival, frame)
                if failures:
                    self._end_failed(peer or self._by_route.get(arrival.route))
            except ProtocolError as error:
                self._env.faults.dropped(repr(peer.name) if peer else "a node without a session", error)
            if socket.closed:
                return

    def _hear(self, peer: PeerConnection, key: str, frame: PeerFrame) -> None:
        if not peer.is_dialled and key != peer.key:
            raise ProtocolError(f"sent with a key that is not that of {peer.name!r}")
        peer.take(frame)
        peer.heard_at = self._now
        is_ready = peer.state is ConnectionState.READY
        match frame.body:
            case Ping():
                pass
            case Bye():
                self._lose(peer, Ending.BYE, "it said bye")
            case Refused(text=text) if not frame.about:
                step = Ending.LOST if peer.is_invited else Ending.TURN_DOWN
                self._lose(peer, step, f"it says: {text}")
            case Welcome() if peer.state is not ConnectionState.NEW and not peer.is_invited:
                self._hear_welcome(peer, frame.body)
            case body if is_ready and type(body) in _HEARD:
                self._node.message(peer, body, frame.about)
            case body:
                raise ProtocolError(f"a {type(body).__name__} in a connection that is {peer.state}")
        if is_ready:
            self._refuse_rival(peer.name)

    def _hear_welcome(self, peer: PeerConnection, welcome: Welcome) -> None:
        try:
            schemes = check_welcome(self._node.identity(), peer.name, welcome, self._node.regions.why)
            if self._epochs.is_over(peer.name, welcome.epoch) or welcome.epoch != (peer.epoch or welcome.epoch):
                raise PeerRefused(f"epoch {welcome.epoch} of {peer.name!r} has ended")
        except PeerRefused as error:
            self._env.counters["peers_refused"] += 1
            peer.post(refusal(str(error)))
            self._lose(peer, Ending.TURN_DOWN, str(error))
            return
        peer.is_invited = True
        if peer.state is ConnectionState.READY:  # it dialled, and now says where it may be written
            self._node.invited(peer, welcome, schemes)
            return
        peer.set_identity(welcome)
        self._begin_life(peer.name, welcome.epoch, welcome.host)
        peer.become_ready()
        self._node.invited(peer, welcome, schemes)
        self._node.greeted(peer, schemes)

    def _hear_stranger(self, arrival: Arrival, frame: PeerFrame, said: int = 0) -> None:
        """Handle a message of a node without a session. `said`: how many messages were already sent to it."""
        hello = frame.body
        if isinstance(hello, Bye):
            return
        if not isinstance(hello, Hello) or hello.kind != "peer":
            self._turn_away(arrival.route, "say hello first")
            return
        # A hello may outlive its connection, and then does not prove that its sender is alive.
        if self._listening.post(arrival.route, encode(PeerFrame(said + 1, 0, Ping()))):
            before = self._last.get(hello.name)
            if before is not None and before.is_dialled and before.epoch in (0, hello.epoch):
                return  # both nodes dialled, and the peer has given up its attempt
            raise ProtocolError(f"the hello of {hello.name[:80]!r} outlived its connection")
        try:
            schemes = self._admit(arrival.key, hello)
        except PeerRefused as error:
            self._env.counters["peers_refused"] += 1
            log.warning("peer %r was turned down: %s", hello.name[:80], error)
            self._turn_away(arrival.route, str(error))
            return
        self._begin_life(hello.name, hello.epoch, hello.host)
        if (before := self._open_connection(hello.name)) is not None:
            if before.is_dialled and self._node.identity().name < hello.name:
                self._rivals[hello.name] = Rival(arrival, frame.seq, hello, self._now)
                return
            if before.state is ConnectionState.DIALING:
                self._replace(before)
            else:  # the same process, which lost its connection before this side noticed
                self._lose(before, Ending.LOST, "it dialled anew")
        self._open(arrival, frame.seq, hello, schemes, said + 1)

    def _open(self, arrival: Arrival, seq: int, hello: Hello, schemes: list[str], said: int) -> None:
        peer = self._new(hello.name, self._listening.router, arrival.route, said=said)
        peer.key = arrival.key
        peer.set_identity(hello)
        peer.take(PeerFrame(seq, 0, hello))
        self._by_route[arrival.route] = peer
        self._node.greeted(peer, schemes)

    def _new(self, name: str, socket: zmq.Socket[bytes], route: bytes = b"", said: int = 0) -> PeerConnection:
        before = self._last.get(name)
        peer = PeerConnection(next(self._numbers), name, socket, route, said=said, now=self._now)
        peer.why_before = before.why if before is not None else ""
        self._last[name] = peer
        return peer

    def _admit(self, key: str, hello: Hello) -> list[str]:
        """The schemes to open for a peer. :raises PeerRefused: it is not admitted."""
        authenticated = (self.roster.name_of(key) or "nobody in the roster") if self.own is not None else None
        is_over = self._epochs.is_over(hello.name, hello.epoch)
        schemes = check_hello(
            self._node.identity(), hello, self._node.regions.why, authenticated=authenticated, is_over=is_over
        )
        if not self.roster.admits_name(hello.name):
            raise PeerRefused(f"no node is named {hello.name[:80]!r} in the roster")
        if len(self._by_route) >= MAX_SESSIONS and self._open_connection(hello.name) is None:
            raise PeerRefused(f"{MAX_SESSIONS} peers are here already")
        return schemes

    def _turn_away(self, route: bytes, text: str) -> None:
        self._env.counters["hellos_missing"] += 1
        self._refuse(route, text)

    def _refuse(self, route: bytes, text: str) -> None:
        self._listening.post(route, encode(PeerFrame(_LAST_SEQ, 0, refusal(text))))

    # ---- nodes that dial each other ---------------------------------------------------------

    def _replace(self, dialled: PeerConnection) -> None:
        """Drop this node's dialling in favor of the peer's; callers wait for that connection instead."""
        dialled.close("the peer dialled, too")
        self._forget(dialled)

    def _refuse_rival(self, name: str) -> None:
        """Refuse a peer's old rival hello, as the peer is heard over the present connection."""
        rival = self._rivals.get(name)
        if rival is not None and self._now - rival.came_at > self._timeout_s / 2:
            del self._rivals[name]
            self._refuse(rival.arrival.route, "connected already")

    def _accept_rival(self, name: str) -> bool:
        """Handle the peer's waiting hello, if any, as this node's dialling is over or too slow. True: accepted."""
        rival = self._rivals.pop(name, None)
        if rival is None:
            return False
        try:
            self._hear_stranger(rival.arrival, PeerFrame(rival.seq, 0, rival.hello), said=1)
        except ProtocolError as error:
            self._env.faults.dropped(repr(name), error)
        return rival.arrival.route in self._by_route

    # ---- the end of connections -------------------------------------------------------------

    def _begin_life(self, name: str, epoch: int, host: str) -> None:
        """Note that `name` is alive in this epoch on the kernel `host`: its connection of another epoch is over, and
        its process dead, unless keys do not prove names and it may still run (`PeerConnection.is_dead_if`)."""
        self._epochs.begin(name, epoch)
        peer = self._last.get(name)
        if peer is None or peer.epoch == epoch or peer.state in (ConnectionState.CLOSED, ConnectionState.DIALING):
            return
        if peer.is_dead_if(epoch, host):
            self._lose(peer, Ending.RESTARTED, f"it was started anew (epoch {epoch})")
        else:
            first = f"process {peer.pid} of this name runs" if host == peer.host else "another host has this name"
            why = f"{first}, and another node was started with it (epoch {epoch}): use another --name, or keys"
            self._lose(peer, Ending.LOST, why)

    def _tick(self, peer: PeerConnection) -> None:
        is_dialing, address = peer.state is ConnectionState.DIALING, self.roster.address_of(peer.name)
        if not self.roster.is_named(peer.name, peer.key, peer.address):
            self._lose(peer, Ending.LOST, "the roster has changed")
        elif is_dialing and address not in ("", peer.address):  # waiting at the old address is in vain
            self._lose(peer, Ending.LOST, "it was found elsewhere")
        elif is_dialing and peer.name in self._rivals and self._now - peer.dialled_at > self._timeout_s / 2:
            self._replace(peer)  # the peer reaches this node, but not the other way round
            if not self._accept_rival(peer.name):
                self._node.connection_over(peer, Ending.LOST, "nothing was heard, and its own dialling has ended")
        elif peer.fault:
            self._lose(peer, Ending.LOST, peer.fault)
        elif self._now - peer.heard_at > self._timeout_s:
            hint = ""
            if is_dialing:
                keys = ", and does its roster have this node's key" if self.own is not None else ""
                hint = f"; does {peer.name!r} run there{keys}?"
            where = f" from {peer.address}" if peer.is_dialled else ""
            self._lose(peer, Ending.LOST, f"nothing heard{where} for {self._timeout_s:g} s{hint}")

    def _lose(self, peer: PeerConnection, step: Ending, why: str) -> None:
        was_ready = peer.state is ConnectionState.READY
        self._close(peer, step, why)
        # A missing peer is dialled again and again: log it once.
        is_news = was_ready or why != peer.why_before
        level = logging.INFO if step is Ending.BYE else logging.WARNING if is_news else logging.DEBUG
        text = "is lost" if was_ready else "did not come about"
        log.log(level, "the connection to peer %r %s: %s", peer.name, text, why)
        self._env.counters["peers_lost"] += step in (Ending.LOST, Ending.RESTARTED)
        if not was_ready and peer.is_dialled and self._accept_rival(peer.name):
            return  # the peer has dialled meanwhile
        self._node.connection_over(peer, step, why)
        self._accept_rival(peer.name)

    def _close(self, peer: PeerConnection, step: Ending, why: str) -> None:
        peer.end(step, why)
        self._forget(peer)

    def _forget(self, peer: PeerConnection) -> None:
        if peer.is_dialled:
            del self._by_socket[peer.socket]
            self._poller.unregister(peer.socket)
            peer.socket.close(linger=LINGER_MS)
        else:
            del self._by_route[peer.route]
            if self._last[peer.name] is peer and not self.roster.address_of(peer.name):
                del self._last[peer.name]  # this node cannot dial it, so its name is not kept

    def _end_failed(self, peer: PeerConnection | None) -> None:
        """End a peer's connection after an internal error."""
        if peer is not None and peer.state is not ConnectionState.CLOSED:
            with self._env.faults.contain("the end of a connection"):
                self._lose(peer, Ending.LOST, "an internal error")

    def _forget_strangers(self) -> None:
        """Forget names that are neither in the roster any more nor connected: hosts may come and go."""
        names = set(self.roster.names)
        for name in self._last.keys() - names:
            if self._last[name].state is ConnectionState.CLOSED:
                del self._last[name]
