"""`pdx bench store`: real nodes, few and small chunks."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_process import CliProcess
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.harness.commands import Run
from pdx.bench.harness.report import ResultFile
from pdx.bench.harness.timing import spread_ms
from pdx.bench.store import tiers
from pdx.bench.store.tiers import SMALLEST, EngineMemory, Load, OwnArena, Stopwatch, Tier, steps_of
from pdx.cli.main import main
from pdx.client.api import connect
from pdx.errors import ChannelUnavailable

SMALL = Load(chunk_bytes=64 << 10, chunks=2, rounds=2)


def store(*options: str) -> Any:
    return CliRunner().invoke(main, ["bench", "store", *options])


def check_spread(found: dict[str, Any]) -> None:
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["count"] > 0


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_small_run_has_every_figure(place: Path) -> None:
    options = ["--tiers", "host,shm,tcp,disk,remote", "--sizes", "64KiB", "--chunks", "2", "--rounds", "2"]
    result = store(*options, "--out", str(place), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert result.stdout == (place / "store.json").read_text()
    details = found["details"]
    assert details["is_complete"]
    assert [row["tier"] for row in details["rows"]] == ["host", "shm", "tcp"]
    assert details["missing"].keys() == {"disk", "remote"}
    for row in details["rows"]:
        rates = [row[name] for name in ("memcpy_gb_s", "write_gb_s", "read_gb_s")]
        assert all(rate > 0 for rate in rates), row
        assert row["chunk_bytes"] == 64 << 10
        for spread in (row["store"], row["hit"], *row["phases"].values()):
            check_spread(spread)
    assert len(found["figures"]) == 4 * len(details["rows"])
    assert found["machine"]["cpus"] > 0


def test_missing_tiers_are_named_with_the_reason(place: Path) -> None:
    result = store("--tiers", "disk,remote", "--out", str(place))
    assert result.exit_code == 1
    assert "nothing was measured: disk: measured by python -m pdx.bench.store.disk" in result.stderr
    missing = json.loads((place / "store.json").read_text())["details"]["missing"]
    assert set(missing) == {"disk", "remote"}
    (module,) = re.findall(r"python -m (pdx\.bench\.store\.\w+)", missing["disk"])
    assert importlib.util.find_spec(module)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_an_interrupted_run_keeps_what_was_measured(place: Path) -> None:
    options = ["--tiers", "host", "--sizes", "64KiB,16MiB", "--chunks", "2", "--rounds", "300"]
    with CliProcess(place, "bench", "store", *options, "--out", str(place)) as process:
        process.until("[2/2]")
        assert process.interrupt(signal.SIGINT) == 130, process.lines
        assert not process.left_behind()
        assert "ended early" in process.output
    details = json.loads((place / "store.json").read_text())["details"]
    assert [row["tier"] for row in details["rows"]] == ["host"]
    assert not details["is_complete"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sizes", "3 apples"], "'3 apples' is not a size"),
        (["--sizes", "5000"], "5000 bytes cannot be measured; take a multiple of 4 KiB"),
        (["--tiers", "tape"], "no tier is named 'tape'; there are host, shm"),
        (["--chunks", "0"], "0 is not in the range"),
    ],
)
def test_bad_options_are_refused(place: Path, options: Sequence[str], words: str) -> None:
    result = store("--out", str(place), *options)
    assert result.exit_code != 0
    assert words in result.stderr
    assert not list(place.iterdir())


def test_a_tier_that_breaks_is_missing_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    measured = []
    spread = spread_ms([1.0])

    def measure(name: str, load: Load) -> tiers.Row:
        measured.append((name, load.chunk_bytes))
        if name == "shm":
            raise ChannelUnavailable("its cable was cut")
        return tiers.Row(name, load.chunk_bytes, 1, 1, 1.0, 2.0, 2.0, 3.0, 3.0, spread, spread, {})

    monkeypatch.setattr(tiers, "measure_tier", measure)
    run = Run(ResultFile(place, "store", "tiers"), {"rows": []})
    sizes = {"sizes": (4096, 8192), "chunks": 1, "rounds": 1}
    run.carry_out(steps_of(run, tiers=("shm", "host", "disk"), **sizes), as_json=False)
    assert measured == [("shm", 4096), ("host", 4096), ("host", 8192)]
    assert run.missing["shm"] == "ChannelUnavailable: its cable was cut"
    assert set(run.missing) == {"shm", "disk"}
    kept = json.loads((place / "store.json").read_text())
    assert kept["details"]["is_complete"]
    assert [row["chunk_bytes"] for row in kept["details"]["rows"]] == [4096, 8192]
    assert len(kept["figures"]) == 2 * 4


class Forgetful(Tier):
    """Says that it has written and read, and has done nothing."""

    STORE = HIT = ()

    def write(self, names: Sequence[str], watch: Stopwatch) -> float:
        return 1.0

    def read(self, names: Sequence[str], watch: Stopwatch) -> float:
        return 1.0


class Slow(OwnArena):
    """Says that it takes hours."""

    def write(self, names: Sequence[str], watch: Stopwatch) -> float:
        return super().write(names, watch) + 36_000.0

    def read(self, names: Sequence[str], watch: Stopwatch) -> float:
        return super().read(names, watch) + 36_000.0


def test_slow_is_not_zero() -> None:
    with tiers.one_node(SMALL.arena_bytes) as address, connect(address) as node:
        memory = EngineMemory(SMALL)
        row = tiers._measure("host", Slow(node, memory, SMALL), SMALL, memory)
    assert row.write_gb_s == pytest.approx(SMALL.total_bytes / 1e9 / 36_000, rel=1e-3)
    assert row.read_gb_s == pytest.approx(row.write_gb_s, rel=1e-3)
    assert min(row.write_ratio, row.read_ratio) > 0


def test_other_bytes_are_noticed_before_anything_counts() -> None:
    with pytest.raises(RuntimeError, match="own node gave back other bytes"):
        tiers._measure("host", Forgetful(), SMALL, EngineMemory(SMALL))


@given(st.integers(1, 5000))
def test_parts_make_up_a_chunk(units: int) -> None:
    load = Load(units * SMALLEST, 1, 1)
    pages = load.chunk_bytes // load.page_bytes
    assert load.chunk_bytes % load.page_bytes == 0
    assert pages % load.parts == 0
    assert load.parts <= max(1, load.chunk_bytes >> 20)


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=300))
def test_a_spread_is_within_its_samples(samples: list[float]) -> None:
    found = spread_ms(samples)
    assert min(samples) - 1e-3 <= found.p50_ms <= found.p99_ms + 1e-3 <= max(samples) + 2e-3
    assert found.count == len(samples)
