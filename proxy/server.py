"""An HTTP server that is a whole process: it serves until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal

from aiohttp import web

log = logging.getLogger(__name__)


async def serve_until_stopped(app: web.Application, host: str, port: int, *, shutdown_s: float) -> None:
    """Until SIGINT or SIGTERM; then requests under way have `shutdown_s` before they are cancelled.

    A client that goes away cancels its request's task: that is what closes its legs.

    :raises OSError: the address cannot be had.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        log.info("listening on %s", ", ".join(f"http://{at[0]}:{at[1]}" for at in runner.addresses))
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()
