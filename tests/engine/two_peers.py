"""Two nodes that are each other's peers, as the tests of engines at them want them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from node_harness import NodeProcess

from pdx.config import NodeConfig, listen_address


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


def are_at_rest(nodes: Iterable[NodeProcess]) -> bool:
    """Nothing is under way, and nobody holds anything."""
    found = [node.status() for node in nodes]
    peers = [peer for status in found for peer in status.peers]
    held = any(status.leases or status.transfers or set(status.chunks) - {"sealed"} for status in found)
    return not held and not any(peer.pushes or peer.landing for peer in peers)
