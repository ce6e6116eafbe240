"""The socket nodes report to. It takes `NodeReport`s in; `Cancel`s go out to the nodes of a transfer, the list of peers
to every node.

A Unix socket is its user's alone. At any other address nodes must prove keys that the roster has, report under the
names that it gives those keys, and name engines on their own hosts only. Nodes come in through a
`PeerSocket`: strangers neither use up this process's descriptors nor end it.

The socket is plain, not asyncio's: a `Cancel` must go out from a request that is itself being cancelled, where
nothing can be awaited. All methods belong to the event loop's thread. An exception that one message or one node causes
is contained: the others are served on.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdx.errors import ConfigError, ProtocolError
from pdx.proxy.engines import MAX_ENGINES_OF_NODE
from pdx.security.address import address_host, base_url, check_address, is_among, is_loopback, url_host
from pdx.security.curve_keys import KeyPair
from pdx.security.peer_socket import GONE, Arrival, PeerSocket
from pdx.security.roster import Roster
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.telemetry.host import host_id
from pdx.wire import messages
from pdx.wire.burst import burst
from pdx.wire.messages import Cancel
from pdx.wire.proxy import (
    Arriving,
    Changes,
    EngineReport,
    Follow,
    NodeReport,
    Order,
    PeerEntry,
    PeerList,
    Prefilled,
    Reply,
    decode_to_proxy,
)

if TYPE_CHECKING:
    from pdx.discovery.discovery import Discovery

MAX_PEERS = 1024
_TAG_BYTES = 4
_HANDSHAKE_S = 5.0  # a connection that has not shown its key by then is closed
_SOON_S = 0.02  # until ZMQ has taken more of those who connect
_UNCONNECTED = "it is not connected"


FromNode = NodeReport | Reply | Changes


class Control:
    """A socket that nodes dial; `start` acquires, `close` (idempotent) releases."""

    def __init__(
        self,
        address: str,
        env: Env,
        take: Callable[[str, FromNode], None],
        *,
        keys: str = "",
        roster: str = "",
        workers: int = 1,
        discover: str = "",
        is_found: bool = True,
    ) -> None:
        """`take` is handed what a node of this name said and may say. `keys` and `roster`: files, see
        `pdx.security.curve_keys` and `pdx.security.roster`; both or none. `workers`: of this proxy, see `PeerList`.
        `discover`: see `pdx.discovery`; `is_found`: nodes find this socket there.

        :raises ConfigError: the address, the keys or the roster are wrong.
        """
        check_address(address, has_keys=bool(keys and roster), listens=True, is_control=True)
        self.address = address
        self.tag = secrets.token_hex(_TAG_BYTES)
        self._workers = workers
        self._own_keys = KeyPair.load(keys) if keys else None
        self._roster = Roster(roster, has_keys=self._own_keys is not None)
        self._discovery: Discovery | None = None
        if discover:
            from pdx.discovery.discovery import discovery

            self._discovery = discovery(discover, env.counters, has_keys=self._own_keys is not None)
        self._is_found = is_found
        self._take = take
        self._counters = env.counters
        self._faults = env.faults
        self.dropped: Counter[str] = Counter()  # messages, by reason
        self._peers: dict[bytes, str] = {}  # names by route, in the order last heard of
        self._keys: dict[bytes, str] = {}  # what they proved, likewise
        self._routes: dict[str, bytes] = {}  # of each name the route that was heard of last
        self._list = b""  # the last `PeerList` as a frame, empty: none yet
        self._peer_socket: PeerSocket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon: asyncio.Handle | None = None  # `_serve` is put off until the others had their turn
        self._undo = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"Control({self.address!r}, {len(self._peers)} peers, {'open' if self._peer_socket else 'closed'})"

    def start(self) -> None:
        """Bind, and listen on the running loop; `address` then has the port that was found for port 0.

        :raises ConfigError: the folder is not private, or another proxy owns the address.
        """
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget)
            context: zmq.Context[zmq.Socket[bytes]] = undo.enter_context(zmq.Context())
            self._peer_socket = PeerSocket(
                context,
                self.address,
                own=self._own_keys,
                admits=self._roster,
                timeout_s=_HANDSHAKE_S,
                taken=ConfigError(f"another proxy listens on {self.address!r}; name another control address"),
                counters=self._counters,
            )
            undo.callback(self._peer_socket.close)
            self.address = self._peer_socket.address
            if self._discovery is not None and self._own_keys is not None:
                name = self._roster.proxy_name(self._own_keys.public) or self.address.removeprefix("tcp://")
                self._discovery.start("proxies" if self._is_found else "", name, self.address)
                undo.callback(self._discovery.close)
            for socket in self._peer_socket.sockets:
                self._loop.add_reader(socket.fileno(), self._serve)
                undo.callback(self._loop.remove_reader, socket.fileno())
            undo.callback(self._ignore_newcomers)
            self._heed()
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()

    def _forget(self) -> None:
        self._peer_socket = None
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._peers.clear()
        self._keys.clear()
        self._routes.clear()

    def tell(self, message: Arriving | Cancel | Prefilled | Order, nodes: Collection[str]) -> None:
        """Tell these nodes, all where the name of one is not known (""), without waiting.

        A node that cannot take a `Cancel` gives up by its own deadline.
        """
        told = [route for route, name in self._peers.items() if "" in nodes or name in nodes]
        self._send(messages.encode(message), told)

    def follow(self, node: str, ask: Follow) -> None:
        """Ask this node for its changes; it tells them as `Changes`."""
        route = self._routes.get(node)
        self._send(messages.encode(ask), [] if route is None else [route])

    def order(self, node: str, order: Order) -> str:
        """Tell one node to carry out a verb, without waiting; what was wrong, empty if nothing."""
        route = self._routes.get(node)
        problem = _UNCONNECTED if route is None else self._post(route, messages.encode(order))
        self._serve_soon()
        return problem

    def members(self) -> set[str] | None:
        """The nodes that the roster file has now, None: without keys, everybody who reports is one."""
        if self._own_keys is None:
            return None
        self._roster.refresh()
        if self._discovery is not None:
            self._roster.find(self._discovery.found)
        return self._roster.members

    def send_peers(self, entries: list[PeerEntry]) -> None:
        """Tell all nodes which nodes there are: now, and each that comes later when it first reports.

        A node that cannot take the message is told again with the next change. At most MAX_PEERS are told.
        """
        self._list = messages.encode(PeerList(entries[:MAX_PEERS], self._workers, self.tag))
        self._send(self._list, list(self._peers))

    def _send(self, frame: bytes, peers: list[bytes]) -> None:
        for peer in peers:
            with self._faults.contain("a message to a node"):
                if self._post(peer, frame) not in ("", GONE, _UNCONNECTED):
                    self.dropped["peer_full"] += 1
        self._serve_soon()

    def _post(self, route: bytes, frame: bytes) -> str:
        """What was wrong; empty: nothing."""
        if self._peer_socket is None or not self._is_named(route):
            return _UNCONNECTED
        problem = self._peer_socket.post(route, frame)
        if problem == GONE:
            self._forget_route(route)
        return problem

    def _is_named(self, route: bytes) -> bool:
        """Whether the roster still has the key of who is at this route, as that node's; else it is told nothing."""
        is_named = self._own_keys is None or self._roster.name_of(self._keys.get(route, "")) == self._peers.get(route)
        if not is_named:
            self._forget_route(route)
        return is_named

    def _forget_route(self, route: bytes) -> None:
        self._keys.pop(route, None)
        name = self._peers.pop(route, None)
        if name is not None and self._routes.get(name) == route:
            del self._routes[name]

    # ---- what the loop calls ----------------------------------------------------------------

    def _heed(self) -> None:
        """Let in who waits at a Unix socket's path; the loop is told of the queue anew that waits there then."""
        if self._peer_socket is None or self._loop is None or self._peer_socket.fd < 0:
            self._serve_soon()
            return
        self._ignore_newcomers()
        is_more_to_take = False
        with self._faults.contain("letting nodes in"):
            is_more_to_take = self._peer_socket.admit_waiting()
        self._loop.add_reader(self._peer_socket.fd, self._heed)
        if is_more_to_take:
            self._loop.call_later(_SOON_S, self._heed)
        self._serve_soon()

    def _ignore_newcomers(self) -> None:
        if self._peer_socket is not None and self._loop is not None and self._peer_socket.fd >= 0:
            self._loop.remove_reader(self._peer_socket.fd)

    def _serve_soon(self) -> None:
        """ZMQ tells the loop of incoming messages once; using the socket in any way can use up that news.

        Once: what is taken in is answered, and each answer uses the socket.
        """
        if self._soon is not None or self._peer_socket is None or self._loop is None:
            return
        if self._peer_socket.is_waited_for:
            self._soon = self._loop.call_soon(self._serve_put_off)

    def _serve_put_off(self) -> None:
        self._soon = None
        self._serve()

    def _serve(self) -> None:
        """Take in what is there, but not so much at once that requests wait."""
        if self._own_keys is not None:
            self._roster.refresh()
        for _ in burst():
            with self._faults.contain("the control socket"):
                if not self._serve_next():
                    break
        self._serve_soon()

    def _serve_next(self) -> bool:
        """False: nothing more came."""
        if self._peer_socket is None:
            return False
        for socket in self._peer_socket.sockets:
            self._peer_socket.answer_zap(socket)
        try:
            arrival = self._peer_socket.receive()
        except ProtocolError as error:
            self._drop("malformed", "", str(error))
            return True
        if arrival is None:
            return False
        self._take_in(arrival)
        return True

    def _take_in(self, arrival: Arrival) -> None:
        try:
            report = decode_to_proxy(arrival.frame)
        except ProtocolError as error:
            self._drop("malformed", arrival.key, str(error))
            return
        if not isinstance(report, NodeReport):
            self._take_answer(arrival, report)
            return
        if report.version != messages.VERSION:
            self._drop("version", arrival.key, f"it speaks version {report.version}, and this is {messages.VERSION}")
            return
        if not self._is_its_own(arrival, report.node):
            return
        is_new = arrival.route not in self._peers
        self._forget_route(arrival.route)
        self._peers[arrival.route], self._keys[arrival.route] = report.node, arrival.key
        self._routes[report.node] = arrival.route
        if len(self._peers) > MAX_PEERS:
            self._forget_route(next(iter(self._peers)))
        if is_new and self._list:
            self._send(self._list, [arrival.route])
        if len(report.engines) > MAX_ENGINES_OF_NODE:
            text = f"node {report.node!r} names {len(report.engines)} engines; {MAX_ENGINES_OF_NODE} are looked at"
            self._faults.warn(f"engines {report.node}", printable(text))
            self.dropped["engines"] += 1
        engines = [each for each in report.engines[:MAX_ENGINES_OF_NODE] if self._is_believed(report, each)]
        self._take(report.node, msgspec.structs.replace(report, engines=engines))

    def _take_answer(self, arrival: Arrival, answer: Reply | Changes) -> None:
        node = self._peers.get(arrival.route)
        if node is not None and self._is_its_own(arrival, node):
            self._take(node, answer)

    def _is_its_own(self, arrival: Arrival, node: str) -> bool:
        """Whether what came is of this node, by the key that it came with."""
        self._roster.refresh()
        is_own = self._own_keys is None or self._roster.name_of(arrival.key) == node
        if not is_own:
            self._drop(
                "not_its_name", arrival.key, f"a message of node {node[:80]!r} came with a key that is not its own"
            )
        return is_own

    def _is_believed(self, report: NodeReport, engine: EngineReport) -> bool:
        """Whether the engine is on the node's own host, as far as the roster knows. What is no URL passes: no request
        goes there."""
        if self._own_keys is None or not engine.url:
            return True
        with contextlib.suppress(ConfigError):
            if not self._lies_on_host(report, url_host(base_url(engine.url))):
                text = (
                    f"node {report.node!r} names an engine at {engine.url!r}, which is not believed: by the roster the "
                    "node is on another host; name that one by `pdx serve --url`, or add this one to its engine_hosts"
                )
                self._faults.warn(f"not_its_host {report.node}", printable(text))
                self.dropped["not_its_host"] += 1
                return False
        return True

    def _lies_on_host(self, report: NodeReport, host: str) -> bool:
        entry = self._roster.node(report.node)
        if entry is None:
            return False
        where, here = self._roster.host_of(report.node), address_host(self.address)
        is_near = is_loopback(where) or where == here  # by the roster, on the proxy's own host
        if is_loopback(host):
            return is_near and report.host == host_id()
        return host == where or is_among(host, entry.engine_hosts) or (is_near and host == here)

    def _drop(self, reason: str, key: str, text: str) -> None:
        """Count a message that is not taken in, and log the first one of its sender in a minute."""
        sender = (self._roster.name_of(key) or "a node that has left the roster") if key else "a node"
        self._faults.dropped(sender, ProtocolError(text))
        self.dropped[reason] += 1
