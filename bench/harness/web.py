"""Servers on this host, asked without the proxy that an environment may name."""

from __future__ import annotations

import urllib.error
import urllib.request

ANSWER_S = 300.0
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float = ANSWER_S) -> bytes:
    """The body at `url`.

    :raises OSError: no answer, or an error.
    """
    with direct.open(url, timeout=timeout_s) as response:
        body: bytes = response.read()
        return body


def known(url: str) -> bytes | None:
    """What a proxy says at `url`; None: it does not know (404)."""
    try:
        return get(url)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise
