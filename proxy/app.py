"""The HTTP server: routes, what a client may send, and the proxy's parts put together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

from aiohttp import web

from pdx.config import default_proxy
from pdx.errors import ClientGone, Exhausted, RequestRefused
from pdx.proxy import headers, hints
from pdx.proxy.admission import Admission
from pdx.proxy.body import Intake, as_it_is, check_kind, encode, form_text, parsing
from pdx.proxy.cache.access import refuse_strange_names
from pdx.proxy.cache.routes import CacheControl
from pdx.proxy.chunk_index import ChunkIndex
from pdx.proxy.config import ProxyConfig, Routing
from pdx.proxy.control import Control, FromNode
from pdx.proxy.engines import Engines
from pdx.proxy.exchange import BEGUN, TRACE, Drain, Exchange, Seat
from pdx.proxy.following import Following
from pdx.proxy.health import Health
from pdx.proxy.leg import Asked, Legs
from pdx.proxy.locating import Locating
from pdx.proxy.metrics import Metrics, Outcome
from pdx.proxy.outline import in_turns
from pdx.proxy.plan import Body, Mode, Plan, check_length, model_of, planning, strip_control
from pdx.proxy.probe import Probes
from pdx.proxy.relay import Relay, new_transfer
from pdx.proxy.reply import (
    Handler,
    Reply,
    allow_origins,
    echo_request_id,
    error_response,
    http_error,
    redirect_slashes,
    request_key,
    tell_alive,
)
from pdx.proxy.router import serving
from pdx.proxy.routes import FORMS, GENERATING, PASSED, Route
from pdx.proxy.status import StatusPage
from pdx.proxy.timelines import Clocks, Timeline, Timelines
from pdx.proxy.traces import open_traces
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.telemetry.host import host_id
from pdx.wire import proxy as wire
from pdx.wire.hints import Envelope
from pdx.wire.proxy import Changes, NodeReport, PeerEntry

log = logging.getLogger(__name__)

LOOK_S = 0.25  # between two looks at the clock when nothing else triggers one

_STOPPED = (503, "the proxy is being stopped")
_INTERNAL = (500, "internal error of the proxy")


_HINTED = request_key("hinted")  # the parsed hints of a request, and the name by which engines know it


class Proxy:
    """All parts of one proxy, which live as long as its `app` does."""

    def __init__(self, config: ProxyConfig, env: Env, seat: Seat | None = None) -> None:
        """`env`: the event loop's; `_look` runs every LOOK_S. `seat`: given to a worker that serves beside others.

        :raises ConfigError: traces are configured but unavailable.
        """
        self._config = config
        self.env = env
        self._faults = self.env.faults
        health = Health(self.env, silence_s=min(config.first_byte_timeout_s, config.idle_timeout_s))
        self.engines = Engines(
            self.env,
            health,
            prefill=config.prefill,
            decode=config.decode,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        self._legs = Legs(health, config)
        self._probes = Probes(self.engines, self._legs, self.env, first_byte_timeout_s=config.first_byte_timeout_s)
        self._timelines = Timelines(timings=self.env.timings)
        self._clocks = Clocks(host_id())
        self._told_peers: dict[tuple[str, int], PeerEntry] | None = None
        seat = seat or Seat.alone()
        self.drain = Drain(seat)
        self.admission = Admission(config, self.env, seat)
        self.found = asyncio.Event()  # set once any engine can decode; never cleared
        self._control = Control(
            config.control or default_proxy(),
            self.env,
            self._take,
            keys=config.keys,
            roster=config.roster,
            workers=config.workers,
            discover=config.discover,
            is_found=not seat.number,  # the other workers' addresses follow from the first one's
        )
        self._metrics = Metrics(self.env, engines=self.engines, dropped=self._control.dropped)
        self._traces = open_traces(config, self.env.counters)
        self._metrics.waiting.set_function(lambda: self.admission.waiting)
        self._intake = Intake(
            each_bytes=config.max_body_bytes,
            all_bytes=max(config.max_body_bytes, config.max_bodies_bytes // config.workers),
            timeout_s=config.body_timeout_s,
        )
        self.chunks: Following | None = None  # which node has which chunks
        if config.chunk_index or config.routing is Routing.PREFIX:
            index = ChunkIndex(config.chunk_index_limit, self.env.counters)
            self.chunks = Following(index, self._control, self.env, timeout_s=config.heartbeat_timeout_s)
        self._cache = CacheControl(
            config,
            self._control,
            self.env,
            engines=self.engines,
            legs=self._legs,
            metrics=self._metrics,
            chunks=self.chunks,
        )
        self._status = StatusPage(
            config,
            self.env,
            engines=self.engines,
            timelines=self._timelines,
            cache=self._cache,
            admission=self.admission,
            drain=self.drain,
        )
        locating = Locating(
            config,
            self.env,
            engines=self.engines,
            legs=self._legs,
            instances=self._cache.instances,
            chunks=self.chunks,
        )
        self._relay = Relay(
            engines=self.engines,
            timelines=self._timelines,
            locating=locating,
            legs=self._legs,
            control=self._control,
            metrics=self._metrics,
            drain=self.drain,
            faults=self._faults,
        )

    def app(self) -> web.Application:
        """The web application; it starts and closes this proxy with itself."""
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._refuse_when_stopping])
        allow_origins(app, self._config.allowed_origins)
        app.middlewares.extend((self._contain, self.admission.guard, redirect_slashes))
        app.on_response_prepare.append(echo_request_id)
        app.on_response_prepare.append(self._tell_hints)
        serve = self._serve if self._traces is None else self._traces.traced(self._serve)
        app.add_routes(
            [
                *(web.post(route, serve) for route in (*GENERATING, *PASSED["POST"])),
                *(web.get(route, serve, allow_head=False) for route in PASSED["GET"]),
                web.get("/v1/models", self._list_models),
                *(web.get(path, self._tell_health) for path in ("/health", "/readyz")),
                *(method("/ping", self._tell_health) for method in (web.get, web.post)),
                web.get("/load", self._tell_load),
                web.get("/healthz", tell_alive),
            ]
        )
        app.cleanup_ctx.append(self._lifetime)
        return app

    def admin_app(self) -> web.Application:
        """Routes for the operator only: they show every client's requests."""
        app = web.Application(middlewares=[self._contain, refuse_strange_names])
        app.add_routes(
            [
                web.get("/metrics", self._expose),
                web.get("/healthz", tell_alive),
                web.get("/readyz", self._tell_health),
            ]
        )
        self._cache.install(app)
        self._status.install(app)
        return app

    async def _lifetime(self, _app: web.Application) -> AsyncIterator[None]:
        """Keep the control socket and the connections to engines open.

        :raises ConfigError: the control socket cannot be opened, or the file of trusted certificates is empty.
        """
        async with AsyncExitStack() as stack:
            if self._traces is not None:
                stack.push_async_callback(self._traces.close)
            self._control.start()
            stack.callback(self._control.close)
            await stack.enter_async_context(self._legs.open())
            stack.push_async_callback(self._probes.close)
            watch = asyncio.create_task(self._watch())
            stack.push_async_callback(_stop, watch)
            yield

    async def _watch(self) -> None:
        """Check the clock periodically: expire silent nodes and legs, start probes that are due."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        self.drain.beat()
        members: set[str] | None = None
        with self._faults.contain("the look at silent legs"):
            self._legs.end_silent()
        with self._faults.contain("the look at files"):
            for each in (self.admission.keys, self._legs.key):
                if each is not None:
                    each.refresh()
        with self._faults.contain("the look at silent nodes"):
            members = self._control.members()
            self._note_detached(self.engines.expire(members), "its node is silent or has left the roster")
        if self.chunks is not None:
            with self._faults.contain("the index of chunks"):
                self.chunks.look(members)
        with self._faults.contain("telling nodes of each other"):
            self._tell_peers()
        with self._faults.contain("the log of who is there"):
            self.engines.log_changes()
        if self._traces is not None:
            with self._faults.contain("the traces"):
                self._traces.look()
        with self._faults.contain("the look at probes"):
            self._probes.look()
        if not self.found.is_set() and self.num_decoders:
            self.found.set()

    def _take(self, node: str, message: FromNode) -> None:
        match message:
            case NodeReport():
                self._take_report(message)
            case wire.Reply():
                self._cache.orders.replied(node, message)
            case Changes() if self.chunks is not None:
                self.chunks.took(node, message)

    def _take_report(self, report: NodeReport) -> None:
        self._metrics.reports.inc()
        self._cache.report(report)
        believed, dropped = self.engines.screen(report)
        for reason, text in dropped:
            self._faults.warn(f"{reason} {report.node}", printable(text))
            self._control.dropped[reason] += 1
        if believed is not None:
            self._timelines.merge(report.marks, self._clocks.offset_ns(report, time.monotonic_ns()))
            self._note_detached(self.engines.report(believed), f"node {report.node!r} says so")
            if self.chunks is not None:
                self.chunks.heard(report.node, report.epoch)

    def _tell_peers(self) -> None:
        """Tell nodes about each other. They are told of every change; a restarted node's new epoch counts as one.

        Driven by the clock and not by reports: every change goes to all nodes, so a node that reports often must not
        set the rate.
        """
        peers = self.engines.peers()
        if peers != self._told_peers:
            self._control.send_peers(list(peers.values()))
            self._told_peers = peers

    def _note_detached(self, urls: frozenset[str], why: str) -> None:
        listed = {engine.url for engine in self.engines.all()} if urls else set()
        for url in urls:
            now = "it serves alone" if url in listed else "it gets no requests any more"
            text = f"{self.engines.titled(url)} is attached to no node ({why}): {now}"
            self._faults.warn(f"detached {url}", printable(text, 1000))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        reply = Reply(request, debug_headers=self._config.debug_headers)
        try:
            async with self.drain.under_way():
                return await self._answered(request, reply)
        except Exception as error:
            is_stopped = isinstance(error, TimeoutError) and self.drain.is_over
            if not is_stopped and not reply.started:
                raise
            if not is_stopped:  # part of the answer is already with the client, so it has to be terminated
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
        """Refuse new requests while draining, so that the client tries another proxy."""
        if not self.drain.has_begun or request.path == "/healthz":
            return await handler(request)
        self.env.counters["refused_while_stopping"] += 1
        response = error_response(*_STOPPED, retry_after_s=1)
        response.force_close()
        return response

    async def _answered(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        route = Route(request.path) if request.path in GENERATING else Route.WHOLE
        exchange = None
        try:
            check_kind(request)
            async with self.admission.counted(request), self._intake.body(request) as raw, self.admission.turn(request):
                body, whole = await self._read(request, raw, route)
                with suppress(Exhausted):  # the legs will run into the same limit
                    await self._probes.place(model_of(body), self._passed(request))
                if whole is not None:
                    exchange = await self._whole(request, body, whole, reply)
                else:
                    exchange = await self._exchange(request, route, body, reply)
                await self._relay.serve(exchange)
                return reply.response
        except RequestRefused as refusal:
            outcome = Outcome.BAD_REQUEST if refusal.status < 500 else Outcome.UNAVAILABLE
            outcome = Outcome.LIMITED if refusal.status == 429 else outcome
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

    async def _read(self, request: web.Request, raw: bytearray, route: Route) -> tuple[Body, Asked | None]:
        """Parse the request body as far as the proxy needs it. For a request that goes to one engine unchanged, also
        return the body as received."""
        path, kind = request.rel_url.raw_path_qs, request.headers.get("Content-Type", "")
        if request.method == "GET":
            return {}, Asked(path, None, method="GET")
        if request.path in FORMS:
            return {"model": await in_turns(form_text(raw, kind, "model"))}, Asked(path, as_it_is(raw), kind)
        if not raw and request.match_info:  # the client cancels a response
            return {}, Asked(path, b"")
        body, stripped = strip_control(await in_turns(parsing(raw)))
        if stripped:
            self._metrics.stripped.inc()
            self._faults.warn("stripped", "a client sent transfer parameters of its own; they are removed")
        if route is not Route.WHOLE:
            return body, None
        return body, Asked(path, encode(body) if stripped else as_it_is(raw))

    async def _whole(self, request: web.Request, body: Body, asked: Asked, reply: Reply) -> Exchange:
        passed = self._passed(request)
        name = request.match_info.get("id")
        holder = await self._probes.holder(name, passed) if name else None
        return Exchange(
            route=Route.WHOLE,
            body=body,
            whole=asked,
            only=holder.url if holder is not None else "",
            headers=passed,
            reply=reply,
            timeline=Timeline(
                transfer=new_transfer(self._control.tag), route=Route.WHOLE, mode=Mode.ALONE, why="whole", moments=[]
            ),
            metrics=self._metrics,
            trace=request.get(TRACE),
        )

    def _passed(self, request: web.Request) -> dict[str, str]:
        begun = request.get(BEGUN, "")
        return headers.to_engines(request.headers, has_key=not self._config.is_keyed, begun=begun)

    async def _exchange(self, request: web.Request, route: Route, body: Body, reply: Reply) -> Exchange:
        body, envelope = hints.take(body, request.headers.get("X-Session-ID", ""))
        envelope = envelope.within(self._config.client_priority)
        plan = await in_turns(planning(route, body, min_split_tokens=self._config.min_split_tokens))
        check_length(plan, [each.facts for each in serving(self.engines.all(), self.engines.health, model_of(body))])
        passed = self._passed(request)
        if plan.mode is Mode.FORWARD and not self._config.forward:
            plan = Plan(Mode.SAMPLED, "configured")
        if plan.mode is Mode.FORWARD and headers.RANK in passed:  # the decode engine may refuse it: it answers first
            plan = Plan(Mode.SAMPLED, "rank")
        transfer = new_transfer(self._control.tag)
        timeline = Timeline(transfer=transfer, route=route, mode=plan.mode, why=plan.why, moments=[])
        self._timelines.open(timeline)
        if headers.REQUEST_ID not in passed and body.get("request_id") is None:
            passed[headers.REQUEST_ID] = transfer  # both legs share one id, so that logs can be joined
        if route is Route.RESPONSES and body.get("request_id") is None:  # vLLM ignores that header on this route
            body = {**body, "request_id": f"resp_{transfer}"}
        previous = body.get("previous_response_id")
        holder = await self._probes.holder(previous, passed) if isinstance(previous, str) and previous else None
        if envelope.decided:
            self.env.counters["hints_refused"] += len(envelope.decided)  # the answer says which hints, and why
        if envelope.said:
            name = body.get("request_id") if route is Route.RESPONSES else passed.get(headers.REQUEST_ID)
            request[_HINTED] = envelope, str(name or body["request_id"])
        return Exchange(
            route=route,
            body=body,
            prompts=plan.prompts,
            only=holder.url if holder is not None else "",
            headers=passed,
            hints=envelope.hints,
            reply=reply,
            timeline=timeline,
            metrics=self._metrics,
            trace=request.get(TRACE),
        )

    async def _tell_hints(self, request: web.Request, response: web.StreamResponse) -> None:
        """Engines have asked their nodes by now. Does not wait for nodes that do not explain their chunks."""
        hinted: tuple[Envelope, str] | None = request.get(_HINTED)
        if hinted is not None:
            envelope, name = hinted
            verdicts = await self._cache.orders.verdicts(name) if response.status == 200 else []
            told = [verdict.as_member for verdict in envelope.answer(verdicts)]
            response.headers[hints.HEADER] = ", ".join(told)

    async def _list_models(self, request: web.Request) -> web.Response:
        try:
            return await self._probes.answer(self._passed(request))
        except Exhausted as error:
            self._metrics.exhausted.labels(error.lack).inc()
            return error_response(503, "the proxy has too many connections; come back later", retry_after_s=1)

    @property
    def num_decoders(self) -> int:
        """How many engines are known to accept requests."""
        return sum(each.decodes and self.engines.health.of(each.url).is_ready for each in self.engines.all())

    async def _tell_health(self, _request: web.Request) -> web.Response:
        """Readiness: 200 while any engine can decode, else 503."""
        state = self._status.readiness()
        return web.json_response(state, status=200 if state["decoders"] else 503)

    async def _tell_load(self, _request: web.Request) -> web.Response:
        """Load in vLLM's format, for a balancer in front of several proxies; all workers of this proxy are included."""
        return web.json_response({"server_load": self.drain.load})

    async def _expose(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.expose(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
