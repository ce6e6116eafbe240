"""The operator's status page and its data: one document (`pdx.wire.overview`), built on request, at most once a second.
Nodes are asked for their status then. ADR 87 has the reasons.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from pdx.errors import RequestRefused
from pdx.extras import own_version
from pdx.proxy.admission import Admission
from pdx.proxy.cache.routes import CacheControl, error_answer
from pdx.proxy.cache.verbs import Instance
from pdx.proxy.config import ProxyConfig
from pdx.proxy.engines import Engine, Engines
from pdx.proxy.exchange import Drain
from pdx.proxy.outline import Steps, in_turns
from pdx.proxy.reply import error_response, json_response
from pdx.proxy.timelines import Timeline, Timelines
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.telemetry.timeline import Event, phases
from pdx.wire.messages import Outcome, Refused
from pdx.wire.overview import EngineView, FallbackView, Link, NodeView, Overview, RequestView, Room
from pdx.wire.status import NodeStatus, PeerStatus
from pdx.wire.verbs import Status

FRESH_S = 1.0  # how long a document is reused
WAIT_S = 0.5  # time limit for nodes; those that have not answered are shown as last known
MOST_NODES, MOST_ENGINES, MOST_REQUESTS = 256, 512, 1000
AT_A_TIME = 128  # nodes asked for one document: those not asked for longest
_READY = "ready"  # state of a connection to a peer
_MOST_LISTED = 8  # rooms, channels and reasons per node
_STEP = 16  # rows between two turns of the event loop
_NAME, _TEXT = 64, 200  # characters
_MOST_COUNTED = 1 << 53  # largest integer that JavaScript represents exactly
_PAGE = Path(__file__).with_name("status.html")


def page() -> tuple[bytes, str]:
    """The page, and a content security policy that allows only its own script and style."""
    body = _PAGE.read_bytes()

    def own(kind: bytes) -> str:
        part = body.partition(b"<%s>" % kind)[2].partition(b"</%s>" % kind)[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'"

    return body, (
        f"default-src 'none'; style-src {own(b'style')}; script-src {own(b'script')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class StatusPage:
    """One per proxy, on its event loop."""

    def __init__(
        self,
        config: ProxyConfig,
        env: Env,
        *,
        engines: Engines,
        timelines: Timelines,
        cache: CacheControl,
        admission: Admission,
        drain: Drain,
    ) -> None:
        self._config = config
        self._clock = env.clock
        self._engines = engines
        self._health = engines.health
        self._timelines = timelines
        self._cache = cache
        self._admission = admission
        self._drain = drain
        self._page, self._policy = b"", ""
        self._version = own_version()
        self._nodes: OrderedDict[str, NodeView] = OrderedDict()  # last answers; the node asked longest ago is first
        self._turn = asyncio.Lock()
        self._made, self._made_at = (b"", b""), float("-inf")

    def install(self, app: web.Application) -> None:
        self._page, self._policy = page()
        app.add_routes(
            [
                web.get("/", self._show),
                web.get("/status.json", self._tell),
                web.get("/pdx/requests", self._list_requests),
                web.get("/pdx/requests/{transfer}", self._tell_request),
            ]
        )

    async def _show(self, _request: web.Request) -> web.Response:
        """Needs no key: the page itself contains no data."""
        headers = {"Content-Security-Policy": self._policy, "Referrer-Policy": "no-referrer"}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=_guarded(headers))

    async def _tell(self, request: web.Request) -> web.Response:
        try:
            self._cache.access.check(request, reads=True)
        except RequestRefused as refusal:
            return error_answer(refusal)
        plain, packed = await self.document()
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=plain, content_type="application/json", headers=_guarded({}))
        headers = _guarded({"Content-Encoding": "gzip"})
        return web.Response(body=packed, content_type="application/json", headers=headers)

    async def _list_requests(self, _request: web.Request) -> web.Response:
        return json_response({"requests": self._timelines.view()})

    async def _tell_request(self, request: web.Request) -> web.Response:
        found = self._timelines.find(request.match_info["transfer"])
        return error_response(404, "no such transfer (any more)") if found is None else json_response(found)

    async def document(self) -> tuple[bytes, bytes]:
        """The document, at most a second old: plain, and compressed."""
        async with self._turn:  # if a client disconnects, the next one continues
            if self._clock() - self._made_at >= FRESH_S:
                await self._ask_nodes()
                plain = msgspec.json.encode(await in_turns(self._overview()))
                self._made = plain, await asyncio.to_thread(gzip.compress, plain, 1)
                self._made_at = self._clock()
        return self._made

    # ---- nodes ------------------------------------------------------------------------------

    async def _ask_nodes(self) -> None:
        known = self._cache.instances.all()
        for name in self._nodes.keys() - known.keys():
            del self._nodes[name]
        for name in known.keys() - self._nodes.keys():
            self._nodes[name] = NodeView(_said(name), rooms=_reported(known[name]))
            self._nodes.move_to_end(name, last=False)
        asked = {name: known[name] for name in list(self._nodes)[:AT_A_TIME]}
        for name, outcome in (await self._cache.verbs.settled(asked, Status(), WAIT_S)).items():
            self._nodes[name] = _node(self._nodes[name], outcome)
            self._nodes.move_to_end(name)

    # ---- the document -----------------------------------------------------------------------

    def readiness(self) -> dict[str, Any]:
        """As /health reports it. `pairs`: of nodes between which KV can go: a probe has gone that way, or they are the
        same node."""
        ready = [each for each in self._engines.all() if self._health.of(each.url).is_ready]
        decoders = sum(engine.decodes for engine in ready)
        pairs, missing = self._engines.pairs()
        state: dict[str, Any] = {
            "status": "ok" if decoders else "unavailable",
            "decoders": decoders,
            "prefillers": sum(engine.prefills for engine in ready),
            "nodes": self._engines.nodes(),
            "pairs": pairs,
        }
        if missing:
            state["not_reached"] = [f"{first} > {last}" for first, last in missing]
        if apart := self._engines.apart():
            state["apart"] = apart
        return state

    def _overview(self) -> Steps[Overview]:
        """Build the document; the event loop gets its turn between every few rows."""
        state, now_ns = self.readiness(), time.monotonic_ns()
        listed = sorted(self._engines.all(), key=lambda each: self._health.of(each.url).is_ready)
        nodes = sorted(self._nodes.values(), key=lambda node: (not node.problem, node.name))
        engines, requests = list[EngineView](), list[RequestView]()
        yield
        for engine in listed[:MOST_ENGINES]:
            engines.append(self._engine(engine))
            if not len(engines) % _STEP:
                yield
        under_way = list(self._timelines.under_way)
        for timeline in under_way[:MOST_REQUESTS]:
            requests.append(_request(timeline, now_ns))
            if not len(requests) % _STEP:
                yield
        unreached = [f"no probe has gone this way: {pair}" for pair in state.get("not_reached", ())]
        return Overview(
            version=self._version,
            status=state["status"],
            prefillers=state["prefillers"],
            decoders=state["decoders"],
            nodes=nodes[:MOST_NODES],
            engines=engines,
            requests=requests,
            ended=[_request(each, each.ended_ns) for each in reversed(self._timelines.ended)],
            fallbacks=[
                FallbackView(each.transfer, each.why, round((now_ns - each.at_ns) / 1e9, 1))
                for each in self._timelines.fallbacks
            ],
            waiting=self._admission.waiting,
            load=self._drain.load,
            workers=self._config.workers,
            worker=self._drain.seat.number,
            notes=[_said(each, 4 * _TEXT) for each in (*state.get("apart", ()), *unreached)],
            more_nodes=max(0, len(nodes) - MOST_NODES),
            more_engines=max(0, len(listed) - MOST_ENGINES),
            more_requests=max(0, len(under_way) - MOST_REQUESTS),
        )

    def _engine(self, engine: Engine) -> EngineView:
        record = self._health.of(engine.url)
        states = {"draining": engine.draining, "no node": engine.detached}
        return EngineView(
            name=_said(engine.name),
            url=_said(engine.url, _TEXT),
            role=engine.role,
            state=", ".join([record.state, *(word for word, holds in states.items() if holds)]),
            node=_said(engine.node),
            models=_said(", ".join(islice(record.models or (), _MOST_LISTED)), _TEXT),
            requests=record.in_flight + record.others,
            backlog_tokens=record.backlog,
            tokens_s=_measure(record.computing.gb_s * 1e9),
        )


def _guarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **headers}


def _said(text: str, most: int = _NAME) -> str:
    """Text from others, made safe for terminals and pages."""
    return printable(text, most)


def _count(said: int) -> int:
    """A node's count, limited to what JSON readers can represent."""
    return max(0, min(said, _MOST_COUNTED))


