"""Tables, figures and pictures of a finished or interrupted run."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.table import Table

from pdx.bench.harness.plot_style import Sheet, line_styles, on_machine
from pdx.bench.harness.report import ResultFile, console
from pdx.bench.reuse.figures import (
    PERCENTILES,
    SHARES,
    curve,
    figures,
    itl,
    repeats_of,
    systems_of,
    targets_ms,
    ttft,
)
from pdx.bench.reuse.records import ALONE, Point, Result
from pdx.bench.reuse.workload import load_title
from pdx.errors import ConfigError

RESULT = "result.json"
BENCH = "reuse"
SOURCE_COLOURS = {"local": "#009E73", "external": "#56B4E9", "computed": "#C7C7C7"}


def line(point: Point) -> str:
    """The outcome of one load, on one line."""
    found = point.found
    wrong = "; an answer DIFFERS from the computed one" if any(each.is_same is False for each in point.asked) else ""
    return (
        f"{point.requests_per_s:.2f} requests/s, TTFT p50 {ttft(point, 50):,.0f} p90 {ttft(point, 90):,.0f} ms; of "
        f"{found.prompt:,.0f} tokens {found.local:,.0f} own, {found.external:,.0f} kept{wrong}"
    )


def write(result: Result, folder: Path) -> list[Path]:
    """Show the tables, and save the result, its figures and its pictures in `folder`; returns the pictures' paths."""
    result.save(folder / RESULT)
    for name, why in result.not_run.items():
        console.print(f"{name}: {why}", markup=False, soft_wrap=True)
    if not result.points:
        console.print("nothing was measured", markup=False)
        return []
    for workload in result.settings["workloads"]:
        console.print(table(result, workload))
    found = figures(result)
    show = Table(title="at equal TTFT, and what must hold", title_justify="left")
    for column in ("figure", "measured", "unit", "note"):
        show.add_column(column, justify="right" if column == "measured" else "left")
    for figure in found:
        if "within" in figure.name or " / " in figure.name or figure.goal:
            show.add_row(figure.name, f"{figure.value:,.2f}", figure.unit, figure.note)
    console.print(show)
    details = {
        "systems": {name: msgspec.to_builtins(facts) for name, facts in result.systems.items()},
        "not_run": result.not_run,
        "settings": result.settings,
        "model": result.model,
        "is_complete": result.is_complete,
    }
    pictures = _draw(result, folder)
    console.print(
        f"in {folder}: {', '.join([RESULT, f'{BENCH}.json', *(path.name for path in pictures)])}", markup=False
    )
    title = "reuse under load" + ("" if result.is_complete else ", interrupted")
    ResultFile(folder, BENCH, title).write(found, details, result.machine)
    return pictures


def _draw(result: Result, folder: Path) -> list[Path]:
    try:
        drawn = draw(result, folder / f"{BENCH}.png")
    except ConfigError as error:
        console.print(f"no picture: {error}", markup=False)
        return []
    return [] if drawn is None else [drawn]


def table(result: Result, workload: str) -> Table:
    """A row for each system and load, all repeats together."""
    shown = Table(title=f"{workload}: times in ms", title_justify="left")
    columns = ("system", "load", "requests/s", "TTFT p50", "p90", "ITL p50", "p90", "own", "kept", "same")
    for name in columns:
        shown.add_column(name, justify="left" if name in ("system", "load") else "right")
    for system in systems_of(result):
        mine = [point for point in result.points if (point.system, point.workload) == (system, workload)]
        for load in dict.fromkeys(point.load for point in mine):
            points = [point for point in mine if point.load == load]
            shown.add_row(system, load_title(load), *_cells(points))
    return shown


def _cells(points: list[Point]) -> list[str]:
    asked = [each for point in points for each in point.asked]
    checked = [each.is_same for each in asked if each.is_same is not None]
    whole = msgspec.structs.replace(points[0], asked=asked)
    prompt = sum(point.found.prompt for point in points)
    per_s = len(asked) / sum(point.duration_s for point in points)
    return [
        f"{per_s:.2f}",
        *(f"{of(whole, share):,.0f}" for of in (ttft, itl) for share in (50, 90)),
        *(f"{sum(getattr(p.found, source) for p in points) / prompt:.0%}" for source in ("local", "external")),
        f"{sum(checked)}/{len(checked)}" if checked else "-",
    ]


def draw(result: Result, path: Path) -> Path | None:
    """Draw the picture at `path`; None: nothing was measured but single requests (`ALONE`)."""
    loaded = [point for point in result.points if point.load not in ALONE]
    styles = line_styles({point.system for point in loaded} & set(systems_of(result)))
    workloads = [each for each in result.settings["workloads"] if any(p.workload == each for p in result.points)]
    if not styles:
        return None
    title = "Reuse under load: time to the first token, and requests that were answered"
    sheet = Sheet(title, [2.8] * len(workloads) + [0.3 * len(styles) + 0.4], columns=2)
    last = repeats_of(result)[-1]
    for row, workload in enumerate(workloads):
        for column, share in enumerate(PERCENTILES):
            axes = sheet.ax(row, column, f"{workload}: TTFT p{share}", "answered requests per second", "ms")
            for system, style in styles.items():
                for repeat in repeats_of(result):
                    if points := curve(result, system, workload, repeat, share):
                        label = system if repeat == last else None
                        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, **style)
            for times, ms in targets_ms(result, workload, last):
                axes.axhline(ms, color="#999999", linestyle=":")
                axes.annotate(f"{times:g} × computing alone", (0, ms), fontsize=7, color="#777777")
            axes.set_xlim(left=0)
            axes.set_yscale("log")
    for column, workload in enumerate(workloads[:2]):
        axes = sheet.ax(len(workloads), column, f"{workload}: where tokens were found", "")
        for row, system in enumerate(styles):
            found = [p.found for p in loaded if (p.system, p.workload) == (system, workload)]
            prompt, at = sum(each.prompt for each in found), 0.0
            for source, colour in SOURCE_COLOURS.items():
                part = sum(getattr(each, source) for each in found) / prompt if prompt else 0.0
                axes.barh(row, part, left=at, height=0.7, color=colour, label=None if row else SHARES[source])
                at += part
        axes.set_yticks(range(len(styles)), list(styles))
        axes.invert_yaxis()
    requests = sum(len(point.asked) for point in result.points)
    stopped = "" if result.is_complete else "INTERRUPTED. "
    model = f"{result.model['name']}, {int(result.model['kv_bytes_per_token']) / 1024:g} KiB of KV per token"
    note = f"{stopped}{requests:,} requests, repeats: {len(repeats_of(result))}. {model}. {on_machine(result.machine)}"
    return sheet.save(path, note)
