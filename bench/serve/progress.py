"""How far `pdx bench serve` is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pdx.bench.harness.progress import Shown
from pdx.bench.harness.report import console
from pdx.bench.serve.client import Server
from pdx.bench.serve.goodput import Output

_LINE_S = 10.0  # between two lines, where there is no terminal
_REFRESH_S = 0.2  # between two pictures of the bar: drawing takes time from what is measured


class ServeProgress(Shown):
    """Told on the event loop; shows from `with` on. Used on one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at = clock()
        self._drawn_at = clock()
        super().__init__(
            console,
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._task = self.bar.add_task("", state="", visible=False)
        self._title = ""
        self._planned = 0
        self._running = 0
        self._done = 0
        self._failed = 0

    def begin(self, server: Server, block: int, of: int, planned: int) -> None:
        """A block begins."""
        self._planned, self._running, self._done, self._failed = planned, 0, 0, 0
        self._title = f"{server.label}, block {block} of {of}" if of > 1 else server.label
        self.bar.reset(self._task, total=planned, description=self._title, state="", visible=True)
        if not self.is_terminal:
            self.say(f"{self._title}: {planned} requests to {server.url}")

    def sent(self) -> None:
        """A request was sent."""
        self._running += 1
        self._show()

    def answered(self, output: Output) -> None:
        """A request is over."""
        self._running -= 1
        self._done += 1
        self._failed += not output.success
        self._show()
        if not self.is_terminal and (self._clock() >= self._told_at + _LINE_S or self._done == self._planned):
            self._told_at = self._clock()
            self.say(f"{self._title}: {self._done} of {self._planned} answered, {self._failed} failed")

    def _show(self) -> None:
        if not self.is_terminal or self._clock() < self._drawn_at + _REFRESH_S:
            return
        self._drawn_at = self._clock()
        failed = f", {self._failed} failed" if self._failed else ""
        self.bar.update(self._task, completed=self._done, state=f"{self._running} running{failed}")
        self.bar.refresh()
