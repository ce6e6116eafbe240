"""One run of `pdx bench breakdown` from its plan to its files, however it ends."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pdx.bench.breakdown import report as breakdown_report
from pdx.bench.breakdown.records import Result, SystemFacts
from pdx.bench.breakdown.turns import Breakdown, Settings
from pdx.bench.harness.interrupts import Interrupts, undisturbed
from pdx.bench.harness.progress import Shown
from pdx.bench.harness.prompts import Bodies, Prompts, model_facts
from pdx.bench.harness.report import machine
from pdx.bench.systems.fleet import Fleet
from pdx.bench.systems.system import Bed, System, is_cpu_build
from pdx.telemetry import trace

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run is to do. `not_run`: systems that cannot be tried here, and why."""

    settings: Settings
    systems: Mapping[str, System]
    not_run: Mapping[str, str]
    bed: Bed
    max_engines: int
    out: Path
    is_tiny: bool


def run(plan: Plan) -> int:
    """Measure, write what there is however it ends, leave no process behind; the exit status.

    0: everything was measured and all answers were right. 130: SIGINT or SIGTERM came. 1: no system could be measured,
    or an answer was wrong.
    """
    result = new_result(plan)
    status = 0
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder, Shown() as progress, Interrupts():
        for name, why in plan.not_run.items():
            progress.note(f"{name} is left out: {why}")
        try:
            _measure(plan, result, Path(folder), progress)
        except KeyboardInterrupt:
            status = INTERRUPTED
            progress.note("interrupted; what was measured is kept")
        progress.stop()
        with contextlib.suppress(KeyboardInterrupt), undisturbed():
            breakdown_report.write(result, plan.out)
    is_wrong = any(request.is_same is False for request in result.requests)
    return status or int(not result.requests or is_wrong)


def new_result(plan: Plan) -> Result:
    """Nothing measured yet."""
    model = model_facts(plan.bed.model, plan.bed.served_name, plan.bed.flags, is_on_gpu=not is_cpu_build())
    settings = asdict(plan.settings) | {"systems": list(plan.systems), "flags": list(plan.bed.flags)}
    return Result(
        machine=machine(),
        model=model,
        settings=settings
        | {
            "arena": plan.bed.arena,
            "environment": plan.bed.env,
            "max_engines": plan.max_engines,
            "is_gather_beside": not is_cpu_build(),
        },
        systems={
            name: SystemFacts(title=system.title, versions=system.versions(), commands=system.commands(plan.bed))
            for name, system in plan.systems.items()
        },
        not_run=dict(plan.not_run),
    )


def _measure(plan: Plan, result: Result, folder: Path, progress: Shown) -> None:
    for name, system in plan.systems.items():
        if system.is_pdx:
            (folder / name).mkdir(mode=0o700)
            trace.switch(folder / name, True)
    prompts = Prompts.of(plan.bed.model, is_tiny=plan.is_tiny)
    copy_ms = _memcpy(max(plan.settings.tokens) * int(result.model["kv_bytes_per_token"]))
    fleet = Fleet(plan.bed, list(plan.systems.values()), plan.max_engines, traces=folder)
    try:
        Breakdown(
            result,
            plan.out / breakdown_report.RESULT,
            plan.settings,
            systems=plan.systems,
            fleet=fleet,
            bodies=Bodies(prompts, plan.bed.served_name, plan.settings.output_tokens),
            traces=folder,
            watcher=progress,
            copy_ms=copy_ms,
            is_gather_beside=not is_cpu_build(),
        ).run()
    finally:
        with undisturbed():
            fleet.close()


def _memcpy(nbytes: int) -> Callable[[int], float]:
    """Times copies of up to `nbytes` on the decode engine's core."""
    import statistics

    from pdx.bench.store.pages import Memcpy

    memcpy = Memcpy(nbytes, core=max(os.sched_getaffinity(0)))
    return lambda wanted: statistics.median(memcpy.times_ms(wanted)[1])
