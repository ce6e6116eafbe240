"""Start this host's node. Engines that come together may all try: the lock beside the socket lets one win."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from pdx.config import NodeConfig, private_folder, socket_path


def start(config: NodeConfig) -> subprocess.Popen[bytes]:
    """Start a node as a child in a session of its own; does not wait until it serves.

    Where another node owns the address already, the new one says so in its log (`….log` beside the socket) and ends.
    """
    return _spawn(config)


def start_detached(config: NodeConfig) -> None:
    """Start a node that is nobody's child: it outlives this process also where that one ends with its whole tree,
    as vLLM's do. Waits until the node is on its own, not until it serves.
    """
    _spawn(config, "--detach").wait()


def _spawn(config: NodeConfig, *flags: str) -> subprocess.Popen[bytes]:
    path = socket_path(config.address)
    private_folder(path.parent)
    with open(f"{path}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "pdx.node", msgspec.json.encode(config).decode(), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
