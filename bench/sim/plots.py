"""Pictures of sweeps, in the style of all benches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdx.bench.harness.plot_style import SMALL_PT, Look, Sheet
from pdx.bench.sim.sweep import Point

LOOKS = (
    Look("#0072B2", "-", "o"),
    Look("#D55E00", "--", "s"),
    Look("#009E73", "-.", "D"),
    Look("#CC79A7", ":", "^"),
    Look("#E69F00", "--", "v"),
    Look("#6E6E6E", ":", "X"),
)
HEIGHT_IN = 3.6


def draw(points: Sequence[Point], path: Path) -> Path:
    """Hit rates by capacity, as a share of an hour's demand, or by time to live: a line for each trace and policy.

    :raises ConfigError: matplotlib is not installed.
    """
    is_time = any(point.kept_s for point in points)
    sheet = Sheet([HEIGHT_IN], right=2.2)
    axes = sheet.axes(0)
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.trace if is_time else f"{point.trace}, {point.policy}", []).append(point)
    for (name, line), look in zip(lines.items(), LOOKS * len(lines), strict=False):
        x = [point.kept_s if is_time else point.of_demand for point in line]
        y = [100 * point.of_possible for point in line]
        style = {"color": look.colour, "linestyle": look.dashes, "marker": look.marker}
        axes.plot(x, y, label=name, linewidth=1.6, markersize=4.5, **style)
    axes.set_xscale("log")
    axes.set_ylim(0, 104)
    axes.grid(color="#D9D9D9", linewidth=0.6)
    what = "seconds that chunks are kept" if is_time else "capacity, as a share of an hour's demand"
    axes.set_xlabel(what, fontsize=SMALL_PT)
    axes.set_ylabel("hits, % of those possible", fontsize=SMALL_PT)
    axes.legend(fontsize=SMALL_PT, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    title = "Hit rate by time to live" if is_time else "Hit rate by capacity"
    sheet.title(title, "replayed through PDX's own store: one pool, requests in their order")
    sheet.footnote("A simulation, not a measurement: docs/sim.md")
    return sheet.save(path)
