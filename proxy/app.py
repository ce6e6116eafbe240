"""The HTTP server: routes, what a client may send, and the proxy's parts put together."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from pdx.config import default_proxy
from pdx.errors import ClientGone, Exhausted, RequestRefused
from pdx.proxy import headers, hints
from pdx.proxy.body import Intake, parsing
from pdx.proxy.cache.service import CacheControl
from pdx.proxy.chunk_index import ChunkIndex
from pdx.proxy.config import ProxyConfig
from pdx.proxy.control import Control
from pdx.proxy.engines import Engines
from pdx.proxy.exchange import Drain, Exchange
from pdx.proxy.following import Following
from pdx.proxy.health import Health
from pdx.proxy.leg import Legs, engine_socket, engine_tls
from pdx.proxy.metrics import Metrics, Outcome
from pdx.proxy.plan import Body, Mode, Plan, Route, model_of, planning, strip_control
from pdx.proxy.probe import Models, Probes
from pdx.proxy.relay import Relay, new_transfer
from pdx.proxy.reply import TRANSFER_HEADER, Handler, Origins, Reply, error_response, http_error, redirect_slashes
from pdx.proxy.roll import Roll
from pdx.proxy.router import serving
from pdx.proxy.server import Server, endpoint, when_signalled
from pdx.proxy.telling import Telling
from pdx.proxy.timelines import Clocks, Timeline, Timelines
from pdx.proxy.turns import in_turns
from pdx.proxy.why import HEADER, Explainer
from pdx.security import descriptors
from pdx.telemetry.clock import WakingClock
from pdx.telemetry.faults import Faults, printable
from pdx.telemetry.host import host_id
from pdx.wire.hints import Envelope
from pdx.wire.messages import Changes, NodeReport, PeerEntry

log = logging.getLogger(__name__)

_KEEPALIVE_S = 2.0  # below the 5 s after which vLLM's server closes an idle connection under our request
_FILES_PER_ENGINE = 4
_LOOK_S = 0.25  # between two looks at the clock, where nothing else looks at it

_STOPPED = (503, "the proxy is being stopped")
_INTERNAL = (500, "internal error of the proxy")


class Hinted(msgspec.Struct, frozen=True):
    """A request with an envelope, and the name by which its engines know it."""

    envelope: Envelope
    name: str


# Where a request has it; before aiohttp 3.14 there is no such class.
_HINTED: Any = web.RequestKey("hinted", Hinted) if hasattr(web, "RequestKey") else "hinted"


class Proxy:
    """All parts of one proxy, which live as long as its `app` does."""

    _legs: Legs
    _relay: Relay
    _probes: Probes
    _models: Models

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._clock = WakingClock(2 * _LOOK_S, time.monotonic)
        self.counters: Counter[str] = Counter()
        self._faults = Faults(self.counters, log=log)
        self._health = Health(
            clock=self._clock,
            chance=random.random,
            silence_s=min(config.first_byte_timeout_s, config.idle_timeout_s),
            faults=self._faults,
        )
        self._engines = Engines(
            prefill=config.prefill,
            decode=config.decode,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            health=self._health,
            clock=self._clock,
        )
        self._roll = Roll(self._engines, self._health)
        self._timelines = Timelines(keep=config.kept_timelines)
        self._clocks = Clocks(host_id())
        self._told_peers: dict[tuple[str, int], PeerEntry] = {}
        self.drain = Drain()
        self._metrics = Metrics(engines=self._engines, health=self._health, events=self.counters)
        self._control = Control(
            config.control or default_proxy(),
            on_report=self._take_report,
            on_explained=lambda explained: self._explainer.told(explained),
            on_reply=lambda node, reply: self._cache.replied(node, reply),
            on_changes=self._take_changes,
            on_drop=lambda reason: self._metrics.control_dropped.labels(reason).inc(),
            keys=config.keys,
            roster=config.roster,
            counters=self.counters,
            faults=self._faults,
        )
        self._intake = Intake(
            each_bytes=config.max_body_bytes,
            all_bytes=config.max_bodies_bytes,
            timeout_s=config.body_timeout_s,
        )
        self._explainer = Explainer(self._control.ask_why)
        self._following: Following | None = None
        if config.chunk_index:
            self._following = Following(
                ChunkIndex(config.chunk_index_limit, self.counters),
                self._control.follow,
                timeout_s=config.heartbeat_timeout_s,
                clock=self._clock,
                faults=self._faults,
                counters=self.counters,
            )
        self._cache = CacheControl(
            config,
            self._control,
            engines=self._engines,
            legs=lambda: self._legs,
            metrics=self._metrics,
            counters=self.counters,
            faults=self._faults,
            clock=self._clock,
            index=self._following.lookup if self._following is not None else None,
        )
        self._warned_stripped = False
        self._tls = engine_tls(config.engine_ca)

    def app(self) -> web.Application:
        """The web application; it starts and closes this proxy with itself."""
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._refuse_when_stopping])
        Origins(self._config.allowed_origins).install(app)
        app.middlewares.extend((self._contain, redirect_slashes))
        app.on_response_prepare.append(_echo_request_id)
        app.on_response_prepare.append(self._tell_why)
        app.on_response_prepare.append(self._tell_hints)
        for route in Route:
            app.router.add_post(route, self._generate)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/health", self._tell_health)
        app.cleanup_ctx.append(self._lifetime)
        return app

    def admin_app(self) -> web.Application:
        """What only those may ask who run this proxy: it tells of all clients' requests."""
        app = web.Application(middlewares=[self._contain])
        Telling(self._metrics, self._timelines).install(app)
        self._cache.install(app)
        return app

    @property
    def num_engines(self) -> int:
        """How many engines it knows now."""
        return len(self._engines.all())

    @property
    def chunks(self) -> Following | None:
        """Which node has which chunks; None without `--chunk-index`."""
        return self._following

    async def _lifetime(self, _app: web.Application) -> AsyncIterator[None]:
        """The control socket and the client session are open.

        :raises ConfigError: the control socket cannot be had.
        """
        config = self._config
        async with AsyncExitStack() as stack:
            self._control.start()
            stack.callback(self._control.close)
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=engine_socket, ssl=self._tls
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "pdx-proxy"},
            )
            await stack.enter_async_context(session)
            self._legs = Legs(
                session,
                health=self._health,
                connect_timeout_s=config.connect_timeout_s,
                first_byte_timeout_s=config.first_byte_timeout_s,
                answer_timeout_s=config.answer_timeout_s,
                idle_timeout_s=config.idle_timeout_s,
            )
            self._relay = Relay(
                engines=self._engines,
                health=self._health,
                timelines=self._timelines,
                legs=self._legs,
                control=self._control,
                metrics=self._metrics,
                drain=self.drain,
                faults=self._faults,
            )
            self._models = Models(self._health, self._legs, engines=self._engines)
            stack.push_async_callback(self._models.close)
            self._probes = Probes(
                self._health,
                self._legs,
                engines=self._engines,
                models=self._models,
                faults=self._faults,
                first_byte_timeout_s=config.first_byte_timeout_s,
            )
            stack.push_async_callback(self._probes.close)
            watch = asyncio.create_task(self._watch())
            stack.push_async_callback(_stop, watch)
            yield

    async def _watch(self) -> None:
        """Look at the clock: for silent nodes and legs, and for probes that are due."""
        while True:
            self._look()
            await asyncio.sleep(_LOOK_S)

    def _look(self) -> None:
        members: set[str] | None = None
        with self._faults.contain("the look at silent legs"):
            self._legs.end_silent()
        with self._faults.contain("the look at silent nodes"):
            members = self._control.members()
            self._note_detached(self._engines.expire(members), "its node is silent or has left the roster")
        if self._following is not None:
            with self._faults.contain("the index of chunks"):
                self._following.look(members)
        with self._faults.contain("telling nodes of each other"):
            self._tell_peers()
        with self._faults.contain("the log of who is there"):
            self._roll.look()
        with self._faults.contain("the look at probes"):
            self._probes.look()

    def _take_report(self, report: NodeReport) -> None:
        self._metrics.reports.inc()
        self._cache.report(report)
        believed, dropped = self._engines.screen(report)
        for drop in dropped:
            self._faults.warn(f"{drop.reason} {report.node}", printable(drop.text))
            self._metrics.control_dropped.labels(drop.reason).inc()
        if believed is not None:
            self._timelines.merge(report.marks, self._clocks.offset_ns(report, time.monotonic_ns()))
            self._note_detached(self._engines.report(believed), f"node {report.node!r} says so")
            if self._following is not None:
                self._following.heard(report.node, report.epoch)

    def _take_changes(self, node: str, changes: Changes) -> None:
        if self._following is not None:
            self._following.took(node, changes)

    def _tell_peers(self) -> None:
        """Nodes find each other by this: they hear of every change, and a node's new epoch is one.

        Called by the clock: all hear of it, so nobody may make them all hear of something at any rate.
        """
        peers = self._engines.peers()
        if peers != self._told_peers:
            self._control.send_peers(list(peers.values()))
            self._told_peers = peers

    def _note_detached(self, urls: frozenset[str], why: str) -> None:
        listed = {engine.url for engine in self._engines.all()} if urls else set()
        for url in urls:
            now = "it serves alone" if url in listed else "it gets no requests any more"
            self._faults.warn(f"detached {url}", printable(f"engine {url} is attached to no node ({why}): {now}"))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        reply = Reply(request, debug_headers=self._config.debug_headers)
        try:
            async with self.drain.under_way():
                return await self._answered(request, reply)
        except Exception as error:
            is_stopped = isinstance(error, TimeoutError) and self.drain.is_over
            if not is_stopped and not reply.started:
                raise
            if not is_stopped:  # what the client was sent cannot be taken back, and has to have an end
                self._faults.unexpected("a request", error)
            if not reply.is_whole:
                with suppress(ClientGone):
                    await reply.fail(*(_STOPPED if is_stopped else _INTERNAL))
            return reply.response

    @web.middleware
    async def _contain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return http_error(error)
        except Exception as error:  # noqa: BLE001 - the root of a request's task
            self._faults.unexpected("a request", error)
            return error_response(*_INTERNAL)

    @web.middleware
    async def _refuse_when_stopping(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Another proxy is to be asked: this one answers what it has begun, and ends."""
        if not self.drain.has_begun:
            return await handler(request)
        self.counters["refused_while_stopping"] += 1
        response = error_response(*_STOPPED, retry_after_s=1)
        response.force_close()
        return response

    async def _answered(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        route = Route(request.path)
        exchange = None
        try:
            if request.content_type != "application/json":
                kind = printable(request.headers.get("Content-Type", "none"))
                raise RequestRefused(400, f"the request's Content-Type is {kind}; send JSON, as application/json")
            packed = request.headers.get("Content-Encoding", "identity")
            if packed != "identity":
                raise RequestRefused(
                    415, f"the request has Content-Encoding: {packed}; send it unpacked, as engines want it"
                )
            async with self._intake.body(request) as raw:
                body, stripped = strip_control(await in_turns(parsing(raw)))
                if stripped:
                    self._note_stripped()
                with suppress(Exhausted):  # its legs will find so, too
                    await self._models.place(model_of(body), headers.to_engines(request.headers))
                exchange = await self._exchange(request, route, body, reply)
                await self._relay.serve(exchange)
                return reply.response
        except RequestRefused as refusal:
            outcome = Outcome.BAD_REQUEST if refusal.status < 500 else Outcome.UNAVAILABLE
            self._metrics.requests.labels(route, "", outcome).inc()
            if outcome is Outcome.UNAVAILABLE:
                self._metrics.exhausted.labels("bodies").inc()
                self._faults.warn("bodies", printable(str(refusal)))
            return error_response(
                refusal.status, str(refusal), retry_after_s=refusal.retry_after_s, param=refusal.param
            )
        except asyncio.CancelledError:
            if exchange is None and self.drain.is_over:
                self._metrics.requests.labels(route, "", Outcome.STOPPED).inc()
            raise

    def _check_length(self, plan: Plan, model: str | None) -> None:
        """What no engine takes goes to none: a list of ids is long before it is read.

        :raises RequestRefused: in an engine's words.
        """
        facts = [engine.facts for engine in serving(self._engines.all(), self._health, model)]
        if not facts or None in facts:
            return
        limit = max(each.max_model_len for each in facts if each is not None)
        if plan.least_length > limit:
            raise RequestRefused(
                400,
                f"This model's maximum context length is {limit} tokens. However, your prompt contains "
                f"{plan.least_length} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt.",
                param="input_tokens",
            )

    async def _exchange(self, request: web.Request, route: Route, body: Body, reply: Reply) -> Exchange:
        body, envelope = hints.take(body, request.headers.get("X-Session-ID", ""))
        envelope = envelope.within(self._config.client_priority)
        plan = await in_turns(planning(route, body, min_split_tokens=self._config.min_split_tokens))
        self._check_length(plan, model_of(body))
        passed = headers.to_engines(request.headers)
        if plan.mode is Mode.FORWARD and not self._config.forward:
            plan = Plan(Mode.SAMPLED, "configured")
        if plan.mode is Mode.FORWARD and headers.RANK in passed:  # which the decode engine may refuse: it answers first
            plan = Plan(Mode.SAMPLED, "rank")
        transfer = new_transfer()
        timeline = Timeline(transfer=transfer, route=route, mode=plan.mode, why=plan.why, moments=[])
        self._timelines.open(timeline)
        if headers.REQUEST_ID not in passed and body.get("request_id") is None:
            passed[headers.REQUEST_ID] = transfer  # both legs' answers carry one id, and logs can be joined
        if envelope.decided:
            self.counters["hints_refused"] += len(envelope.decided)  # the answer says which, and why
        if envelope.said:
            request[_HINTED] = Hinted(envelope, passed.get(headers.REQUEST_ID) or str(body["request_id"]))
        return Exchange(
            route=route,
            body=body,
            headers=passed,
            hints=envelope.hints,
            reply=reply,
            timeline=timeline,
            metrics=self._metrics,
        )

    async def _tell_why(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers are about to be sent, so that engines have asked their nodes."""
        if HEADER in request.headers and TRANSFER_HEADER in response.headers:
            own = headers.request_id(request.headers)  # by which engines know it, else by its transfer
            response.headers[HEADER] = await self._explainer.why(own or response.headers[TRANSFER_HEADER])

    async def _tell_hints(self, request: web.Request, response: web.StreamResponse) -> None:
        """Likewise. Who has said nothing of its chunks waits for nothing."""
        hinted: Hinted | None = request.get(_HINTED)
        if hinted is not None:
            verdicts = await self._explainer.verdicts(hinted.name) if response.status == 200 else []
            told = [verdict.as_member for verdict in hinted.envelope.answer(verdicts)]
            response.headers[hints.HEADER] = ", ".join(told)

    def _note_stripped(self) -> None:
        self._metrics.stripped.inc()
        if not self._warned_stripped:
            self._warned_stripped = True
            log.warning("a client sent transfer parameters of its own; they are removed (further ones are counted)")

    async def _list_models(self, request: web.Request) -> web.Response:
        try:
            return await self._models.answer(headers.to_engines(request.headers))
        except Exhausted as error:
            self._metrics.exhausted.labels(error.lack).inc()
            return error_response(503, "the proxy has too many connections; come back later", retry_after_s=1)

    async def _tell_health(self, _request: web.Request) -> web.Response:
        """Readiness: whether somebody can decode now."""
        ready = [each for each in self._engines.all() if self._health.of(each.url).is_ready]
        decoders = sum(engine.decodes for engine in ready)
        state = {
            "status": "ok" if decoders else "unavailable",
            "decoders": decoders,
            "prefillers": sum(engine.prefills for engine in ready),
            "nodes": self._engines.nodes(),
        }
        return web.json_response(state, status=200 if decoders else 503)


async def serve(config: ProxyConfig) -> None:
    """Serve until SIGINT or SIGTERM; then requests under way have `drain_s`, and a second signal ends them at once.

    :raises ConfigError: an engine's URL is not one, or an address cannot be had.
    """
    descriptors.raise_limit()
    proxy = Proxy(config)
    signalled = asyncio.Event()

    def stop() -> None:
        if signalled.is_set():
            proxy.drain.end()
        signalled.set()

    when_signalled(stop)
    server = Server(proxy.app(), spared=lambda: _spared_files(proxy.num_engines), counters=proxy.counters)
    admin = Server(proxy.admin_app(), counters=proxy.counters)
    try:
        if config.admin:
            await admin.start(config.admin)
            log.info("metrics and timelines at %s, for everybody who reaches it", admin.url)
        await server.start(endpoint(config.host, config.port))
        log.info("listening on %s; nodes report at %s", server.url, config.control or default_proxy())
        await signalled.wait()
        proxy.drain.begin()
        log.info("stopping: %d requests under way have %g s", len(proxy.drain), config.drain_s)
        await proxy.drain.wait(config.drain_s)
        proxy.drain.end()
    finally:
        await server.close()
        await admin.close()


def _spared_files(num_engines: int) -> int:
    """Descriptors that are left for connections to so many engines: not all, where few files may be open."""
    return min(_FILES_PER_ENGINE * num_engines, descriptors.limit() // 4)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """The client's id of its request, also where no engine was asked."""
    if own := headers.request_id(request.headers):
        response.headers.setdefault(headers.REQUEST_ID, own)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
