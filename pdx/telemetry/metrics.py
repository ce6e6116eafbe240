"""Prometheus metrics from counters and timings; names and texts are in `pdx.telemetry.names`."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdx.extras import own_version
from pdx.telemetry.histogram import Timings
from pdx.telemetry.names import METRICS

Values = Mapping[Any, float]  # by the labels' values, a tuple of text


def families_of(timings: Timings) -> Iterator[Metric]:
    found: dict[str, HistogramMetricFamily] = {}
    for (name, *values), each in timings.items():
        about = METRICS[name]
        family = found.setdefault(name, HistogramMetricFamily(name, about.text, labels=about.labels))
        bounds = [*map(floatToGoString, each.bounds), "+Inf"]
        family.add_metric(values, list(zip(bounds, accumulate(each.counts), strict=True)), each.sum)
    return iter(found.values())


def family(name: str, values: Values) -> Metric:
    """A counter or a gauge with these series."""
    about = METRICS[name]
    kind = CounterMetricFamily if about.kind == "counter" else GaugeMetricFamily
    made = kind(name, about.text, labels=about.labels)
    for labels, value in values.items():
        made.add_metric(labels, value)
    return made


def alone(name: str, value: float) -> Metric:
    """A metric without labels."""
    return family(name, {(): value})


def registry(collector: Collector) -> CollectorRegistry:
    """A process's registry: these metrics, its version, and the usual ones of a Prometheus client (`process_…`)."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # an extra series per counter
    made = CollectorRegistry(auto_describe=False)
    made.register(_Build())
    ProcessCollector(registry=made)
    made.register(collector)
    return made


class _Build(Collector):
    def collect(self) -> Iterable[Metric]:
        return [family("pdx_build_info", {(own_version(), platform.python_version()): 1})]
