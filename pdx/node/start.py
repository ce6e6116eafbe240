"""Starts this host's node. Engines may race to do so: the lock beside the socket lets one node win."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from pdx.config import NodeConfig, private_folder, socket_path


def start(config: NodeConfig) -> subprocess.Popen[bytes]:
    """Start a node as a child process in a session of its own; do not wait until it serves.

    If another node owns the address already, the new one says so in its log (`….log` beside the socket) and ends.
    """
    return _spawn(config)


def start_detached(config: NodeConfig) -> None:
    """Start a node as an orphan, which outlives this process even if that ends with its whole process tree, as vLLM's
    do. Waits until the node is detached, not until it serves.
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