def _measure(said: float) -> float:
    """Likewise for a measured value; JSON has no infinity."""
    return round(said, 2) if 0 <= said <= _MOST_COUNTED else 0.0


def _request(timeline: Timeline, now_ns: int) -> RequestView:
    at = {moment.event: moment for moment in timeline.moments}
    came_ns = at[Event.RECEIVED].at_ns if Event.RECEIVED in at else now_ns

    def since_ms(event: Event) -> float | None:
        return round((at[event].at_ns - came_ns) / 1e6, 1) if event in at else None

    def engine(event: Event) -> str:
        return _said(at[event].engine) if event in at else ""

    return RequestView(
        id=timeline.transfer,
        route=timeline.route,
        mode=timeline.mode,
        phases=phases(timeline.moments, now_ns),
        why=timeline.why,
        outcome=timeline.outcome,
        prefill=engine(Event.PREFILL_SENT),
        decode=engine(Event.DECODE_SENT),
        prompt_tokens=timeline.prompt_tokens,
        cached_tokens=timeline.cached_tokens or 0,
        first_token_ms=since_ms(Event.FIRST_TOKEN),
        landed_ms=since_ms(Event.LANDED if Event.LANDED in at else Event.PUSHED),
    )


def _reported(instance: Instance) -> list[Room]:
    """The part of a row that every heartbeat reports."""
    report = instance.report
    return (
        [Room("memory", _count(report.arena_bytes - report.free_bytes), _count(report.arena_bytes))]
        if report is not None
        else []
    )


