"""Traces of requests, joined with those of clients and engines by `traceparent`.

A request's spans are created after it ends, from its own times and from what nodes and engines have reported about its
transfer (`pdx.proxy.timelines`): nodes need no tracing code. Spans contain neither text nor headers of the request.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from pdx.errors import ConfigError, LegFailed
from pdx.extras import install
from pdx.proxy.config import ProxyConfig
from pdx.proxy.engines import Engine
from pdx.proxy.exchange import BEGUN, TRACE, Exchange
from pdx.proxy.headers import TRACEPARENT
from pdx.proxy.metrics import Outcome
from pdx.proxy.reply import Handler
from pdx.proxy.routes import Route
from pdx.telemetry.faults import printable
from pdx.telemetry.span import Span, Value
from pdx.telemetry.timeline import Event, Moment

if TYPE_CHECKING:
    from pdx.telemetry.otlp import Collector

LINGER_S = 1.0  # delay after a request's end, by which nodes have reported everything
MAX_LINGERING = 1024  # requests waiting for that; for further ones, reports of nodes may be missing
MAX_LEGS = 16  # legs per request that get a span …
MAX_EVENTS = 64  # … and moments
# Versions above 00 may append further fields.
_PARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII
)
_OPERATIONS: dict[str, str] = {
    Route.COMPLETIONS: "text_completion",
    **dict.fromkeys((Route.CHAT, Route.RESPONSES, Route.MESSAGES), "chat"),
    **dict.fromkeys(("/v1/embeddings", "/v2/embed"), "embeddings"),
}
_FAULTS = frozenset({Outcome.ENGINE_ERROR, Outcome.BROKEN, Outcome.UNAVAILABLE, Outcome.STOPPED, Outcome.INTERNAL})
_SHOWN = frozenset(Event) - {Event.RECEIVED, Event.DONE}  # a span's own beginning and end


class _Leg(msgspec.Struct):
    name: str
    engine: Engine
    id: int
    start_ns: int
    end_ns: int = 0
    error: str = ""


class Trace:
    """One request's trace. Owned by its task until the request ends, then by `Traces`."""

    def __init__(self, method: str, route: str, number: int, parent: int) -> None:
        """`number`: the trace id. `parent`: the client's span id; 0 if this proxy starts the trace."""
        self._method, self._route = method, route
        self._number, self._parent = number, parent
        self._start_ns = time.monotonic_ns()
        self.ended_ns = 0
        self.exchange: Exchange | None = None  # until the request ends
        self.queued: tuple[int, int] | None = None  # when it started and stopped waiting for its turn
        self._legs: list[_Leg] = []
        self._moments: list[Moment] = []
        self._attributes: dict[str, Value | None] = {}
        self._error = ""
        self._id = random.getrandbits(64)

    @property
    def name(self) -> str:
        """The trace id as text."""
        return f"{self._number:032x}"

    @contextmanager
    def leg(self, name: str, engine: Engine, headers: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Inside the block the leg is in flight, with these headers for its engine."""
        leg = _Leg(name, engine, random.getrandbits(64), time.monotonic_ns())
        if len(self._legs) < MAX_LEGS:
            self._legs.append(leg)
        try:
            yield {**headers, TRACEPARENT: f"00-{self.name}-{leg.id:016x}-01"}
        except BaseException as error:
            leg.error = str(error.reason) if isinstance(error, LegFailed) else type(error).__name__
            raise
        finally:
            leg.end_ns = time.monotonic_ns()

    def end(self, status: int, error: str) -> None:
        """The client was answered: from now on, only numbers and names of its request are kept."""
        self.ended_ns, self._error = time.monotonic_ns(), error
        exchange, self.exchange = self.exchange, None
        about = self._attributes
        about |= {"http.request.method": self._method, "http.route": self._route}
        about |= {"http.response.status_code": status or None, "gen_ai.operation.name": _OPERATIONS.get(self._route)}
        if exchange is None:
            return
        timeline = exchange.timeline
        self._moments = timeline.moments
        self._error = error or (timeline.outcome if timeline.outcome in _FAULTS else "")
        model = exchange.model if timeline.outcome == Outcome.OK else None  # otherwise it could be any text
        first_ns = exchange.seen.get(Event.FIRST_TOKEN, 0) if exchange.streams else 0
        about |= {
            "gen_ai.request.model": printable(model, 128) if model else None,
            "gen_ai.request.stream": exchange.streams,
            "gen_ai.usage.input_tokens": timeline.prompt_tokens or None,
            "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
            "gen_ai.response.time_to_first_chunk": (first_ns - self._start_ns) / 1e9 if first_ns else None,
            "pdx.transfer": timeline.transfer,
            "pdx.mode": timeline.mode,
            "pdx.why": timeline.why or None,
            "pdx.outcome": timeline.outcome,
        }

    def spans(self) -> list[Span]:
        """All spans, from what has been reported by now."""
        now_ns = time.monotonic_ns()  # clocks of other hosts are converted, and nodes may report any time
        moments = [
            msgspec.structs.replace(each, at_ns=min(max(each.at_ns, self._start_ns), now_ns))
            for each in sorted(self._moments, key=lambda each: each.at_ns)
            if each.event in _SHOWN
        ]
        events = [(each.event, each.at_ns, _facts(each)) for each in moments[:MAX_EVENTS]]
        name = f"{self._method} {self._route}"
        own = (self._number, self._id, self._parent, self._start_ns, self.ended_ns)
        found = [Span(name, *own, self._attributes, "SERVER", self._error, events)]
        if self.queued is not None:
            found.append(self._inner("pdx.queue", *self.queued, self._id))
        for each in self._legs:
            where = urlsplit(each.engine.url)
            about = {"pdx.engine": each.engine.name, "server.address": where.hostname, "server.port": where.port}
            times = each.start_ns, each.end_ns or now_ns
            own = (self._number, each.id, self._id, *times)
            found.append(Span(f"pdx.{each.name}", *own, about, "CLIENT", each.error))
        return [*found, *self._of_transfer(moments)]

    def _of_transfer(self, moments: Sequence[Moment]) -> Iterator[Span]:
        """If there are several shards, the last one to see an event counts, and bytes are added up."""
        last = {each.event: each.at_ns for each in moments}
        prefill = next((each.id for each in self._legs if each.name == "prefill" and not each.error), self._id)
        arrived = Event.LANDED if Event.LANDED in last else Event.PUSHED
        for name, start, end, parent in (
            ("pdx.push", Event.ADMITTED, arrived, prefill),
            ("pdx.handoff", Event.PREFILL_END, Event.RUNNABLE, self._id),
        ):
            if start in last and end in last:
                nbytes = sum(each.nbytes for each in moments if each.event == end)
                yield self._inner(name, last[start], last[end], parent, {"pdx.bytes": nbytes or None})

    def _inner(
        self, name: str, start_ns: int, end_ns: int, parent: int, about: Mapping[str, Value | None] | None = None
    ) -> Span:
        return Span(name, self._number, random.getrandbits(64), parent, start_ns, max(start_ns, end_ns), about or {})


def _facts(moment: Moment) -> dict[str, Value]:
    about: dict[str, Value] = {"pdx.engine": moment.engine, "pdx.bytes": moment.nbytes, "pdx.tokens": moment.tokens}
    return {name: value for name, value in about.items() if value}


def open_traces(config: ProxyConfig, counters: Counter[str]) -> Traces | None:
    """None if traces are off. :raises ConfigError: they are configured but unavailable."""
    endpoint = config.otlp_traces_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not endpoint:
        return None
    try:
        from pdx.telemetry.otlp import Collector

        return Traces(Collector(endpoint, "pdx-proxy"), config.otlp_traces_sample, counters)
    except (ImportError, ValueError) as error:  # ValueError: an invalid setting in the environment
        hint = f": {install('otel')}" if isinstance(error, ImportError) else ""
        raise ConfigError(f"--otlp-traces-endpoint {endpoint}: {error}{hint}") from error


def chosen(said: str, sample: float) -> tuple[int, int, int]:
    """The request's trace id, the client's span id, and flags: 1 means sampled.

    `said`: the client's `traceparent`; if it is invalid, a trace begins, without such a span. `sample`: the share of
    those that are sampled, chosen by trace id as all such samplers do.
    """
    if (found := _PARENT.fullmatch(said)) is not None:
        return int(found[1], 16), int(found[2], 16), int(found[3], 16)
    number = random.getrandbits(128)
    return number, 0, int((number & (1 << 64) - 1) < sample * (1 << 64))


class Traces:
    """All traces of one process. `look` must be called regularly."""

    def __init__(self, collector: Collector, sample: float, counters: Counter[str]) -> None:
        self._collector = collector
        self._sample = sample
        self._counters = counters
        self._ended: deque[Trace] = deque()

    def traced(self, handler: Handler) -> Handler:
        """Wrap a handler so that each of its requests has a trace."""

        async def answer(request: web.Request) -> web.StreamResponse:
            number, parent, flags = chosen(request.headers.get(TRACEPARENT, ""), self._sample)
            if not parent:
                # Engines are told the decision: otherwise they would decide for themselves.
                request[BEGUN] = f"00-{number:032x}-{random.getrandbits(64):016x}-{flags:02x}"
            if not flags & 1:
                return await handler(request)
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else ""
            request[TRACE] = trace = Trace(request.method, route, number, parent)
            status, failed = 0, ""
            try:
                response = await handler(request)
                status = response.status
            except Exception as error:
                failed = type(error).__name__
                raise
            finally:
                trace.end(status, failed)
                self._ended.append(trace)
                if len(self._ended) > MAX_LINGERING:
                    self._give_oldest()
            return response

        return answer

    def look(self) -> None:
        """Export the requests whose nodes have had time to report."""
        before_ns = time.monotonic_ns() - int(LINGER_S * 1e9)
        while self._ended and self._ended[0].ended_ns < before_ns:
            self._give_oldest()
        for what in ("sent", "failed", "dropped"):
            self._counters[f"spans_{what}"] = getattr(self._collector, what)

    def _give_oldest(self) -> None:
        self._collector.give(self._ended.popleft().spans())

    async def close(self) -> None:
        """Export what is left, if that can be done soon."""
        while self._ended:
            self._give_oldest()
        await asyncio.to_thread(self._collector.close)
