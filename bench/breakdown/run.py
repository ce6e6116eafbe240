"""One run of `pdx bench breakdown` from its plan to its files, however it ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdx.bench.breakdown import report as breakdown_report
from pdx.bench.breakdown.records import Result
from pdx.bench.breakdown.turns import Breakdown
from pdx.bench.harness.interrupts import undisturbed
from pdx.bench.harness.progress import Shown
from pdx.bench.harness.prompts import Bodies, Prompts
from pdx.bench.systems import plan as systems_plan
from pdx.bench.systems.fleet import Fleet
from pdx.bench.systems.system import is_cpu_build
from pdx.telemetry import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(systems_plan.Plan):
    """What one run is to do."""

    is_tiny: bool


def run(plan: Plan) -> int:
    """Measure, write what there is however it ends, leave no process behind; the exit status.

    0: everything was measured and all answers were right. 130: SIGINT or SIGTERM came. 1: no system could be measured,
    or an answer was wrong.
    """
    result = Result(**plan.begin())
    result.settings |= {"systems": list(plan.systems), "is_gather_beside": not is_cpu_build()}
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder:
        status = plan.carry_out(
            lambda progress: _measure(plan, result, Path(folder), progress),
            lambda: breakdown_report.write(result, plan.out),
        )
    is_wrong = any(request.is_same is False for request in result.requests)
    return status or int(not result.requests or is_wrong)


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
