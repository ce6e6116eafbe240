"""The steps of a bench: which one runs now, and Ctrl-C, which ends them and keeps what was measured."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdx.bench.harness.interrupts import Interrupts


class Steps:
    """A context that a measurement runs in. SIGINT and SIGTERM end it without an error; `was_interrupted` tells.

    Shows a bar on a terminal, and a line for each step elsewhere; both on standard error, so that standard output has
    nothing but the result. To be used by the main thread.
    """

    def __init__(self, total: int) -> None:
        self.was_interrupted = False
        self._console = Console(stderr=True, highlight=False)
        self._total = total
        self._at = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True) if self._console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=total)
        self._interrupts = Interrupts()

    def step(self, name: str) -> None:
        """The next step begins."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name, completed=self._at)
        else:
            self.say(f"[{self._at + 1}/{self._total}] {name}")
        self._at += 1

    def skip(self, count: int) -> None:
        """The next `count` steps are not taken."""
        self._at += count

    def say(self, line: str) -> None:
        """A line that stays on the screen."""
        self._console.print(line, markup=False, soft_wrap=True)
        self._console.file.flush()

    def __enter__(self) -> Steps:
        self._interrupts.__enter__()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._bar is not None:
            self._bar.stop()
        self._interrupts.__exit__()
        self.was_interrupted = isinstance(error, KeyboardInterrupt)
        return self.was_interrupted
