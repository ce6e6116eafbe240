"""The small proxy that the connectors of vLLM need in front of engines: `python -m pdx.bench.systems.baseline_proxy`.

vLLM's examples are in its repository and not in its wheel; this one says the same things to the engines, and is meant
to cost no more than PDX's own: connections are kept, the decode engine's bytes are passed on as they come. `pull`,
`push`: the decode leg follows the prefill leg and gets what that one returned (`push`: but for its blocks). `mooncake`:
both legs at once, joined by a transfer id. As with vLLM's examples, the decode engine samples the first token that a
client sees.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
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
PATHS = ("/v1/completions", "/v1/chat/completions")
Body = dict[str, Any]
Moments = dict[str, float]


class Mode(StrEnum):
    """How the prefill engine's blocks get to the decode engine."""

    PULL = "pull"
    PUSH = "push"
    MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True)
class Peer:
    """The prefill engine as Mooncake's decode engine knows it. `address`: its bootstrap server's URL."""

    engine_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """One client's request while it is served."""

    request: web.Request
    body: Body
    headers: dict[str, str]
    moments: Moments

    @property
    def id(self) -> str:
        """What both engines know the request by."""
        return self.headers["X-Request-Id"]

    def mark(self, moment: str) -> None:
        """It happens now."""
        self.moments[moment] = time.monotonic_ns() / 1e6


class LegFailed(Exception):
    """An engine refused or went away; `status` and `body` are what the client is to be told."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"{status} {body[:200]!r}")
        self.status = status
        self.body = body
        self.content_type = content_type

    def response(self) -> web.Response:
        """The client's answer."""
        return web.Response(status=self.status, body=self.body, content_type=self.content_type)


