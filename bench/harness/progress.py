"""Progress of a measurement: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SPEED_S = 3600.0  # the remaining time is estimated from the last stretch of this length


class ProgressBar:
    """A context that shows a progress bar on standard error, if that is a terminal; standard output has only results.

    For one thread. Amounts of work have no unit. The bar is redrawn only on calls: a drawing thread would take CPU time
    from the measurement.
    """

    def __init__(self, total: float | None = None) -> None:
        console = Console(stderr=True, highlight=False)
        self.is_terminal = console.is_terminal
        self._bar = Progress(
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            speed_estimate_period=SPEED_S,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._started_at = time.monotonic()
        self._task = self._bar.add_task("starting", total=total)

    def begin(self, amount: float, what: str = "starting") -> None:
        self._bar.reset(self._task, total=amount, description=what)
        self._bar.refresh()

    def set_status(self, what: str) -> None:
        self._bar.update(self._task, description=what)
        self._bar.refresh()
        if not self.is_terminal and what.startswith(("starting", "warming", "the ")):
            self.note(what)

    def advance(self, amount: float, line: str = "") -> None:
        """Record finished work and its result."""
        self._bar.update(self._task, advance=amount)
        self._bar.refresh()
        if line:
            self.note(line)

    def note(self, line: str) -> None:
        """Print a permanent line with the time since the start."""
        self.say(f"[{time.monotonic() - self._started_at:6.0f} s] {line}")

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, soft_wrap=True)
        self._bar.console.file.flush()

    def stop(self) -> None:
        """Remove the bar. Idempotent."""
        self._bar.stop()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> bool | None:
        self.stop()
        return None
