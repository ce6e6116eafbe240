"""An HTTP server that is a whole process: it serves on this host until it is told to stop."""

from __future__ import annotations

import asyncio
import signal

from aiohttp import web

SHUTDOWN_S = 2.0  # for requests under way


async def serve_until_stopped(app: web.Application, port: int) -> None:
    """Until SIGINT or SIGTERM. A client that goes away cancels its request's task: that is what closes its legs.

    :raises OSError: the port cannot be had.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()
