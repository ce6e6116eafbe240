"""A run of `pdx bench transfer`: channels by message size, one after the other. Its result, its table, its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdx.bench.channels import bandwidth as bandwidth_plot
from pdx.bench.channels.bandwidth import size_text
from pdx.bench.channels.measure import CHECKED, MEMCPY, Options, Row
from pdx.bench.channels.trial import Measured, Missing, Task, Told, told
from pdx.bench.harness.report import machine
from pdx.errors import ConfigError

KIND = "pdx-bench-transfer"
VERSION = 1
MAX_CASES = 16  # sizes, and numbers in flight


class Result(msgspec.Struct, kw_only=True):
    """All that was measured; saved after every row."""

    kind: str = KIND
    version: int = VERSION
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = []
    not_run: dict[str, Missing] = {}  # channel -> why, and what would help
    is_complete: bool = False

    @property
    def is_well(self) -> bool:
        """Something was measured, and nothing broke."""
        has_rows = any(row.scheme != MEMCPY for row in self.rows)
        return has_rows and not any(missing.is_broken for missing in self.not_run.values())


def options(sizes: Sequence[int], depths: Sequence[int], repeats: int, *, has_raw: bool, ring: int) -> Options:
    """Each once, ascending; `ring` rounded up to what can be compared.

    :raises ConfigError: too many, or more than fits into the memory that is sent from.
    """
    ring = max(1, -(-ring // CHECKED)) * CHECKED
    chosen = Options(tuple(sorted(set(sizes))), tuple(sorted(set(depths))), repeats, has_raw, ring)
    for what, values in (("sizes", chosen.sizes), ("numbers in flight", chosen.depths)):
        if not 1 <= len(values) <= MAX_CASES:
            raise ConfigError(f"{len(values)} {what}; give 1 to {MAX_CASES}")
        if values[0] < 1:
            raise ConfigError(f"{values[0]} is not among possible {what}; the least is 1")
    if chosen.sizes[-1] * chosen.depths[-1] > ring:
        raise ConfigError(
            f"{chosen.depths[-1]} messages of {size_text(chosen.sizes[-1])} in flight are more than the "
            f"{size_text(ring)} that are sent from; give smaller --sizes or --in-flight, or more --memory"
        )
    return chosen


class Run:
    """Measures `schemes` with `chosen`. `on_told` hears of every message, after it was saved to `path`."""

    def __init__(self, schemes: Sequence[str], chosen: Options, path: Path, on_told: Callable[[str, Told], None]):
        self.schemes = [MEMCPY, *schemes]
        self._options = chosen
        self._path = path
        self._on_told = on_told
        self.result = Result(machine=machine(), settings={"channels": list(schemes), **asdict(chosen)})

    @property
    def steps(self) -> int:
        """Rows, if everything works."""
        return len(self._options.sizes) + len(self._options.cases) * (len(self.schemes) - 1)

    def measure(self) -> None:
        """Everything. Where that is interrupted, `result` has what there is."""
        for scheme in self.schemes:
            with closing(told(Task(scheme, self._options))) as messages:
                for message in messages:
                    if isinstance(message, Measured):
                        self.result.rows.append(message.row)
                    else:
                        self.result.not_run[scheme] = message.missing
                    self.save()
                    self._on_told(scheme, message)
        self.result.is_complete = True
        self.save()

    def save(self) -> None:
        """Write it whole or not at all."""
        self.result.machine = machine()
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self.result), indent=1) + b"\n")
        partial.replace(self._path)

    def draw(self, path: Path) -> Path | None:
        """The picture; None where nothing was measured."""
        stopped = "" if self.result.is_complete else "INTERRUPTED: only what was measured until then. "
        repeats = self._options.repeats
        note = f"{stopped}Median of {repeats} round{'s' * (repeats > 1)}; bytes compared once before"
        return bandwidth_plot.draw(self.result.rows, path, self.result.machine, note)


def view(result: Result) -> RenderableType:
    """GB/s, a column for each size; below it what could not be measured."""
    sizes = sorted({row.nbytes for row in result.rows})
    rounds = f"median of {result.settings['repeats']} rounds"
    table = Table(title=f"GB/s by bytes in a message, {rounds}", title_justify="left")
    table.add_column("channel", no_wrap=True)
    table.add_column("in flight", justify="right")
    table.add_column("what", no_wrap=True)
    for nbytes in sizes:
        table.add_column(size_text(nbytes), justify="right", no_wrap=True)
    scheme = ""
    for group in _groups(result.rows):
        if scheme and group[0].scheme != scheme:
            table.add_section()
        scheme = group[0].scheme
        _add(table, group, sizes)
    missing = [
        Text.assemble((f"{name}: ", "bold"), each.why, f"\n    {each.fix}" if each.fix else "")
        for name, each in result.not_run.items()
    ]
    if missing:
        missing.insert(0, Text("not measured:" if result.rows else "nothing could be measured:", style="yellow"))
    return Group(table, *missing) if result.rows else Group(*missing)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.scheme, row.in_flight), []).append(row)
    return list(found.values())


def _add(table: Table, group: Sequence[Row], sizes: Sequence[int]) -> None:
    """Its rate; where known, that of the raw technology and the ratio."""
    by_size = {row.nbytes: row for row in group}
    scheme, depth = group[0].scheme, "" if group[0].scheme == MEMCPY else str(group[0].in_flight)
    ours = {nbytes: f"{row.gb_s:.3f}" for nbytes, row in by_size.items()}
    what = "one thread" if scheme == MEMCPY else "PDX"
    table.add_row(Text(scheme), depth, what, *(ours.get(nbytes, "") for nbytes in sizes))
    raw = {nbytes: f"{row.raw_gb_s:.3f}" for nbytes, row in by_size.items() if row.raw_gb_s is not None}
    if raw:
        shares = {nbytes: f"{row.ratio:.0%}" for nbytes, row in by_size.items() if row.ratio is not None}
        table.add_row("", "", "called directly", *(raw.get(nbytes, "") for nbytes in sizes), style="dim")
        table.add_row("", "", "PDX / directly", *(shares.get(nbytes, "") for nbytes in sizes), style="dim")
