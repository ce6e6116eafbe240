"""Both halves' counts, on their way to vLLM's own `/metrics` and log; `pdx.telemetry.names` describes each.

Workers' counts travel with the output of their steps, the scheduler half's with what vLLM makes of that output; vLLM
adds them up and hands them to the process that serves HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pdx.engine.tally import Tally
from pdx.telemetry.names import METRICS, OF_ENGINES


class PdxStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report: plain numbers by `Tally`'s names."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PdxStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, float]:
        """The counts as vLLM logs them for an interval."""
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


def stats_of(tally: Tally) -> PdxStats | None:
    """The counts since the last call; None: there are none."""
    counts = tally.take()
    return PdxStats(counts) if counts else None


class PdxMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The series of each engine, present at zero from the start, with vLLM's own labels before PDX's."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], engines: dict[int, Any]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, engines)
        self._series: dict[tuple[int, str], Any] = {}
        for name, values in OF_ENGINES.items():
            about = METRICS[f"vllm:pdx_{name}"]
            counter = self._counter_cls(
                name=f"vllm:pdx_{name}", documentation=about.text, labelnames=[*labelnames, *about.labels]
            )
            for engine, told in engines.items():
                for value in values:
                    self._series[engine, f"{name}/{value}"] = counter.labels(*told, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._series[engine_idx, name].inc(count)


def by_source(tokens: Mapping[str, int]) -> dict[Any, int]:
    """Tokens by vLLM's own names of sources; vLLM has none for a store that hosts share."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as Source

    names = {"disk": Source.DISK, "remote": Source.EXTERNAL_UNSPECIFIED, "peer": Source.P2P}
    found = Counter[Any]()
    for source, count in tokens.items():
        found[names.get(source, Source.HOST)] += count
    return dict(found)
