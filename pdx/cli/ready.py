"""Questions that `pdx up` asks a starting process: does it answer yet?"""

from __future__ import annotations

import http.client

import msgspec

from pdx.client.connection import attached
from pdx.client.http_call import call
from pdx.errors import NodeError, NodeUnavailable
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import Status

ANSWER_S = 1.0


def answers(where: str, num_nodes: int = 0) -> bool:
    """Whether the node at an ipc:// address lets this process attach, or the HTTP server at a URL says that it is
    healthy; one of a proxy, that so many nodes have reported to it: before, it cannot name them to engines."""
    try:
        if where.startswith("ipc://"):
            attached(where, ANSWER_S).close()
            return True
        status, body = call(where, "/health", timeout_s=ANSWER_S)
        told = msgspec.json.decode(body) if num_nodes else None
    except (NodeUnavailable, OSError, http.client.HTTPException, ValueError):
        return False
    is_known = not num_nodes or (
        isinstance(told, dict) and isinstance(count := told.get("nodes"), int) and count >= num_nodes
    )
    return status == 200 and is_known  # another server may have the port: ours ends then, and says so


def attached_urls(address: str) -> set[str]:
    """The URLs of the engines that are attached to the node at `address`; none where it does not answer."""
    try:
        with attached(address, ANSWER_S) as node:
            told = node.call_for(Status(), ANSWER_S, NodeStatus).attached
    except NodeError:
        return set()
    return {one.url for one in told if one.kind == "scheduler"}