class Proxy:
    """One prefill and one decode engine as one server. All of it runs on one event loop."""

    def __init__(self, mode: Mode, prefill: str, decode: str, peer: Peer | None = None) -> None:
        if mode is Mode.MOONCAKE and peer is None:
            raise ValueError(f"mode {mode} needs to know the prefill engine's id and address")
        self._mode = mode
        self._prefill_url = prefill
        self._decode_url = decode
        self._peer = peer
        self._kept: dict[str, Moments] = {}
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The web application; it opens and closes this proxy's connections with itself."""
        app = web.Application(client_max_size=BODY_BYTES)
        for path in PATHS:
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
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
        moments: Moments = {}
        raw = await request.read()
        try:
            body = msgspec.json.decode(raw, type=Body)
        except msgspec.DecodeError as error:
            return _fault(400, f"the request is not a JSON object: {error}").response()
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        headers = {"X-Request-Id": request_id}
        if authorization := request.headers.get("Authorization"):
            headers["Authorization"] = authorization
        self._keep(request_id, moments)
        exchange = Exchange(request, body, headers, moments)
        exchange.mark("received")
        try:
            if self._mode is Mode.MOONCAKE:
                return await self._both_at_once(exchange)
            return await self._one_after_the_other(exchange)
        except LegFailed as failed:
            return failed.response()

    async def _one_after_the_other(self, exchange: Exchange) -> web.StreamResponse:
        raw = await self._prefill(exchange, {"do_remote_decode": True, "do_remote_prefill": False})
        try:
            returned = msgspec.json.decode(raw, type=_PrefillAnswer).kv_transfer_params
        except msgspec.DecodeError as error:
            raise _fault(502, f"the prefill engine's answer is not one: {error}") from error
        if not returned:
            raise _fault(502, "the prefill engine returned no kv_transfer_params: has it a connector?")
        if self._mode is Mode.PUSH:
            returned.pop("remote_block_ids", None)  # the prefill engine is told the decode engine's instead
        return await self._decode(exchange, returned)

    async def _both_at_once(self, exchange: Exchange) -> web.StreamResponse:
        to_prefill, to_decode = self._joined(exchange.id)
        failures: list[LegFailed] = []
        try:
            async with asyncio.TaskGroup() as legs:
                legs.create_task(self._prefill(exchange, to_prefill))
                decode = legs.create_task(self._decode(exchange, to_decode))
        except* LegFailed as group:
            # The leg that failed has cancelled the other one, which would wait for it for minutes.
            failures += (error for error in group.exceptions if isinstance(error, LegFailed))
        if failures:
            raise failures[0]
        return decode.result()

    def _joined(self, request_id: str) -> tuple[Body, Body]:
        """Parameters of two legs that find each other."""
        assert self._peer is not None
        transfer = f"xfer-{request_id}"
        prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        decode = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": self._peer.engine_id,
            "remote_bootstrap_addr": self._peer.address,
        }
        return prefill, decode

    async def _prefill(self, exchange: Exchange, params: Body) -> bytes:
        """The whole answer of the prefill leg. :raises LegFailed: there is none."""
        body = {**exchange.body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        for name in ("stream_options", "min_tokens"):
            body.pop(name, None)
        exchange.mark("prefill_sent")
        async with self._leg("prefill", self._prefill_url, exchange, body) as answer:
            raw = await answer.read()
            exchange.mark("prefill_answered")
            return raw

    async def _decode(self, exchange: Exchange, params: Body) -> web.StreamResponse:
        """The decode leg's answer, passed on. :raises LegFailed: it failed before its first byte."""
        exchange.mark("decode_sent")
        body = {**exchange.body, "kv_transfer_params": params}
        async with self._leg("decode", self._decode_url, exchange, body) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "")})
            response.headers["X-Request-Id"] = exchange.id
            first = await answer.content.readany()
            exchange.mark("decode_first")
            await response.prepare(exchange.request)
            try:
                await _pass_on(first, answer, response)
            except aiohttp.ClientError:
                # Too late for an error: a connection that breaks is what the client can still be told.
                if exchange.request.transport is not None:
                    exchange.request.transport.abort()
                return response
            exchange.mark("done")
            await response.write_eof()
            return response

    @contextlib.asynccontextmanager
    async def _leg(
        self, name: str, engine: str, exchange: Exchange, body: Body
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request to an engine; leaving early closes its connection, upon which vLLM aborts it."""
        assert self._session is not None
        payload = msgspec.json.encode(body)
        try:
            async with self._session.post(
                engine + exchange.request.path, data=payload, headers=exchange.headers
            ) as answer:
                if answer.status != 200:
                    raise LegFailed(answer.status, await answer.read(), answer.content_type)
                yield answer
        except (aiohttp.ClientError, OSError) as error:
            raise _fault(502, f"the {name} engine at {engine} did not answer: {error!r}") from error

    async def _models(self, request: web.Request) -> web.Response:
        assert self._session is not None
        async with self._session.get(f"{self._decode_url}/v1/models") as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _moments(self, request: web.Request) -> web.Response:
        found = self._kept.get(request.match_info["id"])
        if found is None:
            return _fault(404, f"no such request among the last {KEPT}").response()
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    def _keep(self, request_id: str, moments: Moments) -> None:
        self._kept.pop(request_id, None)
        self._kept[request_id] = moments
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Body | None = None


async def _pass_on(chunk: bytes, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
    while chunk:
        await response.write(chunk)
        chunk = await answer.content.readany()


def _fault(status: int, message: str) -> LegFailed:
    error = {"message": message, "type": "BaselineProxyError", "param": None, "code": status}
    return LegFailed(status, msgspec.json.encode({"error": error}))


async def bootstrap_peer(address: str) -> Peer:
    """The prefill engine that has registered with Mooncake's bootstrap server at `address`.

    :raises ValueError: it knows none, or several; this proxy serves one.
    """
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CONNECT_S)) as session,
        session.get(f"{address}/query") as answer,
    ):
        answer.raise_for_status()
        ranks = msgspec.json.decode(await answer.read(), type=dict[str, _Rank])
    if len(ranks) != 1:
        raise ValueError(f"{address} knows {len(ranks)} data-parallel ranks, and this proxy serves one")
    return Peer(next(iter(ranks.values())).engine_id, address)


class _Rank(msgspec.Struct):
    engine_id: str


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    mode = Mode(options.mode)
    peer = await bootstrap_peer(options.bootstrap) if mode is Mode.MOONCAKE else None
    proxy = Proxy(mode, options.prefill, options.decode, peer)
    await serve_until_stopped(proxy.app(), "127.0.0.1", options.port, shutdown_s=SHUTDOWN_S)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", required=True, choices=[*Mode])
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument(
        "--bootstrap", default="", metavar="URL", help="mooncake: the prefill engine's bootstrap server"
    )
    options = parser.parse_args(argv)
    if options.mode == Mode.MOONCAKE and not options.bootstrap:
        parser.error("--mode mooncake needs --bootstrap")
    return options


if __name__ == "__main__":
    try:
        asyncio.run(serve(arguments()))
    except (ValueError, OSError, aiohttp.ClientError) as error:
        sys.exit(f"baseline proxy: {error}")
