"""Verbs over HTTP: POST /cache/VERB on the administrator's address. docs/controller-http.md is the contract.

Neither a token nor what a body says is ever logged: bodies have the tokens of users' prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

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
from pdx.proxy.cache.bodies import (
    AdviseBody,
    ClearBody,
    EvictBody,
    JobBody,
    ListBody,
    Lookup,
    MoveBody,
    OfChunks,
    OfNodes,
    RecodeBody,
    VerifyBody,
    WhyBody,
)
from pdx.proxy.cache.verbs import Verbs
from pdx.proxy.metrics import Metrics

LARGE_BYTES = 256 << 10  # to decode more takes its time
AT_A_TIME = 1024  # verbs under way
# Of what is not in here 409 where a node refused: what it has now does not allow it. Else 502.
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


class _Verb(NamedTuple):
    body: msgspec.json.Decoder[Any]
    carry_out: Callable[[Any], Awaitable[dict[str, Any]]]


class Routes:
    """The routes, on the loop of the proxy."""

    def __init__(self, verbs: Verbs, access: Access, *, intake: Intake, metrics: Metrics) -> None:
        self._access = access
        self._intake = intake
        self._metrics = metrics
        self._under_way = 0
        self._turn = asyncio.Semaphore(1)

        def verb(body: type[Any], carry_out: Callable[[Any], Awaitable[dict[str, Any]]]) -> _Verb:
            return _Verb(msgspec.json.Decoder(body), carry_out)

        self._verbs = {
            "lookup": verb(Lookup, verbs.lookup),
            "query_ip": verb(OfNodes, verbs.query_ip),
            "models": verb(OfNodes, verbs.models),
            "health": verb(OfNodes, verbs.health),
            "ls": verb(ListBody, verbs.ls),
            "why": verb(WhyBody, verbs.why),
            "jobs": verb(OfNodes, verbs.jobs),
            "advise": verb(AdviseBody, verbs.advise),
            "clear": verb(ClearBody, verbs.clear),
            "pin": verb(OfChunks, verbs.pin),
            "unpin": verb(OfChunks, verbs.unpin),
            "evict": verb(EvictBody, verbs.evict),
            "move": verb(MoveBody, verbs.move),
            "compress": verb(RecodeBody, verbs.compress),
            "decompress": verb(RecodeBody, verbs.decompress),
            "verify": verb(VerifyBody, verbs.verify),
            "check_finish": verb(JobBody, verbs.check_finish),
            "cancel": verb(JobBody, verbs.cancel),
        }

    def install(self, app: web.Application) -> None:
        """Serve them there."""
        app.router.add_post("/cache/{verb}", self._serve)
        for name in self._verbs:  # so that the first one counts for `rate`
            self._metrics.verbs.labels(name, "ok")

    async def _serve(self, request: web.Request) -> web.Response:
        name = request.match_info["verb"]
        outcome = "error"
        try:
            self._access.check(request)
            if name not in self._verbs:
                raise RequestRefused(404, f"there is no such verb; there are {', '.join(self._verbs)}")
            answer = await self._answer(request, self._verbs[name])
            outcome = "ok"
            return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
        except PdxError as error:
            outcome = _kind(error)
            return _error(error)
        finally:
            label = name if name in self._verbs else ""
            self._metrics.verbs.labels(label, outcome).inc()

    async def _answer(self, request: web.Request, verb: _Verb) -> dict[str, Any]:
        if request.content_type != "application/json":
            raise RequestRefused(415, "the request must have Content-Type: application/json")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestRefused(415, "the request must be sent unpacked, without Content-Encoding")
        if self._under_way >= AT_A_TIME:
            raise RequestRefused(503, f"{AT_A_TIME} verbs are under way", retry_after_s=1)
        self._under_way += 1
        try:
            async with self._intake.body(request) as raw:
                if len(raw) <= LARGE_BYTES:
                    return await verb.carry_out(_decoded(verb.body, raw))
                async with self._turn:  # decoding takes its time: one after the other, and others between
                    await asyncio.sleep(0)
                    said = _decoded(verb.body, raw)
                return await verb.carry_out(said)
        finally:
            self._under_way -= 1


def _decoded(decoder: msgspec.json.Decoder[Any], raw: bytes | bytearray) -> Any:
    try:
        return decoder.decode(raw or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(400, f"the request's body is none of this verb: {str(error)[:200]}") from error


def _kind(error: PdxError) -> str:
    """The name of a class in `pdx.errors`, whatever a node says."""
    if not isinstance(error, VerbRefused):
        return type(error).__name__
    kind = getattr(errors, error.error, None)
    return error.error if isinstance(kind, type) and issubclass(kind, PdxError) else NodeError.__name__


def _error(error: PdxError) -> web.Response:
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
    body = msgspec.json.encode({"error": {"type": kind, "message": str(error)}})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
