"""Ports for servers that are about to start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now. All are held until all are known, so no two are the same."""
    with ExitStack() as held:
        found: list[int] = []
        for port in (*_candidates(), *[0] * count):  # 0: whichever is free
            listener = held.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(listener.getsockname()[1])
            if len(found) == count:
                break
        return found


def _candidates() -> list[int]:
    """Ports that the kernel gives to nobody who does not ask for them: servers bind theirs only after their imports."""
    lowest = int(EPHEMERAL.read_text().split()[0])
    ports = range(max(1024, lowest - 12_000), lowest)
    return random.sample(ports, min(100, len(ports)))
