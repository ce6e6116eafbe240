"""The proxy's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdx.proxy.engines import Engines
from pdx.proxy.health import Health, Reason
from pdx.proxy.leg import OWN_LACK
from pdx.proxy.plan import Mode, modes
from pdx.proxy.routes import Route

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BUCKETS_S = (*_TTFT_BUCKETS_S, 300.0, 600.0, 3600.0)


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    BAD_REQUEST = "bad_request"  # refused by this proxy
    LIMITED = "limited"  # refused by this proxy, because it or its client has too many
    CLIENT_ERROR = "client_error"  # refused by an engine
    ENGINE_ERROR = "engine_error"  # an engine answered with a 5xx
    BROKEN = "broken"  # an engine died or did not end its answer
    UNAVAILABLE = "unavailable"  # no engine could be reached
    CLIENT_GONE = "client_gone"
    STOPPED = "stopped"  # this proxy was told to end, and did not wait any longer
    INTERNAL = "internal"  # a fault of this proxy


# What counters count, by their labels: each has a series from the start, so that the first event counts for `rate`.
_PREFILL_FAILED = [f"prefill_{reason}" for reason in (*Reason, "exhausted", "internal")]
_FALLBACKS = ["no_prefiller", "layouts", "detached", *_PREFILL_FAILED]
_NOT_FORWARDED = [
    *("engine_unknown", "engine_looks_back", "engine_stops_short"),
    *("min_tokens", "first_token", "near_ceiling"),
]
_CANCELS = [
    *_FALLBACKS,
    *("client_gone", "stopped", "internal", "no_decoder", "exhausted", "decode_failed", "decode_refused"),
    *("prefill_late", "prefill_failed_over"),
]
_DROPS = [
    *("malformed", "version", "not_its_name", "not_its_host", "peer_full"),
    *("nodes", "epochs", "engines", "unroutable", "owned"),
]
_EVENTS = [
    *("accepts_failed", "connections_displaced", "connections_refused", "requests_malformed", "refused_while_stopping"),
    *("heads_overdue", "heads_too_large", "hints_refused", "internal_errors", "messages_dropped"),
    *("placed_without_tokens", "unauthorized"),
    *("chunk_changes", "chunk_changes_missed", "chunk_index_full", "controllers_denied"),
    *("replies_late", "replies_misplaced", "replies_wrong", "descriptors_short", "strangers_dropped", "peers_denied"),
]


class Metrics(Collector):
    """Counters and histograms. What the parts count that know nothing of metrics is read where it lies: engines and
    events come and go, and their series go with them."""

    def __init__(
        self, *, engines: Engines, health: Health, events: Mapping[str, int], dropped: Mapping[str, int]
    ) -> None:
        """`events`: counts by name. `dropped`: what nodes said in vain, by reason."""
        self._engines = engines
        self._health = health
        self._events = events
        self._dropped = dropped
        self.registry = CollectorRegistry()
        self.registry.register(self)

        def counter(name: str, text: str, **labels: Iterable[str]) -> Counter:
            made = Counter(f"pdx_proxy_{name}", text, labels, registry=self.registry)
            for values in product(*labels.values()) if labels else ():
                made.labels(*values)
            return made

        self.requests = counter("requests", "Requests finished.", route=Route, mode=[*Mode, ""], outcome=Outcome)
        text = "Requests that could not be served in the mode planned for them."
        self.fallbacks = counter("fallbacks", text, reason=[*_FALLBACKS, *_NOT_FORWARDED, "first_token_differs"])
        text = "Legs given to another engine."
        self.failovers = counter("failovers", text, leg=["prefill", "decode"], reason=Reason)
        text = "Requests refused because this process lacked descriptors, ports, buffers or room for bodies."
        self.exhausted = counter("exhausted", text, lack=["bodies", *(errno.errorcode[each] for each in OWN_LACK)])
        self.cancels = counter("cancels", "Transfers given up, told to the nodes concerned.", reason=_CANCELS)
        self.stripped = counter("stripped", "Requests whose own transfer parameters were removed.")
        self.unplaced = counter(
            "unplaced", "Requests on engines that no node has reported: nothing is pushed for them."
        )
        text = "Verbs of controllers over HTTP; `outcome`: ok, or the error's class."
        self.verbs = counter("verbs", text, verb=[], outcome=["ok"])
        self.reports = counter("reports", "Node reports taken in.")
        self.waiting = Gauge("pdx_proxy_waiting", "Requests that wait for their turn.", registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _BUCKETS_S) -> Histogram:
            return Histogram(f"pdx_proxy_{name}", text, labels, buckets=buckets, registry=self.registry)

        text = "From a streaming request's arrival to its first token."
        ttft = histogram("ttft_seconds", text, "route", "mode", buckets=_TTFT_BUCKETS_S)
        text = "From a request's arrival to the end of its answer, of those that were answered."
        duration = histogram("request_seconds", text, "route", "mode")
        text = (
            "From when a leg was first sent to a prefill engine's whole answer, and to a decode engine's first bytes."
        )
        legs = histogram("leg_seconds", text, "leg")
        served = [(route, mode) for route in Route for mode in modes(route)]
        # All of their series, so that the first request counts for `rate`, and none has to look for its own.
        self.ttft = {each: ttft.labels(*each) for each in served}
        self.duration = {each: duration.labels(*each) for each in served}
        self.prefill, self.decode = legs.labels("prefill"), legs.labels("decode")

    def expose(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Those that lie elsewhere."""
        listed = [(each, self._health.of(each.url)) for each in self._engines.all()]
        roles = GaugeMetricFamily("pdx_proxy_engines", "Engines known, by role.", labels=["role"])
        roles.add_metric(["prefill"], sum(engine.prefills for engine, _ in listed))
        roles.add_metric(["decode"], sum(engine.decodes for engine, _ in listed))
        legs = GaugeMetricFamily("pdx_proxy_engine_in_flight", "Legs under way.", labels=["engine", "url"])
        text = "1: it takes requests. 0: it has not answered yet, or is suspect."
        ready = GaugeMetricFamily("pdx_proxy_engine_ready", text, labels=["engine", "url"])
        for engine, record in listed:
            legs.add_metric([engine.name, engine.url], record.in_flight)
            ready.add_metric([engine.name, engine.url], record.is_ready)
        text = "Legs that failed by an engine's fault."
        failures = CounterMetricFamily("pdx_proxy_engine_failures", text, labels=["reason"])
        text = "Connections that were not served, messages dropped, internal errors."
        events = CounterMetricFamily("pdx_proxy_events", text, labels=["event"])
        text = "What nodes said and was not believed or not understood."
        dropped = CounterMetricFamily("pdx_proxy_control_dropped", text, labels=["reason"])
        for family, known, counted in (
            (failures, Reason, self._health.failures),
            (events, _EVENTS, self._events),
            (dropped, _DROPS, self._dropped),
        ):
            for name, count in sorted({**dict.fromkeys(known, 0), **counted}.items()):
                family.add_metric([name], count)
        return iter((roles, legs, ready, failures, events, dropped))
