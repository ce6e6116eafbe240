"""One run of `pdx bench breakdown` from its plan to its tables, figures and pictures, even if it is interrupted."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from pdx.bench.breakdown.figures import figures
from pdx.bench.breakdown.plots import draw_all
from pdx.bench.breakdown.records import Parts, Request, Result
from pdx.bench.breakdown.turns import Breakdown
from pdx.bench.harness.interrupts import deferred_signals
from pdx.bench.harness.plot_style import PARTS
from pdx.bench.harness.progress import ProgressBar
from pdx.bench.harness.prompts import Bodies, Prompts
from pdx.bench.harness.report import console, publish
from pdx.bench.systems import plan as systems_plan
from pdx.bench.systems.fleet import Fleet
from pdx.bench.systems.system import is_cpu_build
from pdx.errors import ConfigError
from pdx.telemetry import trace

RESULT = "result.json"
BENCH = "breakdown"
HIDES = 0.05  # ms; shorter hidden times are not shown

Key = tuple[int, int, str]  # prompt tokens, concurrency, system


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(systems_plan.Plan):
    """The plan of one run. `is_tiny`: the model is the one made on the spot."""

    is_tiny: bool


def run(plan: Plan) -> int:
    """Measure, write what was measured even after an interruption, end all processes, and return the exit status.

    0: something was measured, and no answer was wrong. 130: SIGINT or SIGTERM came. 1: no system could be measured, or
    an answer was wrong.
    """
    result = Result(**plan.initial_fields())
    result.settings |= {"systems": list(plan.systems), "is_gather_beside": not is_cpu_build()}
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder:
        status = plan.carry_out(
            lambda progress: _measure(plan, result, Path(folder), progress),
            lambda: write(result, plan.out),
        )
    is_wrong = any(request.is_same is False for request in result.requests)
    return status or int(not result.requests or is_wrong)


def _measure(plan: Plan, result: Result, folder: Path, progress: ProgressBar) -> None:
    from pdx.bench.store.pages import Memcpy

    for name, system in plan.systems.items():
        if system.is_pdx:
            (folder / name).mkdir(mode=0o700)
            trace.switch(folder / name, True)
    prompts = Prompts.of(plan.bed.model, is_tiny=plan.is_tiny)
    longest = max(plan.settings.tokens) * int(result.model["kv_bytes_per_token"])
    memcpy = Memcpy(longest, core=max(os.sched_getaffinity(0)))  # a core of the decode engine
    fleet = Fleet(plan.bed, list(plan.systems.values()), plan.max_engines, traces=folder)
    try:
        Breakdown(
            result,
            plan.out / RESULT,
            plan.settings,
            systems=plan.systems,
            fleet=fleet,
            bodies=Bodies(prompts, plan.bed.served_name, plan.settings.output_tokens),
            traces=folder,
            progress=progress,
            copy_ms=memcpy.median_ms,
            is_gather_beside=not is_cpu_build(),
        ).run()
    finally:
        with deferred_signals():
            fleet.close()


def write(result: Result, folder: Path) -> list[Path]:
    """Show the tables, and write the result, its figures and its pictures to `folder`; return the pictures' paths."""
    result.save(folder / RESULT)
    for name, why in result.not_run.items():
        console.print(f"{name} {'was left out later' if _has(result, name) else 'did not run'}: {why}", markup=False)
    if not result.requests:
        console.print("nothing was measured", markup=False)
        return []
    _show_systems(result)
    console.print(parts_table(result))
    pictures = _draw(result, folder)
    console.print(
        f"in {folder}: {', '.join([RESULT, 'breakdown.json', *(path.name for path in pictures)])}", markup=False
    )
    rounds = result.settings["rounds"]
    state = f"{rounds} rounds" if result.is_complete else f"interrupted, {rounds} rounds were planned"
    publish(
        BENCH,
        f"where a request's time goes, {state}",
        figures(result),
        {
            "systems": {name: msgspec.to_builtins(facts) for name, facts in result.systems.items()},
            "not_run": result.not_run,
            "settings": result.settings,
        },
        folder=folder,
    )
    return pictures


def _show_systems(result: Result) -> None:
    """Print versions and commands of the systems with measured requests."""
    for name, facts in result.systems.items():
        if _has(result, name):
            versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
            console.print(f"{name}: {facts.title} ({versions})", markup=False, soft_wrap=True)
            for command in facts.commands:
                console.print(f"    {command}", markup=False, soft_wrap=True)


def _draw(result: Result, folder: Path) -> list[Path]:
    try:
        return draw_all(result, folder)
    except ConfigError as error:
        console.print(f"no pictures: {error}", markup=False)
        return []


def _has(result: Result, system: str) -> bool:
    return any(request.system == system for request in result.requests)


def parts_table(result: Result) -> Table:
    """Exposed milliseconds of each part, medians over requests; after a +, the hidden ones."""
    title = "where the time went, from arrival to the decode engine's first token (exposed ms, + hidden ms)"
    table = Table(title=title, title_justify="left")
    for name in ("tokens", "at once", "system", "requests"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for name in PARTS:
        table.add_column(name.replace("_", "\n"), justify="right")
    table.add_column("in all", justify="right")
    for (tokens, concurrency, system), requests in _grouped(result):
        known = [request.parts for request in requests if request.parts is not None]
        if known:
            cells = [_part(known, name) for name in PARTS]
            whole = statistics.median(sum(getattr(parts, name).exposed_ms for name in PARTS) for parts in known)
            table.add_row(f"{tokens:,}", str(concurrency), system, str(len(known)), *cells, _number(whole))
    return table


def _part(known: Sequence[Parts], name: str) -> str:
    exposed = statistics.median(getattr(parts, name).exposed_ms for parts in known)
    hidden = statistics.median(getattr(parts, name).hidden_ms for parts in known)
    return _number(exposed) + (f" + {_number(hidden)}" if hidden >= HIDES else "")


def _grouped(result: Result) -> Iterable[tuple[Key, list[Request]]]:
    """Requests by key: shorter prompts first, systems in the result's order."""
    places = {name: place for place, name in enumerate(result.systems)}
    grouped: dict[Key, list[Request]] = {}
    for request in result.requests:
        grouped.setdefault((request.prompt_tokens, request.concurrency, request.system), []).append(request)
    return sorted(grouped.items(), key=lambda item: (*item[0][:2], places.get(item[0][2], len(places))))


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
