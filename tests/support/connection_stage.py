"""What tests of connections share: nodes that are nothing but `Connections`, their loop, peers that say anything.

Messages go over real sockets; the clock stands still unless a test moves it, and does not move while a message between
two nodes is on its way, so nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdx.config import NodeConfig
from pdx.node.peers.connection import welcome
from pdx.node.peers.connections import Connections
from pdx.security.curve_keys import KeyPair, secure_client
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.transports.channel import RemoteRegion
from pdx.wire.messages import VERSION, Hello, PeerFrame, Ping, decode_peer, encode
from pdx.wire.proxy import PeerEntry

TIMEOUT_S = 4.0
PING_S = 1.0


class Recorder:
    """A node's core that writes down what it is told, and welcomes whoever comes unless it is told not to."""

    def __init__(self, name: str, epoch: int, schemes: tuple[str, ...]) -> None:
        self.me = Hello(VERSION, 4242, "peer", name, epoch=epoch, host="host", schemes=list(schemes))
        self.regions = SimpleNamespace(why={})
        self.events: list[tuple[Any, ...]] = []
        self.on_hello: Callable[[Any], None] = self.welcome
        self.on_message: Callable[[Any, Any, int], None] = lambda peer, body, about: None

    def identity(self) -> Hello:
        return self.me

    def welcome(self, peer: Any) -> None:
        regions = [RemoteRegion(scheme, 4096, peer.token, b"") for scheme in self.me.schemes]
        peer.welcome(welcome(self.me, regions, None))

    def greeted(self, peer: Any, schemes: list[str]) -> None:
        self.events.append(("hello", peer, schemes))
        self.on_hello(peer)

    def invited(self, peer: Any, welcome: Any, schemes: list[str]) -> None:
        self.events.append(("ready", peer, welcome, schemes))

    def message(self, peer: Any, body: Any, about: int) -> None:
        self.events.append(("heard", peer, body, about))
        self.on_message(peer, body, about)

    def connection_over(self, peer: Any, ending: Any, why: str) -> None:
        self.events.append(("over", peer, ending, why))

    def saw(self, kind: str) -> list[tuple[Any, ...]]:
        """All events of a kind, without their kind."""
        return [event[1:] for event in self.events if event[0] == kind]


class PeerNode:
    """Connections with a recorder."""

    def __init__(self, stage: Stage, name: str, epoch: int, schemes: tuple[str, ...], **settings: Any) -> None:
        self.name = name
        self.stage = stage
        self.core = Recorder(name, epoch, schemes)
        self.env = Env(lambda: stage.now)
        self.counters = self.env.counters
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stage.undo.callback(self.context.destroy, 0)
        own = f"ipc://{stage.place}/{name}.sock"
        config = NodeConfig(
            name=name, address=own, peer_timeout_s=TIMEOUT_S, report_s=PING_S, **{"listen": own, **settings}
        )
        self.connections = Connections(self.core, config, self.env, itertools.count(1), self.context, stage.poller)
        self.entry = PeerEntry(name, self.connections.address, self.connections.public_key)
        self.is_frozen = False  # does not get its turn: stopped, or starved

    def close(self) -> None:
        if self in self.stage.nodes:
            self.stage.nodes.remove(self)
        self.connections.close()
        self.context.term()


class Stage:
    """Several nodes in one process, and the clock they share."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.now = 1000.0
        self.poller = zmq.Poller()
        self.nodes: list[PeerNode] = []
        self.undo = contextlib.ExitStack()

    def node(self, name: str, epoch: int = 1, schemes: tuple[str, ...] = ("tcp", "shm"), **settings: Any) -> PeerNode:
        node = PeerNode(self, name, epoch, schemes, **settings)
        self.nodes.append(node)
        return node

    def introduce(self, *nodes: PeerNode) -> None:
        """The proxy tells all of them of all of them."""
        for node in self.nodes:
            node.connections.take_proxy_list([other.entry for other in nodes])

    def pair(self, **settings: Any) -> tuple[PeerNode, PeerNode]:
        """Two nodes, where alpha has dialled beta and each was welcomed."""
        alpha, beta = self.node("alpha", 11, **settings), self.node("beta", 22, **settings)
        self.introduce(alpha, beta)
        alpha.connections.dial("beta")
        self.until(lambda: alpha.core.saw("ready") and beta.core.saw("ready"))
        return alpha, beta

    def turn(self) -> None:
        """One turn of the loop; the clock stands still."""
        # Descriptors are heeded whether they can be read or not, as by the node's loop: whom ZMQ's thread did not take
        # within the time that one call gives it is let in at a later turn.
        descriptors = [source for source, _ in self.poller.sockets if isinstance(source, int)]
        ready = [source for source, _ in self.poller.poll(20) if source not in descriptors]
        awake = [node for node in self.nodes if not node.is_frozen]
        served = [node.connections.serve(socket) for node in awake for socket in ready]
        self.let_in()
        if ready and not any(served):
            time.sleep(0.005)  # it is for nodes that are frozen, and ZMQ's threads need a turn

    def let_in(self) -> None:
        """Who waits at a node that is not frozen."""
        for source, _ in self.poller.sockets:
            for node in self.nodes if isinstance(source, int) else []:
                if not node.is_frozen:
                    node.connections.serve(source)

    def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Turn until it is true; fail after 20 s."""
        return wait_until(lambda: condition() or self.turn(), what or "it did not happen", 20.0, pause_s=0.0)

    def settle(self) -> None:
        """Turn until no message between connected nodes is on its way to one that gets its turn."""
        self.until(lambda: not any(self._unheard()), "all is heard that was said")

    def _unheard(self) -> Iterator[int]:
        """How much of what was said at the other end of each connection is still to be heard."""
        ends = {(node.name, peer.name): peer for node in self.nodes for peer in node.connections.peers}
        for node in self.nodes:
            for hears in node.connections.peers if not node.is_frozen else []:
                says = ends.get((hears.name, node.name))
                if says is not None and not says.fault and says.is_dialled != hears.is_dialled:
                    yield says._said - hears._heard

    def pass_time(self, seconds: float, step: float = 0.5) -> None:
        """Move the clock in small steps, with ticks and turns. At each, all is heard that was said before."""
        self.settle()
        for _ in range(round(seconds / step)):
            self.now += step
            for node in self.nodes:
                if not node.is_frozen:
                    node.connections.tick()
            self.turn()
            self.settle()

    def close(self) -> None:
        for node in list(self.nodes):
            node.close()
        self.undo.close()


