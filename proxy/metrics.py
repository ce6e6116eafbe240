"""The proxy's Prometheus metrics; `pdx.telemetry.names` says what each is."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import product

from prometheus_client import Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdx.proxy.engines import Engines
from pdx.proxy.health import Reason
from pdx.proxy.leg import OWN_LACK
from pdx.proxy.plan import Mode, modes
from pdx.proxy.routes import Route
from pdx.telemetry.env import Env
from pdx.telemetry.metrics import families_of, family, registry
from pdx.telemetry.names import METRICS
from pdx.wire.verbs import VERBS


class Outcome(StrEnum):
    """The outcome of a request."""

    OK = "ok"
    BAD_REQUEST = "bad_request"  # refused by this proxy
    LIMITED = "limited"  # refused by this proxy because it or the client has too many requests
    CLIENT_ERROR = "client_error"  # refused by an engine
    ENGINE_ERROR = "engine_error"  # an engine answered with a 5xx
    BROKEN = "broken"  # an engine died, did not end its answer, or ended it in an error
    UNAVAILABLE = "unavailable"  # no engine could be reached
    CLIENT_GONE = "client_gone"
    STOPPED = "stopped"  # this proxy was shutting down and stopped waiting
    INTERNAL = "internal"  # a bug in this proxy


# Label values of each counter: every series exists from the start, so that `rate` sees the first event.
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
    *("placed_without_tokens", "spans_dropped", "spans_failed", "spans_sent", "unauthorized"),
    *("chunk_changes", "chunk_changes_missed", "chunk_index_full", "controllers_denied"),
    *("replies_late", "replies_misplaced", "replies_wrong", "descriptors_short", "strangers_dropped", "peers_denied"),
]


class Metrics(Collector):
    """Counters and histograms. What other parts count without knowing about metrics is read at scrape time: engines and
    events come and go, and so do their series."""

    def __init__(self, env: Env, *, engines: Engines, dropped: Mapping[str, int]) -> None:
        """`dropped`: counts of messages from nodes that were not accepted, by reason."""
        self._engines = engines
        self._health = engines.health
        self._events = env.counters
        self._dropped = dropped
        self._timings = timings = env.timings
        self.registry = registry(self)

        def counter(name: str, *values: Iterable[str]) -> Counter:
            about = METRICS[f"pdx_proxy_{name}"]
            made = Counter(f"pdx_proxy_{name}", about.text, about.labels, registry=self.registry)
            for each in product(*values) if values else ():
                made.labels(*each)
            return made

        self.requests = counter("requests", Route, [*Mode, ""], Outcome)
        self.fallbacks = counter("fallbacks", [*_FALLBACKS, *_NOT_FORWARDED, "first_token_differs"])
        self.failovers = counter("failovers", ["prefill", "decode"], Reason)
        self.exhausted = counter("exhausted", ["bodies", *(errno.errorcode[each] for each in OWN_LACK)])
        self.cancels = counter("cancels", _CANCELS)
        self.stripped = counter("stripped")
        self.unplaced = counter("unplaced")
        self.verbs = counter("verbs", VERBS, ["ok"])
        self.reports = counter("reports")
        self.waiting = Gauge("pdx_proxy_waiting", METRICS["pdx_proxy_waiting"].text, registry=self.registry)
        served = [(route, mode) for route in Route for mode in modes(route)]
        # Creates all series now, so that `rate` sees the first request, and requests need not look theirs up.
        self.ttft = {each: timings["pdx_proxy_ttft_seconds", *each] for each in served}
        self.duration = {each: timings["pdx_proxy_request_seconds", *each] for each in served}
        self.itl = {mode: timings["pdx_proxy_itl_seconds", mode] for mode in Mode}
        self.prefill, self.decode = (timings["pdx_proxy_leg_seconds", leg] for leg in ("prefill", "decode"))
        self.handoff = timings[("pdx_proxy_handoff_seconds",)]

    def expose(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read elsewhere."""
        listed = [(each, self._health.of(each.url)) for each in self._engines.all()]
        roles = {
            ("prefill",): sum(engine.prefills for engine, _ in listed),
            ("decode",): sum(engine.decodes for engine, _ in listed),
        }
        yield family("pdx_proxy_engines", roles)
        legs = {(engine.name, engine.url): record.in_flight for engine, record in listed}
        yield family("pdx_proxy_engine_in_flight", legs)
        yield family(
            "pdx_proxy_engine_ready", {(engine.name, engine.url): record.is_ready for engine, record in listed}
        )
        for name, known, counted in (
            ("engine_failures", Reason, self._health.failures),
            ("events", _EVENTS, self._events),
            ("control_dropped", _DROPS, self._dropped),
        ):
            counts = sorted({**dict.fromkeys(known, 0), **counted}.items())
            yield family(f"pdx_proxy_{name}", {(each,): count for each, count in counts})
        yield from families_of(self._timings)
