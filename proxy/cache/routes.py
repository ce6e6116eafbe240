"""Verbs over HTTP: POST /cache/VERB on the admin address. docs/controller.md is the contract.

Neither tokens nor bodies are ever logged: bodies contain the tokens of users' prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from pdx import errors
from pdx.errors import (
    ChunkMissing,
    Exhausted,
    JobUnknown,
    NodeError,
    NodeUnavailable,
    NoEngine,
    PdxError,
    PeerUnknown,
    ProtocolError,
    RequestRefused,
    SelectionError,
    TierUnknown,
    VerbRefused,
)
from pdx.proxy.body import Intake
from pdx.proxy.cache.access import Access
from pdx.proxy.cache.orders import Orders
from pdx.proxy.cache.verbs import Instances, Verbs
from pdx.proxy.config import ProxyConfig
from pdx.proxy.control import Control
from pdx.proxy.engines import Engines
from pdx.proxy.following import Following
from pdx.proxy.headers import media_type
from pdx.proxy.leg import Legs
from pdx.proxy.metrics import Metrics
from pdx.proxy.reply import json_response
from pdx.telemetry.env import Env
from pdx.wire.messages import Refused
from pdx.wire.objects import Failure, encode_answers, form_of
from pdx.wire.proxy import NodeReport
from pdx.wire.verbs import VERBS

_ALL_BODIES = 8  # the memory limit for all bodies, in multiples of the largest one
LARGE_BYTES = 256 << 10  # larger bodies take noticeable time to decode
AT_A_TIME = 1024  # verbs in flight
WAIT_S, LEAST_WAIT_S, MOST_WAIT_S = 5.0, 0.05, 60.0  # how long each node has to answer
# Errors not listed here: 409 if a node refused because of its current state, else 502.
_STATUS: Mapping[str, int] = {
    ChunkMissing.__name__: 404,
    Exhausted.__name__: 503,
    JobUnknown.__name__: 404,
    NodeUnavailable.__name__: 504,
    NoEngine.__name__: 503,
    PeerUnknown.__name__: 404,
    SelectionError.__name__: 400,
    TierUnknown.__name__: 404,
}


class CacheControl:
    """The controller API of the proxy; one per proxy, on its event loop."""

    def __init__(
        self,
        config: ProxyConfig,
        control: Control,
        env: Env,
        *,
        engines: Engines,
        legs: Legs,
        metrics: Metrics,
        chunks: Following | None,
    ) -> None:
        """`chunks`: see `Verbs`. :raises ConfigError: the token file is invalid."""
        self.instances = Instances(control, env, silent_s=config.heartbeat_timeout_s)
        self.orders = Orders(control, env)
        self.verbs = Verbs(self.instances, self.orders, engines, legs, chunks)
        self.access = Access(config.cache_token_file, env)
        self._metrics = metrics
        largest = config.max_body_bytes
        self._intake = Intake(each_bytes=largest, all_bytes=_ALL_BODIES * largest, timeout_s=config.body_timeout_s)
        self._under_way = 0
        self._turn = asyncio.Semaphore(1)
        self._decoders = {name: msgspec.json.Decoder(form_of(verb)) for name, verb in VERBS.items()}

    def install(self, app: web.Application) -> None:
        app.add_routes([web.get("/cache", self._list), web.post("/cache/{verb}", self._serve)])

    def report(self, report: NodeReport) -> None:
        if self.instances.report(report):
            self.orders.lost(report.node, "was started again")

    async def _list(self, request: web.Request) -> web.Response:
        try:
            self.access.check(request)
        except PdxError as error:
            return error_answer(error)
        return json_response({"nodes": list(self.instances.all()), "verbs": list(VERBS)})

    async def _serve(self, request: web.Request) -> web.Response:
        name = request.match_info["verb"]
        outcome = "error"
        try:
            self.access.check(request)
            if name not in VERBS:
                raise RequestRefused(404, f"there is no such verb; there are {', '.join(VERBS)}")
            answer = await self._answer(request, name)
            outcome = "ok"
            return web.Response(body=answer, content_type="application/json")
        except PdxError as error:
            outcome = _kind(error)
            return error_answer(error)
        finally:
            self._metrics.verbs.labels(name if name in VERBS else "", outcome).inc()

    async def _answer(self, request: web.Request, name: str) -> bytes:
        if media_type(request.headers) != "application/json":
            raise RequestRefused(415, "the request must have Content-Type: application/json")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestRefused(415, "the request must be sent unpacked, without Content-Encoding")
        names, wait_s = _asked(request)
        if self._under_way >= AT_A_TIME:
            raise RequestRefused(503, f"{AT_A_TIME} verbs are under way", retry_after_s=1)
        self._under_way += 1
        try:
            async with self._intake.body(request) as raw:
                if len(raw) > LARGE_BYTES:
                    async with self._turn:  # decoding takes time: one at a time, with other work between
                        await asyncio.sleep(0)
                        said = _decoded(self._decoders[name], raw)
                else:
                    said = _decoded(self._decoders[name], raw)
                found = await self.verbs.carry_out(VERBS[name], said, names, wait_s)
        finally:
            self._under_way -= 1
        refused = {
            node: Failure(_known(each.error), each.text) for node, each in found.items() if isinstance(each, Refused)
        }
        return encode_answers({node: each for node, each in found.items() if not isinstance(each, Refused)}, refused)


def _asked(request: web.Request) -> tuple[list[str], float]:
    """`?node=NAME`, once per node to ask, and `wait_s`: how long each has to answer."""
    unknown = request.query.keys() - {"node", "wait_s"}
    try:
        wait_s = float(request.query.get("wait_s", WAIT_S))
    except ValueError:
        wait_s = -1.0
    if unknown or not LEAST_WAIT_S <= wait_s <= MOST_WAIT_S:
        raise RequestRefused(400, f"the query has node=NAME and wait_s={LEAST_WAIT_S} to {MOST_WAIT_S}, and no more")
    return list(dict.fromkeys(request.query.getall("node", []))), wait_s


def _decoded(decoder: msgspec.json.Decoder[Any], raw: bytes | bytearray) -> Any:
    try:
        return decoder.decode(raw or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(400, f"the request's body is none of this verb: {str(error)[:200]}") from error


def _kind(error: PdxError) -> str:
    """The name of a class in `pdx.errors`, whatever the node sent."""
    return _known(error.error) if isinstance(error, VerbRefused) else type(error).__name__


def _known(name: str) -> str:
    kind = getattr(errors, name, None)
    return name if isinstance(kind, type) and issubclass(kind, PdxError) else NodeError.__name__


def error_answer(error: PdxError) -> web.Response:
    """The HTTP answer for this error."""
    kind, headers = _kind(error), {}
    status = _STATUS.get(kind, 502)
    if isinstance(error, VerbRefused):
        status = 400 if kind == ProtocolError.__name__ else _STATUS.get(kind, 409)
    if isinstance(error, RequestRefused):
        status = error.status
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        if status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="pdx"'
    return json_response({"error": Failure(kind, str(error))}, status=status, headers=headers)
