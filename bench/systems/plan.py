"""A run of systems from its plan to its result files, for `pdx bench breakdown` and `pdx bench reuse`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import aiohttp
import msgspec

from pdx.bench.harness.ask import AskFailed
from pdx.bench.harness.interrupts import Interrupts, deferred_signals
from pdx.bench.harness.progress import ProgressBar
from pdx.bench.harness.prompts import model_facts
from pdx.bench.harness.report import machine, replace_file
from pdx.bench.systems.fleet import Fleet
from pdx.bench.systems.system import Bed, Running, System, is_cpu_build
from pdx.errors import PdxError

INTERRUPTED = 130


class SystemFacts(msgspec.Struct, frozen=True):
    """What a result says about one system."""

    title: str
    versions: dict[str, str]
    commands: list[str]  # as one would type them, without paths of this machine


class Result(msgspec.Struct, kw_only=True):
    """A run's results as plain values, from which tables, figures and pictures are made. The file is rewritten after
    every turn, so that an interrupted run keeps its measurements."""

    kind: str
    machine: dict[str, Any]
    model: dict[str, Any]  # as `model_facts` has them
    settings: dict[str, Any]  # the command's options
    systems: dict[str, SystemFacts]
    not_run: dict[str, str]  # system -> why
    is_complete: bool = False

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        replace_file(path, msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> Self:
        """:raises msgspec.DecodeError: the file is not such a result."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Turn(Protocol):
    """One uninterrupted measurement of one system; its `str` is for people."""

    @property
    def system(self) -> str: ...


_Result = TypeVar("_Result", bound=Result)
_Turn = TypeVar("_Turn", bound=Turn)


class Measuring(ABC, Generic[_Result, _Turn]):
    """A run in progress. `result` always has all measurements, and the file has them after every turn. One thread."""

    def __init__(self, result: _Result, path: Path, fleet: Fleet, progress: ProgressBar) -> None:
        self.result = result
        self._path = path
        self._fleet = fleet
        self._progress = progress

    @abstractmethod
    def _amount(self, turn: _Turn) -> float:
        """How much work the turn is, for the progress bar."""

    @abstractmethod
    def _measure(self, turn: _Turn, running: Running) -> str:
        """Measure one turn and add it to the result; returns a remark for the progress display."""

    @abstractmethod
    def _has(self, system: str) -> bool:
        """Whether the result has measurements of this system."""

    def _run_turns(self, turns: Sequence[_Turn]) -> None:
        """Measure all turns; after an interruption `result` has the measurements until then.

        A system that cannot be started or stops answering is named in `result.not_run`, and the others continue.
        """
        self._progress.begin(sum(map(self._amount, turns)))
        for turn in turns:
            self._progress.set_status(str(turn))
            remark = "left out" if turn.system in self.result.not_run else self._run_turn(turn)
            self._progress.advance(self._amount(turn), f"{turn}: {remark}")
        self.result.is_complete = True
        self.result.save(self._path)

    def _run_turn(self, turn: _Turn) -> str:
        try:
            if turn.system not in self._fleet.running:
                self._progress.set_status(f"starting {turn.system}")
            remark = self._measure(turn, self._fleet.get(turn.system))
        except (AskFailed, PdxError, OSError, aiohttp.ClientError) as error:
            why = f"stopped answering ({turn}): {error}" if self._has(turn.system) else str(error)
            self.result.not_run[turn.system] = why
            self._progress.note(f"{turn.system} is left out from here on: {why}")
            remark = "failed"
        self.result.save(self._path)
        return remark


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run measures. `not_run`: systems that cannot be tried here, and why."""

    settings: Any  # a dataclass
    systems: Mapping[str, System]
    not_run: Mapping[str, str]
    bed: Bed
    max_engines: int
    out: Path
    facts: Mapping[str, object] = field(default_factory=dict)  # more settings, for the result

    def initial_fields(self) -> dict[str, Any]:
        """The fields of a result that are known before anything is measured."""
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

    def carry_out(self, measure: Callable[[ProgressBar], None], write: Callable[[], object]) -> int:
        """Measure, then write the result, even after an interruption. Returns 0, or 130 after SIGINT or SIGTERM."""
        status = 0
        with ProgressBar() as progress, Interrupts():
            for name, why in self.not_run.items():
                progress.note(f"{name} is left out: {why}")
            try:
                measure(progress)
            except KeyboardInterrupt:
                status = INTERRUPTED
                progress.note("interrupted; what was measured is kept")
            progress.stop()
            with contextlib.suppress(KeyboardInterrupt), deferred_signals():
                write()
        return status
