"""What whoever runs the proxy can read over HTTP: metrics, and timelines of all clients' requests."""

from __future__ import annotations

import msgspec
from aiohttp import web

from pdx.proxy.metrics import Metrics
from pdx.proxy.reply import error_response
from pdx.proxy.timelines import Timelines


class Telling:
    """The routes that change nothing."""

    def __init__(self, metrics: Metrics, timelines: Timelines) -> None:
        self._metrics = metrics
        self._timelines = timelines

    def install(self, app: web.Application) -> None:
        """Serve them there."""
        app.router.add_get("/metrics", self._expose)
        app.router.add_get("/pdx/requests", self._requests)
        app.router.add_get("/pdx/requests/{transfer}", self._request)

    async def _expose(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.expose(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _requests(self, _request: web.Request) -> web.Response:
        listed = msgspec.json.encode({"requests": self._timelines.view()})
        return web.Response(body=listed, content_type="application/json")

    async def _request(self, request: web.Request) -> web.Response:
        found = self._timelines.find(request.match_info["transfer"])
        if found is None:
            return error_response(404, "no such transfer (any more)")
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")
