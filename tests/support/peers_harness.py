"""Several real nodes that know each other by a roster file, each with a client of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from node_harness import MIB, NodeProcess, NodeThread

import pdx
from pdx.config import NodeConfig
from pdx.errors import PdxError
from pdx.testing.waiting import wait_until
from pdx.transports.registry import find
from pdx.wire.status import COUNTING

ARENA = 16 * MIB


def why_not(scheme: str) -> str:
    """Why this channel cannot be used here, empty if it can."""
    try:
        found = find(scheme).availability()
    except PdxError as error:
        return str(error)
    return "" if found.is_ok else found.why


class Cluster:
    """Nodes `names`, all with the same settings; `of_one` says what is different at one of them."""

    def __init__(
        self, place: Path, names: Sequence[str], *, of_one: dict[str, dict[str, Any]] | None = None, **settings: Any
    ):
        self._place = place
        self.names = names
        self._settings = {"arena_bytes": ARENA, "report_s": 0.2, "peer_timeout_s": 20.0, **settings}
        self._of_one = of_one or {}
        self._stack = contextlib.ExitStack()
        self.nodes: dict[str, NodeProcess] = {}
        self.clients: dict[str, pdx.Node] = {}
        roster = place / "roster.toml"
        roster.write_text("".join(f'[nodes.{name}]\naddress = "{self.address(name)}.peers"\n' for name in names))
        roster.chmod(0o600)
        self._roster = str(roster)

    def address(self, name: str) -> str:
        """Where processes attach to this node."""
        return f"ipc://{self._place}/{name}.sock"

    def start(self, *names: str) -> None:
        """Start these nodes, also again, and attach to them."""
        for name in names:
            settings = {"roster": self._roster, **self._settings, **self._of_one.get(name, {})}
            config = NodeConfig(address=self.address(name), name=name, **settings)
            self.nodes[name] = self.node(name, config)
        for name in names:
            self.nodes[name].wait_ready()
            status = self.attach(name).status
            wait_until(lambda status=status: COUNTING not in {tier.state for tier in status().tiers}, what="counted")

    def node(self, name: str, config: NodeConfig) -> NodeProcess:
        """A process that is this node."""
        return NodeProcess(config)

    def attach(self, name: str) -> pdx.Node:
        """A client of this process, also in the place of one whose node was killed."""
        if name in self.clients:
            self.clients[name].close()
        self.clients[name] = pdx.connect(self.address(name), timeout_s=20.0)
        return self.clients[name]

    def __getitem__(self, name: str) -> pdx.Node:
        return self.clients[name]

    def counter(self, name: str, counter: str) -> int:
        """A counter of a node."""
        return self.clients[name].status().counters.get(counter, 0)

    def peer(self, name: str, of: str) -> Any:
        """What a node says of one of its peers."""
        return next((peer for peer in self.clients[name].status().peers if peer.name == of), None)

    def is_quiet(self, name: str) -> bool:
        """Whether no push from or to this node is left and every chunk is sealed."""
        status = self.clients[name].status()
        moving = sum(peer.pushes + peer.landing for peer in status.peers)
        return not moving and set(status.chunks) <= {"sealed"} and not status.transfers

    def settle(self, *names: str, timeout_s: float = 5.0) -> None:
        """Everything has come to an end there; all room is free once the chunks are deleted."""
        for name in names or self.clients:
            wait_until(lambda name=name: self.is_quiet(name), timeout_s=timeout_s, what=f"{name} has settled")

    def close(self) -> None:
        """End the nodes, whatever state they are in."""
        for client in self.clients.values():
            client.close()
        for node in self.nodes.values():
            node.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LocalCluster(Cluster):
    """All nodes in this process: for what needs no death of one, and no library that must not be in a process twice."""

    def node(self, name: str, config: NodeConfig) -> Any:
        """A thread that is this node."""
        return NodeThread(config)


def put(node: pdx.Node, name: str, data: bytes, **settings: Any) -> None:
    """A sealed chunk."""
    with node.reserve(name, len(data), **settings) as chunk:
        chunk.view[:] = data
        chunk.seal()


def read(node: pdx.Node, name: str, **settings: Any) -> bytes:
    """A chunk's bytes."""
    with node.get(name, **settings) as chunk:
        data = bytes(chunk.view)
        chunk.check()
        return data


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that differ at every place and from those of other seeds."""
    word = (seed * 2_654_435_761 % (1 << 32)).to_bytes(4, "little")
    return b"".join((n.to_bytes(4, "little") + word) for n in range(-(-nbytes // 8)))[:nbytes]


@contextlib.contextmanager
def disk_pair(
    place: Path, names: Sequence[str] = "ab", *, of_one: dict[str, dict[str, Any]] | None = None, **settings: Any
) -> Iterator[Cluster]:
    """Two nodes with a disk each, which store what they are told to; they know each other, and tiers are up."""
    own = {name: {"disks": [str(place / f"disk-{name}")], **(of_one or {}).get(name, {})} for name in names}
    with Cluster(place, names, of_one=own, store="write-back", store_window=1e-9, **settings) as cluster:
        cluster.start(*names)
        tiers = lambda: [tier for name in names for tier in cluster[name].status().tiers]  # noqa: E731
        wait_until(lambda: all(tier.is_up for tier in tiers()), what="tiers are up")
        wait_until(lambda: cluster.peer(*names).state == "ready", what="they know each other")
        yield cluster
