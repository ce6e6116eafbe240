"""How far `pdx bench breakdown` is: a bar with the time that is left on a terminal, a line per batch elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SPEED_S = 3600.0  # the time that is left is guessed from this long a stretch of the past


class BreakdownProgress:
    """Amounts are of work, in no unit. Everything goes to standard error, and the bar is drawn only when something is
    told: a thread that draws would take time from what is measured. For one thread."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._started_at = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
            speed_estimate_period=SPEED_S,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> BreakdownProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """The bar is gone. Idempotent."""
        self._bar.stop()

    def begin(self, amount: float) -> None:
        """So much is to be done."""
        self._bar.reset(self._task, total=amount)
        self._bar.refresh()

    def now(self, what: str) -> None:
        """This begins."""
        self._bar.update(self._task, description=what)
        self._bar.refresh()
        if not self._console.is_terminal and what.startswith(("starting", "warming", "the ")):
            self.note(what)

    def done(self, amount: float, line: str) -> None:
        """It is done, and this came of it."""
        self._bar.update(self._task, advance=amount)
        self.note(line)

    def note(self, line: str) -> None:
        """A line that stays, with the time since the start."""
        text = f"[{time.monotonic() - self._started_at:6.0f} s] {line}"
        self._bar.console.print(text, markup=False, soft_wrap=True)
        self._bar.console.file.flush()
