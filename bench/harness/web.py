"""Servers on this host: run until a signal, and queried without any proxy set in the environment."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Mapping

from aiohttp import web

from pdx.proxy.server import Server, endpoint, when_signalled
from pdx.telemetry.env import Env

ANSWER_S = 300.0
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float = ANSWER_S) -> bytes:
    """The body at `url`. :raises OSError: no answer, or an error."""
    with direct.open(url, timeout=timeout_s) as response:
        body: bytes = response.read()
        return body


def get_or_none(url: str) -> bytes | None:
    """A proxy's answer at `url`; None: it does not know (404)."""
    try:
        return get(url)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise


async def serve_until_stopped(apps: Mapping[int, web.Application], *, shutdown_s: float) -> None:
    """Serve each app on its port of this host until SIGINT or SIGTERM; requests in progress then have `shutdown_s`.

    :raises ConfigError: a port is unavailable.
    """
    servers = {port: Server(app, Env(), shutdown_s=shutdown_s) for port, app in apps.items()}
    stop = asyncio.Event()
    when_signalled(stop.set)
    try:
        for port, server in servers.items():
            await server.start(endpoint("127.0.0.1", port))
        await stop.wait()
    finally:
        for server in servers.values():
            await server.close()
