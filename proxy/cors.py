"""Cross-origin requests of browsers: which web pages may read what this server answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from aiohttp import web

from pdx.proxy import fault

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_METHODS = "GET, POST, OPTIONS"
_KEPT_S = "600"  # a browser asks again after this time


class Origins:
    """The origins whose pages are let in; `*` means every page."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)

    def install(self, app: web.Application) -> None:
        """Answer for this application; without any origin nothing changes."""
        if self._allowed:
            app.middlewares.append(self._preflight)
            app.on_response_prepare.append(self._permit)

    @web.middleware
    async def _preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return await handler(request)
        if not self._allows(request):
            return fault.response(403, "pages of this origin are not let in")
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _KEPT_S}
        asked = request.headers.get("Access-Control-Request-Headers")
        if asked:
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    async def _permit(self, request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in self._allowed:
            response.headers.add("Vary", "Origin")
        if self._allows(request):
            every = "*" in self._allowed
            response.headers["Access-Control-Allow-Origin"] = "*" if every else request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and ("*" in self._allowed or origin in self._allowed)
