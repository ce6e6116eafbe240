"""The ZMQ socket nodes report to. It takes `NodeReport`s in; `Cancel`s and the list of peers go out to every node.

On a Unix socket or loopback it is for this host. At any other address nodes must prove keys that the roster has, and
report under the names that it gives those keys.

The socket is plain, not asyncio's: a `Cancel` must go out from a request that is itself being cancelled, where
nothing can be awaited. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

import zmq

from pdx import messages
from pdx.address import check_listen, needs_ipv6
from pdx.config import private_folder, socket_path
from pdx.errors import ConfigError, ProtocolError
from pdx.gate import Gate, user_of
from pdx.keyring import KeyPair, secure_server
from pdx.messages import Cancel, NodeReport, PeerEntry, PeerList
from pdx.ownership import owned
from pdx.roster import Roster

log = logging.getLogger(__name__)

MAX_PEERS = 1024
_BATCH = 256  # messages taken in before other work gets its turn


class Control:
    """A bound ROUTER socket; `start` acquires, `close` (idempotent) releases."""

    def __init__(
        self,
        address: str,
        *,
        on_report: Callable[[NodeReport], None],
        on_drop: Callable[[str], None],
        keys: str = "",
        roster: str = "",
    ) -> None:
        """`keys` and `roster`: files, see `pdx.keyring` and `pdx.roster`; both or none.

        :raises ConfigError: the address, the keys or the roster are wrong.
        """
        check_listen(address, has_keys=bool(keys and roster))
        self.address = address
        self._own_keys = KeyPair.load(keys) if keys else None
        self._roster = Roster(roster, has_keys=self._own_keys is not None)
        self._on_report = on_report
        self._on_drop = on_drop
        self._peers: dict[bytes, None] = {}  # in the order last heard of
        self._list = b""  # the last `PeerList` as a frame, empty: none yet
        self._gate: Gate | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undo = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"Control({self.address!r}, {len(self._peers)} peers, {'open' if self._socket else 'closed'})"

    def start(self) -> None:
        """Bind, and listen on the running loop; `address` then has the port that was found for port 0.

        :raises ConfigError: the folder is not private, or another proxy owns the address.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget)
            if self.address.startswith("ipc://"):
                path = socket_path(self.address)
                private_folder(path.parent)
                taken = ConfigError(f"another proxy listens on {self.address!r}; name another control address")
                undo.enter_context(owned(path, lambda _: taken))
                undo.callback(path.unlink, missing_ok=True)
            context: zmq.Context[zmq.Socket[bytes]] = undo.enter_context(zmq.Context())
            if self._own_keys is not None:
                self._gate = Gate(context, admits=self._admits, counters=Counter())
                undo.callback(self._gate.close)
            self._socket = undo.enter_context(context.socket(zmq.ROUTER))
            self._bind(self._socket)
            self._loop = asyncio.get_running_loop()
            for socket, drain in self._drains():
                self._loop.add_reader(socket.fileno(), drain)
                undo.callback(self._loop.remove_reader, socket.fileno())
                self._loop.call_soon(drain)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Stop listening."""
        self._undo.close()

    def _forget(self) -> None:
        self._socket = None
        self._gate = None
        self._peers.clear()

    def cancel(self, transfer: str) -> None:
        """Tell all nodes, without waiting; a node that cannot take the message gives up by its own deadline."""
        self._send(messages.encode(Cancel(transfer=transfer)), list(self._peers))

    def send_peers(self, entries: list[PeerEntry]) -> None:
        """Tell all nodes which nodes there are: now, and each that comes later when it first reports.

        A node that cannot take the message is told again with the next change. At most MAX_PEERS are told.
        """
        self._list = messages.encode(PeerList(entries[:MAX_PEERS]))
        self._send(self._list, list(self._peers))

    def _send(self, frame: bytes, peers: list[bytes]) -> None:
        if self._socket is None:
            return
        for peer in peers:
            try:
                self._socket.send_multipart([peer, frame], flags=zmq.NOBLOCK)
            except zmq.Again:
                self._on_drop("peer_full")
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._peers.pop(peer, None)
        # Sending can use up the edge on which the loop would have been told of incoming messages.
        if self._loop is not None:
            self._loop.call_soon(self._drain)

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a peer is gone, to forget it
        socket.setsockopt(zmq.IPV6, int(needs_ipv6(self.address)))
        if self._own_keys is not None:
            secure_server(socket, self._own_keys)
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self.address!r}: {error}") from error
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _drains(self) -> list[tuple[zmq.Socket[bytes], Callable[[], None]]]:
        drains = [
            (self._socket, self._drain),
            (self._gate.socket if self._gate is not None else None, self._drain_gate),
        ]
        return [(socket, drain) for socket, drain in drains if socket is not None]

    def _admits(self, key: str) -> bool:
        self._roster.refresh()
        return self._roster.name_of(key) is not None

    def _drain_gate(self) -> None:
        if self._gate is not None and self._gate.serve() and self._loop is not None:
            self._loop.call_soon(self._drain_gate)

    def _drain(self) -> None:
        for _ in range(_BATCH):
            if self._socket is None:
                return
            try:
                peer, *frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take(peer.bytes, frames)
        if self._loop is not None:
            self._loop.call_soon(self._drain)

    def _take(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        if len(frames) != 1:
            self._on_drop("malformed")
            return
        try:
            report = messages.decode_to_proxy(frames[0].bytes)
        except ProtocolError as error:
            log.debug("a control message was dropped: %s", error)
            self._on_drop("malformed")
            return
        if report.version != messages.VERSION:
            self._on_drop("version")
            return
        self._roster.refresh()
        if self._own_keys is not None and self._roster.name_of(user_of(frames[0])) != report.node:
            log.warning("a report of node %r came with a key that is not its own, and was dropped", report.node[:80])
            self._on_drop("not_its_name")
            return
        is_new = peer not in self._peers
        self._peers.pop(peer, None)
        self._peers[peer] = None
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        if is_new and self._list:
            self._send(self._list, [peer])
        self._on_report(report)
