"""Questions that `pdx up` asks a starting process: does it answer yet?"""

from __future__ import annotations

import contextlib
import http.client
import urllib.request
from collections.abc import Callable

import msgspec

from pdx.client.api import connect
from pdx.errors import NodeError, NodeUnavailable

ANSWER_S = 1.0
# An engine listens on this host: a proxy from the environment must not be asked for it.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers_health(url: str) -> Callable[[], bool]:
    """Does an HTTP server at `url` say that it is healthy?"""
    return lambda: _health(url) is not None


def knows_nodes(url: str, count: int) -> Callable[[], bool]:
    """Is the proxy at `url` healthy, and have so many nodes reported to it? Before, it cannot name them to engines."""

    def ask() -> bool:
        body = _health(url)
        try:
            return body is not None and msgspec.json.decode(body, type=_ProxyHealth).nodes >= count
        except msgspec.DecodeError:
            return False  # another server has the port; ours ends, and says so

    return ask


class _ProxyHealth(msgspec.Struct):
    nodes: int


def _health(url: str) -> bytes | None:
    try:
        with _direct.open(f"{url}/health", timeout=ANSWER_S) as answer:
            return bytes(answer.read()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None


def answers_at(address: str) -> Callable[[], bool]:
    """Does a node at `address` let this process attach?"""

    def ask() -> bool:
        with contextlib.suppress(NodeUnavailable), connect(address, timeout_s=ANSWER_S):
            return True
        return False

    return ask


def attached_urls(address: str) -> set[str]:
    """The URLs of the engines that are attached to the node at `address`; none where it does not answer."""
    try:
        with connect(address, timeout_s=ANSWER_S) as node:
            return {one.url for one in node.status().attached if one.kind == "scheduler"}
    except NodeError:
        return set()
