"""Questions that `pdx up` asks a starting process: does it answer yet?"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable

from pdx.client import connect
from pdx.errors import NodeUnavailable

ANSWER_S = 1.0
# An engine listens on this host: a proxy from the environment must not be asked for it.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers_health(url: str) -> Callable[[], bool]:
    """Does an HTTP server at `url` say that it is healthy?"""

    def ask() -> bool:
        try:
            with _direct.open(f"{url}/health", timeout=ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    return ask


def answers_at(address: str) -> Callable[[], bool]:
    """Does a node at `address` let this process attach?"""

    def ask() -> bool:
        try:
            connect(address, timeout_s=ANSWER_S).close()
        except NodeUnavailable:
            return False
        return True

    return ask
