"""A run of systems from its plan to its files, however it ends: for `pdx bench breakdown` and `pdx bench reuse`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.harness.interrupts import Interrupts, undisturbed
from pdx.bench.harness.progress import Shown
from pdx.bench.harness.prompts import model_facts
from pdx.bench.harness.report import machine
from pdx.bench.systems.system import Bed, System, is_cpu_build

INTERRUPTED = 130


class SystemFacts(msgspec.Struct, frozen=True):
    """What ran."""

    title: str
    versions: dict[str, str]
    commands: list[str]  # as one would type them, without paths of this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run is to do. `not_run`: systems that cannot be tried here, and why."""

    settings: Any  # a dataclass
    systems: Mapping[str, System]
    not_run: Mapping[str, str]
    bed: Bed
    max_engines: int
    out: Path
    facts: Mapping[str, object] = field(default_factory=dict)  # more settings, for the result

    def begin(self) -> dict[str, Any]:
        """What a result says before anything is measured."""
        bed = self.bed
        settings = {"flags": list(bed.flags), "arena": bed.arena, "environment": bed.env}
        return {
            "machine": machine(),
            "model": model_facts(bed.model, bed.served_name, bed.flags, is_on_gpu=not is_cpu_build()),
            "settings": asdict(self.settings) | settings | {"max_engines": self.max_engines, **self.facts},
            "systems": {
                name: SystemFacts(title=system.title, versions=system.versions(), commands=system.commands(bed))
                for name, system in self.systems.items()
            },
            "not_run": dict(self.not_run),
        }

    def carry_out(self, measure: Callable[[Shown], None], write: Callable[[], object]) -> int:
        """Measure, and write what there is however that ends. 0, or 130: SIGINT or SIGTERM came."""
        status = 0
        with Shown() as progress, Interrupts():
            for name, why in self.not_run.items():
                progress.note(f"{name} is left out: {why}")
            try:
                measure(progress)
            except KeyboardInterrupt:
                status = INTERRUPTED
                progress.note("interrupted; what was measured is kept")
            progress.stop()
            with contextlib.suppress(KeyboardInterrupt), undisturbed():
                write()
        return status
