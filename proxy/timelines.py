"""Recent transfers and their moments: the proxy's own, and those that nodes report later by their own clocks. Pure."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from pdx.proxy.engines import MAX_NODES
from pdx.proxy.plan import Mode
from pdx.proxy.routes import Route
from pdx.telemetry.histogram import Timings
from pdx.telemetry.recent import remember
from pdx.telemetry.timeline import Event, Moment, breakdown
from pdx.wire.messages import Mark
from pdx.wire.proxy import NodeReport

KEPT = 1000  # timelines
MAX_MOMENTS = 4096  # per transfer; also bounds what nodes report
LAST = 20  # number of finished requests, and of fallbacks, that are shown


class Timeline(msgspec.Struct, eq=False):
    """One transfer. Only the request that owns it and `Timelines.merge` modify it."""

    transfer: str
    route: Route
    mode: Mode
    why: str
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # of these, according to the prefill engine
    outcome: str = ""  # empty: in progress
    ended_ns: int = 0
    moments: list[Moment] = []
    awaited: set[str] = msgspec.field(default_factory=lambda: {Event.PREFILL_END, Event.RUNNABLE})  # of its handoff
    near: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # set when a node reports prefill's end is near

    def add(self, moment: Moment) -> None:
        """Add a moment, unless there are too many."""
        if len(self.moments) < MAX_MOMENTS:
            self.moments.append(moment)
        if moment.event == Event.NEAR:
            self.near.set()

    def view(self) -> dict[str, Any]:
        """The timeline as shown to others."""
        moments = sorted(self.moments, key=lambda moment: moment.at_ns)
        return {
            "transfer_id": self.transfer,
            "route": self.route,
            "mode": self.mode,
            "why": self.why,
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "moments": moments,
            "breakdown": breakdown(moments),
        }


class Fallback(msgspec.Struct, frozen=True):
    """A request that could not be served as planned."""

    transfer: str
    why: str
    at_ns: int


class Timelines:
    """The `keep` latest timelines, by transfer id; also all requests in progress, the LAST finished ones, and
    fallbacks."""

    def __init__(self, keep: int = KEPT, timings: Timings | None = None) -> None:
        self._keep = keep
        self._handoffs = (Timings() if timings is None else timings)[("pdx_proxy_handoff_seconds",)]
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()
        self.under_way: dict[Timeline, None] = {}  # oldest first
        self.ended: deque[Timeline] = deque(maxlen=LAST)
        self.fallbacks: deque[Fallback] = deque(maxlen=LAST)

    def open(self, timeline: Timeline) -> None:
        """Keep a new timeline, dropping the oldest if need be."""
        remember(self._timelines, timeline.transfer, timeline, self._keep)

    def begin(self, timeline: Timeline) -> None:
        """The timeline's request starts; `end` must follow."""
        self.under_way[timeline] = None

    def end(self, timeline: Timeline, outcome: str, now_ns: int) -> None:
        timeline.outcome, timeline.ended_ns = outcome, now_ns
        del self.under_way[timeline]
        self.ended.append(timeline)

    def rename(self, timeline: Timeline, transfer: str) -> None:
        """Give the timeline's transfer another id."""
        if self._timelines.pop(timeline.transfer, None) is not None:
            self._timelines[transfer] = timeline
        timeline.transfer = transfer

    def merge(self, marks: Iterable[Mark], offset_ns: int = 0) -> None:
        """Add marks that nodes recorded; `offset_ns` converts their clock to this process's (see `Clocks`).

        Marks of transfers that are unknown, or no longer known, are dropped.
        """
        for mark in marks:
            timeline = self._timelines.get(mark.transfer)
            if timeline is not None:
                timeline.add(
                    Moment(
                        event=mark.event,
                        at_ns=mark.at_ns + offset_ns,
                        engine=mark.engine,
                        nbytes=mark.nbytes,
                        tokens=mark.tokens,
                    )
                )
                if mark.event in timeline.awaited:
                    timeline.awaited.discard(mark.event)
                    self._note_handoff(timeline)

    def _note_handoff(self, timeline: Timeline) -> None:
        """Record the handoff once, however much nodes report."""
        handoff_ms = None if timeline.awaited else breakdown(timeline.moments).handoff_ms
        if handoff_ms is not None:
            self._handoffs.observe(max(0.0, handoff_ms / 1000))

    def view(self) -> list[dict[str, Any]]:
        return [timeline.view() for timeline in self._timelines.values()]

    def find(self, transfer: str) -> dict[str, Any] | None:
        timeline = self._timelines.get(transfer)
        return None if timeline is None else timeline.view()


WINDOW_NS = 30 * 10**9


class _Window(msgspec.Struct):
    """The smallest offset since `start_ns`, and that of the previous window."""

    start_ns: int
    least_ns: int
    before_ns: int


class Clocks:
    """The offset of each node's CLOCK_MONOTONIC, by node and epoch.

    A node on this host shares the clock, so its offset is 0. For another host, a report's time of arrival minus its
    time of sending is the true offset plus its latency, so the smallest such difference is the best estimate. A moment
    converted with it is late by at most the lowest latency of reports within the last WINDOW_NS (about 0.1 ms on one
    network, plus the delay of this process's event loop), and wrong in either direction by the drift between the two
    clocks within 2 x WINDOW_NS: 6 ms at 100 ppm, far less under NTP. Older reports are dropped because drift would add
    up to seconds over days.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._windows: OrderedDict[tuple[str, int], _Window] = OrderedDict()  # least recently updated first

    def offset_ns(self, report: NodeReport, received_ns: int) -> int:
        """What to add to times in this report, which arrived at `received_ns` of this host's clock."""
        if report.host in ("", self._host):
            return 0
        key = (report.node, report.epoch)
        seen_ns = received_ns - report.sent_ns
        window = self._windows.get(key) or _Window(received_ns, seen_ns, seen_ns)
        remember(self._windows, key, window, MAX_NODES)
        age_ns = received_ns - window.start_ns
        if age_ns >= WINDOW_NS:
            window.before_ns = window.least_ns if age_ns < 2 * WINDOW_NS else seen_ns
            window.start_ns, window.least_ns = received_ns, seen_ns
        window.least_ns = min(window.least_ns, seen_ns)
        return min(window.least_ns, window.before_ns)
