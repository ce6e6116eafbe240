"""Two nodes that are each other's peers, and a transfer from one to the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toy_engine import BLOCK, CHUNK, decode_of, prefill_of

from pdx.config import NodeConfig, listen_address
from pdx.testing.waiting import wait_until

TRANSFER = "x" * 20
PREFILL = prefill_of(TRANSFER, decode_node="two")
DECODE = decode_of(TRANSFER, prefill_node="one")
LENGTH = 2 * CHUNK + BLOCK + 1  # two chunks and a tail


def two_nodes(start: Callable[..., Any], place: Path, **settings: Any) -> list[Any]:
    """Each other's peers over tcp, once each has reached the other. A stall of the machine is no silence of a peer: it
    would lose a push."""
    roster = place / "roster.toml"
    named = {name: f"ipc://{place}/{name}.sock" for name in ("one", "two")}
    lines = [
        f'[nodes.{name}]\naddress = "{listen_address(NodeConfig(address=address, name=name))}"\n'
        for name, address in named.items()
    ]
    roster.write_text("".join(lines))
    roster.chmod(0o600)
    shared = {"roster": str(roster), "channels": ["tcp"], "peer_timeout_s": 60.0, **settings}
    nodes = [start(address=address, name=name, **shared) for name, address in named.items()]
    for node in nodes:
        wait_until(lambda node=node: [peer.state for peer in node.status().peers] == ["ready"], what="they are peers")
    return nodes
