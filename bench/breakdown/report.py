"""What is made of a finished or interrupted breakdown: tables, figures with their goals, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdx.bench.breakdown import records
from pdx.bench.breakdown import reuse as reuse_figures
from pdx.bench.breakdown.figures import figures, missing
from pdx.bench.breakdown.plots import draw_all
from pdx.bench.breakdown.records import Result
from pdx.bench.breakdown.tables import parts_table
from pdx.bench.harness.report import console, publish
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.bench.channels.measure import Row

RESULT = "result.json"
BENCH = "breakdown"
TRANSFER = Path("transfer", "transfer.json")  # beside our folder


def write(result: Result, folder: Path) -> list[Path]:
    """Show the tables, and put everything in `folder`: the result, its figures and its pictures, which are returned."""
    records.save(result, folder / RESULT)
    for name, why in result.not_run.items():
        console.print(f"{name} {'was left out later' if _has(result, name) else 'did not run'}: {why}", markup=False)
    if not result.requests:
        console.print("nothing was measured", markup=False)
        return []
    _show_systems(result)
    console.print(parts_table(result))
    if result.again:
        console.print(reuse_figures.table(result))
    for line in missing(result):
        console.print(f"no goal checked: {line}", markup=False)
    pictures = _draw(result, folder)
    console.print(
        f"in {folder}: {', '.join([RESULT, 'breakdown.json', *(path.name for path in pictures)])}", markup=False
    )
    rounds = result.settings["rounds"]
    state = f"{rounds} rounds" if result.is_complete else f"interrupted, {rounds} rounds were planned"
    publish(
        BENCH,
        f"where a request's time goes, {state}",
        [*figures(result), *reuse_figures.figures(result)],
        {
            "systems": {name: msgspec.to_builtins(facts) for name, facts in result.systems.items()},
            "not_run": result.not_run,
            "settings": result.settings,
            "missing": missing(result),
        },
        folder=folder,
    )
    return pictures


def _show_systems(result: Result) -> None:
    """Versions and commands of those that measured something."""
    for name, facts in result.systems.items():
        if _has(result, name):
            versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
            console.print(f"{name}: {facts.title} ({versions})", markup=False, soft_wrap=True)
            for command in facts.commands:
                console.print(f"    {command}", markup=False, soft_wrap=True)


def _draw(result: Result, folder: Path) -> list[Path]:
    try:
        return draw_all(result, folder, _bandwidth(folder.parent / TRANSFER, result))
    except ConfigError as error:
        console.print(f"no pictures: {error}", markup=False)
        return []


def _bandwidth(path: Path, result: Result) -> list[Row]:
    """What `pdx bench transfer` measured here on the same day, if its folder is beside ours."""
    try:
        from pdx.bench.channels.measure import Row  # it brings the channels along

        found = msgspec.json.decode(path.read_bytes())
        rows = msgspec.convert(found["details"]["rows"], list[Row])
    except (ImportError, OSError, msgspec.MsgspecError, KeyError, TypeError):
        return []
    is_same = all(found["machine"].get(key) == result.machine.get(key) for key in ("cpu", "cpus", "date"))
    return rows if is_same else []


def _has(result: Result, system: str) -> bool:
    return any(request.system == system for request in result.requests)
