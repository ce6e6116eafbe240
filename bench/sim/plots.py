"""Pictures of sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdx.bench.harness.plot_style import Sheet
from pdx.bench.sim.sweep import Point


def draw(points: Sequence[Point], path: Path) -> Path:
    """Hit rates by capacity, as a share of an hour's demand, or by time to live: a line for each trace and policy.

    :raises ConfigError: matplotlib is not installed.
    """
    is_time = any(point.kept_s for point in points)
    sheet = Sheet(f"Hit rate by {'time to live' if is_time else 'capacity'}, replayed through PDX's own store", [3.6])
    what = "seconds that chunks are kept" if is_time else "capacity, as a share of an hour's demand"
    axes = sheet.at(0, 0, "", what, "hits, % of those possible")
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.trace if is_time else f"{point.trace}, {point.policy}", []).append(point)
    for name, line in lines.items():
        x = [point.kept_s if is_time else point.of_demand for point in line]
        axes.plot(x, [100 * point.of_possible for point in line], marker="o", markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 104)
    return sheet.save(path, "A simulation, not a measurement: docs/sim.md")
