"""Two nodes that are each other's peers, as the tests of engines at them want them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from node_harness import NodeProcess, NodeThread

from pdx.config import NodeConfig, listen_address
from pdx.testing.waiting import wait_until


def settings_of_peers(place: Path, **common: Any) -> list[dict[str, Any]]:
    """Of the nodes "one" and "two", over tcp. A stall of the machine is no silence of a peer: it would lose a push."""
    roster = place / "roster.toml"
    named = {name: f"ipc://{place}/{name}.sock" for name in ("one", "two")}
    lines = [
        f'[nodes.{name}]\naddress = "{listen_address(NodeConfig(address=address, name=name))}"\n'
        for name, address in named.items()
    ]
    roster.write_text("".join(lines))
    roster.chmod(0o600)
    shared = {"roster": str(roster), "channels": ["tcp"], "peer_timeout_s": 60.0, **common}
    return [{"address": address, "name": name, **shared} for name, address in named.items()]


def two_nodes(start: Callable[..., Any], place: Path, **common: Any) -> list[Any]:
    """Both, once each has reached the other."""
    nodes = [start(**settings) for settings in settings_of_peers(place, **common)]
    for node in nodes:
        wait_until(lambda node=node: [peer.state for peer in node.status().peers] == ["ready"], what="they are peers")
    return nodes


def are_at_rest(nodes: Iterable[NodeProcess | NodeThread]) -> bool:
    """Nothing is under way, and nobody holds anything."""
    found = [node.status() for node in nodes]
    peers = [peer for status in found for peer in status.peers]
    held = any(status.leases or status.transfers or set(status.chunks) - {"sealed"} for status in found)
    return not held and not any(peer.pushes or peer.landing for peer in peers)
