"""One picture of a run: TTFT over answered requests for each workload, and where tokens were found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdx.bench.harness import plot_style as style
from pdx.bench.harness.plot_style import Sheet
from pdx.bench.reuse.figures import PERCENTILES, SHARES, curve, repeats_of, systems_of, targets_ms
from pdx.bench.reuse.records import FIRST, Result

PANEL_IN, LABEL_IN, BAR_IN = 2.6, 1.45, 0.3
SOURCE_COLOURS = {"local": "#009E73", "external": "#56B4E9", "computed": "#C7C7C7"}


def draw(result: Result, path: Path) -> Path | None:
    """None: nothing was measured at any load."""
    workloads = [each for each in result.settings["workloads"] if any(p.workload == each for p in result.points)]
    systems = [
        name
        for name in style.in_order(systems_of(result))
        if any(point.system == name and point.load != FIRST for point in result.points)
    ]
    if not systems:
        return None
    bars = BAR_IN * len(systems)
    sheet = Sheet(
        [PANEL_IN] * len(workloads) + [bars], columns=2, left=1.4, right=LABEL_IN, between=LABEL_IN + 0.4, above=0.5
    )
    sheet.title(
        "Reuse under load: time to the first token, and requests that were answered",
        "each line: rising load, the last point all at once; dotted: times of computing alone",
    )
    for row, workload in enumerate(workloads):
        for column, share in enumerate(PERCENTILES):
            axes = sheet.axes(row, column)
            _curves(axes, result, systems, workload, share)
            axes.set_title(f"{workload}: TTFT p{share}", fontsize=9.5, loc="left", weight="bold")
    for column, workload in enumerate(workloads[:2]):
        axes = sheet.axes(len(workloads), column)
        _sources(axes, result, systems, workload, has_names=column == 0)
        axes.set_title(f"{workload}: where tokens were found", fontsize=9.5, loc="left", weight="bold")
    requests = sum(len(point.asked) for point in result.points)
    stopped = "" if result.is_complete else "INTERRUPTED. "
    model = f"{result.model['name']}, {int(result.model['kv_bytes_per_token']) / 1024:g} KiB of KV per token"
    repeats = f"{len(repeats_of(result))} repeats" if len(repeats_of(result)) > 1 else "one repeat"
    sheet.footnote(f"{stopped}{requests:,} requests, {repeats}. {model}. {style.on_machine(result.machine)}")
    return sheet.save(path)


def _curves(axes: Any, result: Result, systems: list[str], workload: str, share: float) -> None:
    from matplotlib.ticker import LogLocator

    labels = []
    lowest, highest = [], []
    for system in systems:
        look = style.look(system)
        for repeat in repeats_of(result):
            points = curve(result, system, workload, repeat, share)
            if not points:
                continue
            xs, ys = zip(*points, strict=True)
            settings = {"linestyle": look.dashes, "marker": look.marker, "markersize": 4.5, "linewidth": 1.3}
            axes.plot(xs, ys, color=look.colour, **settings)
            lowest.append(min(ys))
            highest.append(max(ys))
            if repeat == repeats_of(result)[-1]:
                labels.append((system, look.colour))
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:,g}")
    axes.tick_params(axis="y", which="minor", labelsize=style.SMALL_PT)
    axes.grid(axis="both", color=style.FAINT, linewidth=0.6)
    axes.set_xlabel("answered requests per second", fontsize=style.SMALL_PT, labelpad=1)
    axes.set_ylabel("ms", fontsize=style.SMALL_PT)
    for times, ms in targets_ms(result, workload, repeats_of(result)[-1]):
        axes.axhline(ms, color="#999999", linestyle=":", linewidth=0.9)
        axes.annotate(f"{times:g} ×", (0, ms), (2, 1), textcoords="offset points", fontsize=7, color="#777777")
    if lowest:
        axes.set_ylim(min(lowest) * 0.8, max(highest) * 1.3)
    style.ranking(axes, labels, PANEL_IN)


def _sources(axes: Any, result: Result, systems: list[str], workload: str, *, has_names: bool) -> None:
    for row, system in enumerate(systems):
        points = [p for p in result.points if (p.system, p.workload) == (system, workload) and p.load != FIRST]
        prompt = sum(point.found.prompt for point in points)
        at = 0.0
        for source, colour in SOURCE_COLOURS.items():
            share = sum(getattr(point.found, source) for point in points) / prompt if prompt else 0.0
            axes.barh(row, share, left=at, height=0.7, color=colour, label=SHARES[source] if row == 0 else None)
            at += share
    axes.set_ylim(len(systems) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_yticks(range(len(systems)), systems if has_names else [""] * len(systems), fontsize=style.SMALL_PT)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=style.SMALL_PT)
