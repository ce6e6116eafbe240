"""The small proxy that vLLM's connectors need in front of engines: `python -m pdx.bench.systems.baseline_proxy`.

vLLM's example proxies are in its repository but not in its wheel. This one sends the same requests to the engines, and
is meant to cost no more than PDX's own: it keeps connections open and passes the decode engine's bytes on as they come.
The decode leg follows the prefill leg and gets the `kv_transfer_params` that the prefill leg returned. As in vLLM's
examples, the decode engine samples the first token that a client sees. `/moments/ID` has the moments of a request, in
ms of CLOCK_MONOTONIC. If a leg fails, the client gets an error (500) or its connection breaks.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from pdx.bench.harness.web import serve_until_stopped

KEPT = 1000  # requests whose moments are kept
KEEPALIVE_S = 2.0  # below the 5 s after which vLLM's server closes an idle connection under our request
CONNECT_S = 5.0
SHUTDOWN_S = 2.0  # for requests in flight
BODY_BYTES = 64 << 20
PATH = "/v1/completions"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Proxy:
    """Presents one prefill and one decode engine as one server. Runs on one event loop."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode
        self._kept: dict[str, dict[str, float]] = {}
        self._session: Any = None

    def app(self) -> web.Application:
        """The web application; this proxy's connections open when it starts and close when it ends."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post(PATH, self._serve)
        app.router.add_get("/health", self._health)
        app.router.add_get("/moments/{id}", self._moments)
        app.cleanup_ctx.append(self._connections)
        return app

    async def _connections(self, app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            raise_for_status=True,
        ) as self._session:
            yield

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        name, moments = request.headers.get("X-Request-Id") or uuid.uuid4().hex, dict[str, float]()

        def mark(moment: str) -> None:
            moments[moment] = time.monotonic_ns() / 1e6

        mark("received")
        self._kept[name] = moments
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        body = msgspec.json.decode(await request.read(), type=dict[str, Any])
        first = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
        first |= {"stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL}
        mark("prefill_sent")
        async with self._ask(self._prefill, name, first) as answer:
            returned = msgspec.json.decode(await answer.read())["kv_transfer_params"]
        mark("prefill_answered")
        mark("decode_sent")
        async with self._ask(self._decode, name, {**body, "kv_transfer_params": returned}) as answer:
            response = web.StreamResponse(
                headers={"Content-Type": answer.headers["Content-Type"], "X-Request-Id": name}
            )
            chunk = await answer.content.readany()
            mark("decode_first")
            await response.prepare(request)
            while chunk:
                await response.write(chunk)
                chunk = await answer.content.readany()
        mark("done")
        await response.write_eof()
        return response

    def _ask(self, engine: str, name: str, body: dict[str, Any]) -> Any:
        """Send one leg. Closing the answer early closes its connection, and vLLM then aborts the request."""
        return self._session.post(engine + PATH, data=msgspec.json.encode(body), headers={"X-Request-Id": name})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _moments(self, request: web.Request) -> web.Response:
        found = self._kept.get(request.match_info["id"])
        return web.json_response(found, status=404 if found is None else 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--port", required=True, type=int)
    options = parser.parse_args()
    app = Proxy(options.prefill, options.decode).app()
    try:
        asyncio.run(serve_until_stopped({options.port: app}, shutdown_s=SHUTDOWN_S))
    except OSError as error:
        sys.exit(f"baseline proxy: {error}")


if __name__ == "__main__":
    main()