def _node(before: NodeView, outcome: Outcome) -> NodeView:
    """A node's row, from its answer to a status request."""
    if not isinstance(outcome, NodeStatus):
        problem = outcome.text if isinstance(outcome, Refused) else "its answer is none"
        return msgspec.structs.replace(before, problem=_said(problem, _TEXT))
    arenas = [
        Room(
            _said(f"GPU {one.gpu}" if one.gpu else "memory"),
            _count(one.total_bytes - one.free_bytes),
            _count(one.total_bytes),
        )
        for one in outcome.arenas[:_MOST_LISTED]
    ]
    tiers = [
        Room(
            _said(tier.name),
            _count(tier.used_bytes),
            _count(tier.limit_bytes),
            place=_said(tier.place, _TEXT),
            hits=_count(tier.hits),
            misses=_count(tier.misses),
            load_gb_s=_measure(tier.load_gb_s),
            state=_said(tier.state, _TEXT),
        )
        for tier in outcome.tiers[:_MOST_LISTED]
    ]
    counters = outcome.counters
    degraded = {
        _said(name.removeprefix("degraded_")): _count(count)
        for name, count in counters.items()
        if name.startswith("degraded_")
    }
    most = sorted(degraded.items(), key=lambda each: -each[1])[:_MOST_LISTED]
    return NodeView(
        name=before.name,
        uptime_s=_measure(outcome.uptime_s),
        rooms=[*arenas, *tiers][:_MOST_LISTED],
        links=_links(outcome.peers),
        looked_up=_count(counters.get("looked_up_chunks", 0)),
        found=_count(counters.get("hit_chunks", 0)),
        transfers=_count(outcome.transfers),
        degraded=dict(most),
    )


def _links(peers: Collection[PeerStatus]) -> list[Link]:
    """Summarizes connections to peers: some numbers per channel, and for unreachable peers."""
    by_channel: dict[str, list[PeerStatus]] = {}
    for peer in peers:
        by_channel.setdefault(peer.channel if peer.state == _READY else "", []).append(peer)
    return [
        Link(
            channel=_said(channel),
            peers=len(those),
            gb_s=_measure(min(peer.rates.get(channel, 0.0) for peer in those)),
            pushes=_count(sum(peer.pushes + peer.landing for peer in those)),
            moved_bytes=_count(sum(peer.sent_bytes + peer.landed_bytes for peer in those)),
            why="" if channel else _said(f"{those[0].name} is {those[0].state}: {those[0].why}", _TEXT),
        )
        for channel, those in sorted(by_channel.items())[:_MOST_LISTED]
    ]
