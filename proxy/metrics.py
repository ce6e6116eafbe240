"""The proxy's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdx.proxy.health import Health
from pdx.proxy.roster import Engine

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Counters and histograms; gauges are read off the roster when somebody asks."""

    def __init__(self, *, engines: Callable[[], list[Engine]], health: Health, events: Mapping[str, int]) -> None:
        """`events`: what the parts count that know nothing of metrics, by name."""
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(engines, health))
        self.registry.register(_Events(events))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"pdx_proxy_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests finished.", "route", "mode", "outcome")
        self.fallbacks = counter(
            "fallbacks", "Requests that could not be served in the mode planned for them.", "reason"
        )
        self.failovers = counter("failovers", "Legs given to another engine.", "leg", "reason")
        self.exhausted = counter(
            "exhausted",
            "Requests refused because this process lacked descriptors, ports, buffers or room for bodies.",
            "lack",
        )
        self.cancels = counter("cancels", "Transfers given up, told to the nodes concerned.", "reason")
        self.stripped = counter("stripped", "Requests whose own transfer parameters were removed.")
        self.unplaced = counter(
            "unplaced", "Requests on engines that no node has reported: nothing is pushed for them."
        )
        self.control_dropped = counter(
            "control_dropped",
            "What nodes said and was not believed or not understood.",
            "reason",
        )
        self.reports = counter("reports", "Node reports taken in.")
        self.ttft = Histogram(
            "pdx_proxy_ttft_seconds",
            "From a streaming request's arrival to its first token.",
            ("route", "mode"),
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )

    def expose(self) -> bytes:
        """In the Prometheus text format."""
        return generate_latest(self.registry)


class _Events(Collector):
    """Names appear when they are first counted."""

    def __init__(self, events: Mapping[str, int]) -> None:
        self._events = events

    def collect(self) -> Iterator[Metric]:
        counted = CounterMetricFamily(
            "pdx_proxy_events", "Connections that were not served, messages dropped, internal errors.", labels=["event"]
        )
        for name, count in sorted(self._events.items()):
            counted.add_metric([name], count)
        yield counted


class _Engines(Collector):
    """Engines come and go; their series must go with them."""

    def __init__(self, engines: Callable[[], list[Engine]], health: Health) -> None:
        self._engines = engines
        self._health = health

    def collect(self) -> Iterator[Metric]:
        listed = self._engines()
        roles = GaugeMetricFamily("pdx_proxy_engines", "Engines known, by role.", labels=["role"])
        roles.add_metric(["prefill"], sum(engine.prefills for engine in listed))
        roles.add_metric(["decode"], sum(engine.decodes for engine in listed))
        yield roles
        legs = GaugeMetricFamily("pdx_proxy_engine_in_flight", "Legs under way.", labels=["engine", "url"])
        for engine in listed:
            legs.add_metric([engine.name, engine.url], self._health.of(engine.url).in_flight)
        yield legs
        ready = GaugeMetricFamily(
            "pdx_proxy_engine_ready",
            "1: it takes requests. 0: it has not answered yet, or is suspect.",
            labels=["engine", "url"],
        )
        for engine in listed:
            ready.add_metric([engine.name, engine.url], self._health.of(engine.url).is_ready)
        yield ready
        failures = CounterMetricFamily(
            "pdx_proxy_engine_failures", "Legs that failed by an engine's fault.", labels=["reason"]
        )
        for reason, count in self._health.failures.items():
            failures.add_metric([reason], count)
        yield failures
