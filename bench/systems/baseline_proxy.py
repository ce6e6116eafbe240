"""The small proxy that the connectors of vLLM need in front of engines: `python -m pdx.bench.systems.baseline_proxy`.

vLLM's examples are in its repository and not in its wheel; this one says the same things to the engines, and is meant
to cost no more than PDX's own: connections are kept, the decode engine's bytes are passed on as they come. The decode
leg follows the prefill leg and gets what that one returned. As with vLLM's examples, the
decode engine samples the first token that a client sees.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from pdx.bench.harness.web import serve_until_stopped

KEPT = 1000  # requests of which the moments are kept
KEEPALIVE_S = 2.0  # below the 5 s after which vLLM's server closes an idle connection under our request
CONNECT_S = 5.0
SHUTDOWN_S = 2.0  # for requests under way
BODY_BYTES = 64 << 20
PATH = "/v1/completions"
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One client's request while it is served, and when things happened to it (ms of CLOCK_MONOTONIC)."""

    request: web.Request
    body: Body
    id: str
    moments: dict[str, float] = field(default_factory=dict)

    def mark(self, moment: str) -> None:
        self.moments[moment] = time.monotonic_ns() / 1e6


class LegFailed(Exception):
    """An engine refused or went away; `status` and `text` are what the client is to be told."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text[:200]}")
        self.status = status
        self.text = text


class Proxy:
    """One prefill and one decode engine as one server. All of it runs on one event loop."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._urls = {"prefill": prefill, "decode": decode}
        self._kept: dict[str, dict[str, float]] = {}
        self._session: Any = None

    def app(self) -> web.Application:
        """The web application; it opens and closes this proxy's connections with itself."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post(PATH, self._generate)
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
        ) as self._session:
            yield

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(await request.read(), type=Body)
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=f"the request is not a JSON object: {error}")
        exchange = Exchange(request, body, request.headers.get("X-Request-Id") or uuid.uuid4().hex)
        exchange.mark("received")
        self._kept[exchange.id] = exchange.moments
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        try:
            return await self._serve(exchange)
        except LegFailed as failed:
            return web.Response(status=failed.status, text=failed.text)

    async def _serve(self, exchange: Exchange) -> web.StreamResponse:
        raw = await self._prefill(exchange, {"do_remote_decode": True, "do_remote_prefill": False})
        try:
            returned = msgspec.json.decode(raw, type=_PrefillAnswer).kv_transfer_params
        except msgspec.DecodeError as error:
            raise LegFailed(502, f"the prefill engine's answer is not one: {error}") from error
        if not returned:
            raise LegFailed(502, "the prefill engine returned no kv_transfer_params: has it a connector?")
        return await self._decode(exchange, returned)

    async def _prefill(self, exchange: Exchange, params: Body) -> bytes:
        """The whole answer of the prefill leg. :raises LegFailed: there is none."""
        body = {**exchange.body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
        for name in ("stream_options", "min_tokens"):
            body.pop(name, None)
        exchange.mark("prefill_sent")
        try:
            async with await self._ask("prefill", exchange, body) as answer:
                raw: bytes = await answer.read()
        except aiohttp.ClientError as error:
            raise LegFailed(502, f"the prefill engine broke off: {error!r}") from error
        exchange.mark("prefill_answered")
        return raw

    async def _decode(self, exchange: Exchange, params: Body) -> web.StreamResponse:
        """The decode leg's answer, passed on. :raises LegFailed: it failed before its first byte."""
        exchange.mark("decode_sent")
        async with await self._ask("decode", exchange, {**exchange.body, "kv_transfer_params": params}) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "")})
            response.headers["X-Request-Id"] = exchange.id
            try:
                chunk = await answer.content.readany()
                exchange.mark("decode_first")
                await response.prepare(exchange.request)
                while chunk:
                    await response.write(chunk)
                    chunk = await answer.content.readany()
            except aiohttp.ClientError as error:
                if not response.prepared:
                    raise LegFailed(502, f"the decode engine broke off: {error!r}") from error
                # Too late for an error: a connection that breaks is what the client can still be told.
                if exchange.request.transport is not None:
                    exchange.request.transport.abort()
                return response
            exchange.mark("done")
            await response.write_eof()
            return response

    async def _ask(self, role: str, exchange: Exchange, body: Body) -> aiohttp.ClientResponse:
        """An engine's answer; closing it early closes its connection, upon which vLLM aborts the request.

        :raises LegFailed: there is none, or it is a refusal.
        """
        payload, headers = msgspec.json.encode(body), {"X-Request-Id": exchange.id}
        try:
            answer: aiohttp.ClientResponse = await self._session.post(
                self._urls[role] + PATH, data=payload, headers=headers
            )
            if answer.status != 200:
                async with answer:
                    raise LegFailed(answer.status, await answer.text())
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(502, f"the {role} engine at {self._urls[role]} did not answer: {error!r}") from error
        return answer

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _moments(self, request: web.Request) -> web.Response:
        found = self._kept.get(request.match_info["id"])
        if found is None:
            return web.Response(status=404, text=f"no such request among the last {KEPT}")
        return web.json_response(found)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Body | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--port", required=True, type=int)
    options = parser.parse_args()
    proxy = Proxy(options.prefill, options.decode)
    try:
        asyncio.run(serve_until_stopped(proxy.app(), "127.0.0.1", options.port, shutdown_s=SHUTDOWN_S))
    except OSError as error:
        sys.exit(f"baseline proxy: {error}")


if __name__ == "__main__":
    main()
