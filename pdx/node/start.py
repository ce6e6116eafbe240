"""Start this host's node. Engines that come together may all try: the lock beside the socket lets one win."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from pdx.config import NodeConfig, private_folder, socket_path


def start(config: NodeConfig) -> subprocess.Popen[bytes]:
    """Start a node that outlives this process; does not wait until it serves.

    Where another node owns the address already, the new one says so in its log (`….log` beside the socket) and ends.
    """
    path = socket_path(config.address)
    private_folder(path.parent)
    with open(f"{path}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pdx.node", msgspec.json.encode(config).decode()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
