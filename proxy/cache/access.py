"""Who may use the admin address and its verbs: whoever presents the token, or without one, whoever reaches a Unix
socket of this user.

Every user of the host, and pages in their browsers, can reach a loopback address, so verbs require the token there,
too.
"""

from __future__ import annotations

import math
import re
import socket
from collections import OrderedDict

from aiohttp import web

from pdx.errors import ConfigError, RequestRefused
from pdx.proxy.reply import Handler, error_response
from pdx.security.address import is_ip, is_loopback
from pdx.security.secret_file import Token
from pdx.telemetry.env import Env
from pdx.telemetry.recent import remember

MAX_FAILED = 32  # per address, within …
WINDOW_S = 10.0
_MAX_ADDRESSES = 1024
_PORT = re.compile(r":\d*$")


@web.middleware
async def refuse_strange_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """At a loopback address, accept only requests that name this host, an IP address, or no host, as HTTP/1.0 probes
    do. A foreign page can make its own name resolve to loopback (DNS rebinding), and a browser on this host would let
    it read everything that is available without a token."""
    where = request.transport.get_extra_info("sockname") if request.transport is not None else None
    name = _PORT.sub("", request.headers.get("Host", "localhost").lower()).strip("[]").removesuffix(".")
    is_own = is_ip(name) or f".{name}".endswith(".localhost") or name == socket.gethostname().lower()
    if isinstance(where, tuple) and is_loopback(where[0]) and not is_own:
        return error_response(403, f"this address is this host's alone: ask for localhost, and not {name!r:.80}")
    return await handler(request)


class Access:
    """Checks requests. `counters` counts refusals as `controllers_denied`."""

    def __init__(self, token_file: str, env: Env) -> None:
        """`token_file`: empty if there is none. :raises ConfigError: see `Token`."""
        self._token = Token(token_file) if token_file else None
        self._counters = env.counters
        self._faults = env.faults
        self._clock = env.clock
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()  # by address: since when, and how many

    def check(self, request: web.Request, *, reads: bool = False) -> None:
        """Check a request before any of its body is read. `reads`: it is not a verb; without a token, anyone may send
        it.

        After MAX_FAILED wrong tokens within WINDOW_S, their source address is rejected until the window ends, whatever
        it presents. A Unix socket has no address: only this user reaches it.

        :raises RequestRefused: the request may not use verbs.
        """
        if reads and self._token is None:
            return
        address = request.remote or ""
        try:
            self._check(address, request.headers.get("Authorization", ""), is_unix=_is_unix(request))
        except RequestRefused as refusal:
            self._counters["controllers_denied"] += 1
            text = f"a request from {address or 'a Unix socket'} was refused: {refusal}"
            self._faults.warn(f"controllers_denied {refusal.status}", text)
            raise

    def _check(self, address: str, header: str, *, is_unix: bool) -> None:
        if self._token is None:
            if not is_unix:
                raise RequestRefused(
                    403,
                    "every user of this host reaches this address, so verbs need a token here: start the proxy with "
                    "--cache-token-file, or with --admin /path/of/a/socket",
                )
            return
        since, failed = self._failed.get(address, (0.0, 0))
        left_s = since + WINDOW_S - self._clock()
        if not is_unix and failed >= MAX_FAILED and left_s > 0:
            text = f"{failed} wrong tokens came from this address within {WINDOW_S:g} s"
            raise RequestRefused(429, text, retry_after_s=math.ceil(left_s))
        scheme, _, token = header.partition(" ")
        try:
            if scheme.lower() == "bearer" and self._token.is_shown(token.strip()):
                return
        except ConfigError as error:
            self._faults.warn("cache_token_file", f"nobody may say verbs: {error}")
            raise RequestRefused(503, "the proxy's token file cannot be used; see its log") from error
        self._fail(address)
        text = "the token is wrong" if header else "a token is needed: Authorization: Bearer TOKEN"
        raise RequestRefused(401, text)

    def _fail(self, address: str) -> None:
        now = self._clock()
        since, failed = self._failed.get(address, (now, 0))
        told = (since, failed + 1) if now < since + WINDOW_S else (now, 1)
        remember(self._failed, address, told, _MAX_ADDRESSES)


def _is_unix(request: web.Request) -> bool:
    """Whether it came through a Unix socket, which `pdx.proxy.server` makes accessible only to this user."""
    transport = request.transport
    socket = transport.get_extra_info("socket") if transport is not None else None
    return socket is not None and socket.family.name == "AF_UNIX"
