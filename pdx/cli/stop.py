"""`pdx node --stop`: ends the node at an address in an orderly way, and says what it took away."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence

from pdx.cli.status import size, without_self
from pdx.client.connection import Connection
from pdx.config import socket_path
from pdx.errors import NodeError, NodeUnavailable
from pdx.wire.messages import VERSION, AttachedStatus, Hello, NodeStatus, Status

PATIENCE_S = 30.0
ANSWER_S = 5.0


def stop(address: str, *, force: bool, patience_s: float = PATIENCE_S) -> str:
    """End the node at `address`, and wait until its process, its socket and its arena are gone; says what was ended.

    `force`: also where engines are attached, which go on without PDX.

    :raises NodeUnavailable: no node answers there.
    :raises NodeError: engines are attached, or it does not end.
    """
    with Connection(address, Hello(VERSION, os.getpid(), "client", name="pdx node --stop")) as node:
        if not node.attach(ANSWER_S):
            raise NodeUnavailable(f"no node answers at {address} within {ANSWER_S:g} s")
        answer = node.call(Status(), ANSWER_S)
        assert isinstance(answer, NodeStatus)
        status, arena = without_self(answer), node.arena.path
        engines = [one for one in status.attached if one.kind != "client"]
        if engines and not force:
            raise NodeError(
                f"engines are attached to the node at {address}: {_listed(engines)}; --force ends it anyway"
            )
        pidfd = os.pidfd_open(status.pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], patience_s)[0]:
            raise NodeError(f"process {status.pid} has not ended within {patience_s:g} s; see its log, or kill it")
    finally:
        os.close(pidfd)
    left = [str(path) for path in (socket_path(address), arena) if path.exists()]
    if left:
        raise NodeError(f"process {status.pid} ended and left {' and '.join(left)} behind")
    held = f"{size(status.arena_bytes)} of memory and {sum(status.chunks.values()):,} chunks"
    others = f"; still attached were {_listed(status.attached)}" if status.attached else ""
    return f"the node at {address} (process {status.pid}) has ended, with {held}{others}"


def _listed(attached: Sequence[AttachedStatus]) -> str:
    """Up to eight of them by name."""
    names = [f"{one.kind} {one.engine[:8] or one.name} (process {one.pid})" for one in attached]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
