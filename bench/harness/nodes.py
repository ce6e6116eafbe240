"""Two nodes on this host that know each other, for the benches of pushes."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdx.client.api import Node, connect
from pdx.config import NodeConfig
from pdx.node.start import start
from pdx.testing.waiting import wait_until
from pdx.transports.registry import find

ATTACH_S = 20.0
LINK_S = 10.0
TO = "b"  # the name of the node that is pushed to


def why_not(scheme: str) -> str:
    """Why this channel does not work here; empty if it does."""
    found = find(scheme).availability()
    return "" if found.is_ok else found.why


@contextlib.contextmanager
def node_pair(scheme: str, arena_bytes: int, **settings: Any) -> Iterator[tuple[Node, Node]]:
    """A node and its peer `TO`, linked over `scheme`; both end with this context."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdx-bench-")))
        roster = folder / "roster.toml"
        lines = [f'[nodes.{name}]\naddress = "ipc://{folder}/{name}.sock.peers"' for name in ("a", TO)]
        roster.write_text("\n".join(lines))
        roster.chmod(0o600)
        configs = [
            NodeConfig(
                address=f"ipc://{folder}/{name}.sock",
                name=name,
                arena_bytes=arena_bytes,
                channels=[scheme],
                roster=str(roster),
                **settings,
            )
            for name in ("a", TO)
        ]
        for config in configs:
            stack.callback(end, start(config))
        a, b = (stack.enter_context(connect(config.address, ATTACH_S)) for config in configs)
        _warm(a, b, scheme)
        yield a, b


def _warm(a: Node, b: Node, scheme: str) -> None:
    """The first push connects."""
    with a.reserve("warm", 1 << 20, push_to=TO) as chunk:
        chunk.seal()
    wait_until(lambda: b.lookup(["warm"]) == 1, f"a first push over {scheme}: {a.status().peers}", LINK_S)
    for node in (a, b):
        node.delete("warm")


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a node."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
