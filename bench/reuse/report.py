"""What is made of a finished or interrupted run: tables and figures."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.table import Table

from pdx.bench.harness.report import ResultFile, console
from pdx.bench.reuse.figures import figures, itl, systems_of, ttft
from pdx.bench.reuse.records import Point, Result
from pdx.bench.reuse.workload import titled

RESULT = "result.json"
BENCH = "reuse"


def line(point: Point) -> str:
    """What came of a load, in short."""
    found = point.found
    wrong = "; an answer DIFFERS from the computed one" if any(each.is_same is False for each in point.asked) else ""
    return (
        f"{point.requests_per_s:.2f} requests/s, TTFT p50 {ttft(point, 50):,.0f} p90 {ttft(point, 90):,.0f} ms; of "
        f"{found.prompt:,.0f} tokens {found.local:,.0f} own, {found.external:,.0f} kept{wrong}"
    )


def write(result: Result, folder: Path) -> None:
    """Show the tables, and put everything in `folder`: the result and its figures."""
    result.save(folder / RESULT)
    for name, why in result.not_run.items():
        console.print(f"{name}: {why}", markup=False, soft_wrap=True)
    if not result.points:
        console.print("nothing was measured", markup=False)
        return
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
    console.print(f"in {folder}: {RESULT}, {BENCH}.json", markup=False)
    title = "reuse under load" + ("" if result.is_complete else ", interrupted")
    ResultFile(folder, BENCH, title).write(found, details, result.machine)


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
            shown.add_row(system, titled(load), *_cells(points))
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