class _Raw:
    """A socket that says anything at all, and believes nothing."""

    def __init__(self, kind: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.route: list[bytes] = []

    def hear(self) -> Any:
        """The next message that is no ping, None if none is there."""
        while self.socket.poll(0):
            *self.route, frame = self.socket.recv_multipart()
            body = decode_peer(frame).body
            if not isinstance(body, Ping):
                return body
        return None

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.close()
            self.context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Raw(_Raw):
    """It dials `node`."""

    def __init__(
        self,
        stage: Stage,
        node: PeerNode,
        *,
        own: KeyPair | None = None,
        server_key: str = "",
        routing_id: bytes = b"",
    ) -> None:
        super().__init__(zmq.DEALER)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        if own is not None:
            secure_client(self.socket, own=own, server_key=server_key)
        self.socket.connect(node.connections.address)
        self.seq = 0

    def send(self, body: Any, about: int = 0, *, seq: int | None = None) -> int:
        self.seq = self.seq + 1 if seq is None else seq
        self.socket.send(encode(PeerFrame(self.seq, about, body)))
        return self.seq

    def hello(self, name: str = "raw", epoch: int = 5, **fields: Any) -> None:
        known = {"version": VERSION, "host": "h", "pid": 7, "schemes": ["tcp"], **fields}
        self.send(Hello(kind="peer", name=name, epoch=epoch, **known))


class RawHost(_Raw):
    """It is dialled, and answers whom it heard last."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(zmq.ROUTER)
        self.path = stage.place / f"{name}.sock"
        self.entry = PeerEntry(name, f"ipc://{self.path}")
        self.socket.bind(self.entry.address)

    def send(self, body: Any, about: int = 0, *, seq: int) -> None:
        self.socket.send_multipart([*self.route, encode(PeerFrame(seq, about, body))])

    def close(self) -> None:
        super().close()
        self.path.unlink()


def welcomed(stage: Stage, peer: Raw, **hello: Any) -> Any:
    """Let a raw peer say hello, and wait for the answer."""
    peer.hello(**hello)
    return stage.until(peer.hear)


@contextlib.contextmanager
def zmq_events(node: PeerNode) -> Iterator[Callable[[zmq.Event], Any]]:
    """It waits until ZMQ says this of a connection to the node, and lets in meanwhile who waits."""
    sources = [source for source, _ in node.stage.poller.sockets]
    own = [each for each in sources if isinstance(each, zmq.Socket) and each.context is node.context]
    (router,) = [each for each in own if each.type == zmq.ROUTER]
    monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def has_come(event: zmq.Event) -> bool:
        node.stage.let_in()
        return bool(monitor.poll(0)) and recv_monitor_message(monitor)["event"] == event

    try:
        yield lambda event: wait_until(lambda: has_come(event), what=repr(event))
    finally:  # or the context would never end
        router.disable_monitor()
        monitor.close()


def key_files(place: Path, *names: str) -> dict[str, str]:
    """Key pairs on disk; the secret files by name."""
    return {name: str(KeyPair.make().save(place / "keys", name)[0]) for name in names}


def write_roster(path: Path, entries: dict[str, tuple[str, str]], proxy: tuple[str, str] | None = None) -> str:
    """A roster file of (address, key) by name."""
    text = "".join(f'[nodes.{name}]\naddress = "{where}"\nkey = "{key}"\n' for name, (where, key) in entries.items())
    if proxy is not None:
        text += f'[proxy]\naddress = "{proxy[0]}"\nkey = "{proxy[1]}"\n'
    path.write_text(text)
    path.chmod(0o644)
    return str(settled(path))


def settled(path: Path) -> Path:
    """Nobody takes this file for one that is being written."""
    then = time.time_ns() - 10**9
    os.utime(path, ns=(then, then))
    return path
