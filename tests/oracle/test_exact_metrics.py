"""What an engine's own /metrics says of PDX, by vLLM's schedulers, runners and Prometheus loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from exact_engine import FOREIGN, PDX, Engine, Shape, vllm_config
from node_harness import MIB, NodeThread
from oracle_bed import HISTORY, OracleBed, reader_of, written
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from pdx.engine.moved import Run
from pdx.engine.request import Hits, TrackedRequest
from pdx.telemetry.names import OF_ENGINES, SOURCES
from pdx.testing.waiting import wait_until
from pdx.vllm.releases import RELEASE, moves_groups


class Served:
    """vLLM's side of one server's engines: what it shows, and logs. As between its processes, counts are encoded."""

    def __init__(self, shape: Shape, model: Path) -> None:
        config = vllm_config(shape, "served", model, "ipc:///nowhere")
        self._prom = KVConnectorProm(config, ["model_name", "engine"], {at: ["toy", str(at)] for at in range(2)})
        self._log = KVConnectorLogging(config.kv_transfer_config)
        self.steps = 0  # that had something to say
        self.caches: list[Any] = []

    def shows(self, engine: Engine, number: int = 0) -> None:
        def observe(stats: Any) -> None:
            self.caches.append(stats.connector_prefix_cache_stats)
            if stats.kv_connector_stats is not None:
                self.steps += 1
                told = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.kv_connector_stats))
                self._prom.observe(told, number)
                self._log.observe(told)

        engine.observe = observe

    def logged(self) -> str:
        lines: list[str] = []
        self._log.log(lambda text, told: lines.append(told))
        return "".join(lines)


@pytest.fixture
def serving(model: Path) -> Iterator[Callable[..., Served]]:
    unregister_vllm_metrics()
    yield lambda **shape: Served(Shape(**shape), model)
    unregister_vllm_metrics()


def told(name: str, value: str, number: int = 0) -> float | None:
    label = {"hit_tokens": "source", "loads": "outcome"}.get(name, "direction")
    labels = {"model_name": "toy", "engine": str(number), label: value}
    return REGISTRY.get_sample_value(f"vllm:pdx_{name}_total", labels)


def hits(number: int = 0) -> dict[str, float | None]:
    """Tokens by source, of those that have any."""
    return {source: count for source in SOURCES if (count := told("hit_tokens", source, number))}


def test_counters_of_each_engine_begin_with_zero_and_count_its_loads_and_saves(
    bed: OracleBed, serving: Callable[..., Served]
) -> None:
    served = serving()
    zeros = [(name, value, number) for name, values in OF_ENGINES.items() for value in values for number in (0, 1)]
    assert [each for each in zeros if told(*each) != 0] == []
    writer = bed.engine("writer")
    served.shows(writer, 1)
    history = bed.tokens(HISTORY)
    writer.ask("w", history, 2)
    bed.settled()
    groups = writer.pdx.groups
    assert told("copied_bytes", "save", 1) == HISTORY // 256 * groups.chunk_bytes
    assert told("copied_seconds", "save", 1) > 0
    assert (hits(1), told("loads", "loaded", 1)) == ({}, 0)

    reader = reader_of(bed)
    served.shows(reader)
    reader.ask("a", history + bed.tokens(30, "a"), 12)
    assert hits() == {"memory": HISTORY}
    assert (told("loads", "loaded"), told("loads", "failed"), told("loads", "loaded", 1)) == (1, 0, 0)
    assert told("copied_bytes", "load") == HISTORY // 256 * groups.chunk_bytes
    assert told("copied_seconds", "load") > 0
    assert "hit_tokens/memory=1024" in served.logged()


@pytest.mark.skipif(not moves_groups(), reason="several groups before vLLM 0.32")
@pytest.mark.parametrize("runner", [1, 2])
def test_a_load_that_fails_is_counted_once_whatever_the_ranks_are(
    bed: OracleBed, serving: Callable[..., Served], runner: int
) -> None:
    shape: dict[str, Any] = {
        "kind": "heads",
        "ranks": 2,
        "runner": runner,
        "budget": 256,
        "extra": {"shards": 4, "chunk_tokens": 64},
    }
    served = serving(**shape)
    history = written(bed, **shape)
    reader = reader_of(bed, **shape)
    served.shows(reader)
    reader.faults.lose()
    reader.ask("a", history + bed.tokens(30, "a"), 12)
    assert reader.faults.lost
    assert (told("loads", "failed"), told("loads", "loaded")) == (1, 0)
    reader.ask("b", history + bed.tokens(30, "b"), 12)
    assert told("loads", "failed") == 1


def test_tokens_from_a_disk_count_once_and_then_as_those_from_memory(
    model: Path, tmp_path: Path, start_here: Callable[..., NodeThread], serving: Callable[..., Served]
) -> None:
    settings = {"arena_bytes": 64 * MIB, "disks": [str(tmp_path / "disk")], "disk_reserve_bytes": 0}
    node = start_here(**settings)
    bed = OracleBed(model, node, "from disk")
    history = written(bed)
    wait_until(lambda: bed.counted("disk_stored") >= HISTORY // 256, what="its chunks are on the disk")
    bed.close()
    node.close()
    bed = OracleBed(model, start_here(**settings), "from disk")
    served = serving()
    for number, source in enumerate(["disk", "memory"]):
        reader = bed.engine(f"reader {number}")
        served.shows(reader, number)
        reader.ask("a", history + bed.tokens(30, number), 2)
        assert hits(number) == {source: HISTORY}
        if hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):
            by_source = [told.hits_by_source for told in served.caches if told is not None and told.hits_by_source]
            assert by_source[number:] == [{{"memory": "host"}.get(source, source): HISTORY}]
    bed.close()


def test_of_what_is_loaded_each_token_has_one_source() -> None:
    """Also where less is taken than was found, or chunks are in part behind what the engine has."""
    groups = SimpleNamespace(chunk_tokens=256)

    def sources(local_tokens: int, count: int, **node: Any) -> dict[str, int]:
        state = SimpleNamespace(**{"sources": b"", "hits": Hits(), **node})
        tracked: Any = SimpleNamespace(local_tokens=local_tokens, _groups=groups, node=state)
        return dict(TrackedRequest.sources_of(tracked, count))

    assert sources(0, 1000) == {"memory": 1000}
    assert sources(64, 900, sources=bytes([1, 0, 3, 2])) == {"disk": 192, "memory": 256, "peer": 256, "remote": 196}
    assert sources(64, 100, sources=bytes([1, 0, 3, 2])) == {"disk": 100}
    assert sources(0, 300, sources=bytes([255, 1])) == {"memory": 256, "disk": 44}, "a number that nobody knows"
    runs = [Run([], 0, 256, 0, 0, "disk"), Run([], 9, 100, 256, -30, "moved")]
    assert sources(16, 340, hits=Hits(moved=runs)) == {"disk": 240, "moved": 100}


@pytest.mark.skipif(RELEASE == (0, 28), reason="PdxConnector refuses to be inside another one there")
def test_inside_another_connector_counts_go_the_same_way(bed: OracleBed, serving: Callable[..., Served]) -> None:
    shape: dict[str, Any] = {"beside": (PDX, FOREIGN)}
    served = serving(**shape)
    history = written(bed, **shape)
    reader = reader_of(bed, **shape)
    served.shows(reader)
    reader.ask("a", history + bed.tokens(30, "a"), 2)
    assert hits() == {"memory": HISTORY}
    assert "hit_tokens/memory" in str(served.logged())
