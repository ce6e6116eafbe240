"""How far `pdx bench breakdown` is: a bar with the time that is left on a terminal, a line per batch elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pdx.bench.harness.progress import Shown

SPEED_S = 3600.0  # the time that is left is guessed from this long a stretch of the past


class BreakdownProgress(Shown):
    """On standard error. Amounts are of work, in no unit."""

    def __init__(self) -> None:
        super().__init__(
            Console(stderr=True, highlight=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            speed_estimate_period=SPEED_S,
        )
        self._started_at = time.monotonic()
        self._task = self.bar.add_task("starting", total=None)

    def begin(self, amount: float) -> None:
        """So much is to be done."""
        self.bar.reset(self._task, total=amount)
        self.bar.refresh()

    def now(self, what: str) -> None:
        """This begins."""
        self.bar.update(self._task, description=what)
        self.bar.refresh()
        if not self.is_terminal and what.startswith(("starting", "warming", "the ")):
            self.note(what)

    def done(self, amount: float, line: str) -> None:
        """It is done, and this came of it."""
        self.bar.update(self._task, advance=amount)
        self.note(line)

    def note(self, line: str) -> None:
        """A line that stays, with the time since the start."""
        self.say(f"[{time.monotonic() - self._started_at:6.0f} s] {line}")
