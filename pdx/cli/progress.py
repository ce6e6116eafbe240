"""What `pdx up` shows while its processes start: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdx.cli.processes import Process, Processes, State

_COLOURS = {State.STARTING: "yellow", State.READY: "green", State.STOPPED: "dim", State.DIED: "bold red"}


class Progress:
    """Shows the states of `processes` each time `update` is called."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._started_at = time.monotonic()
        self._shown: dict[str, State] = {}
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if sys.stdout.isatty() else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Show what has changed."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        for process in self._processes:
            if self._shown.get(process.name) is not process.state:
                self._shown[process.name] = process.state
                self.say(f"{process.name} (pid {process.pid}) {process.state}; log: {process.log}")

    def say(self, line: str) -> None:
        """One line with the time since the start; it stays on the screen."""
        text = f"[{time.monotonic() - self._started_at:6.1f} s] {line}"
        self._console.print(text, markup=False, soft_wrap=True)
        self._console.file.flush()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, expand=True)
        for name in ("process", "pid", "state", "seconds"):
            table.add_column(name, justify="right" if name in ("pid", "seconds") else "left", no_wrap=True)
        table.add_column("last line of its log", no_wrap=True, overflow="ellipsis", ratio=1)
        for process in self._processes:
            table.add_row(*self._row(process))
        return table

    def _row(self, process: Process) -> tuple[str | Text, ...]:
        age_s = process.ready_after_s or time.monotonic() - process.started_at
        last = process.tail(1)
        return (
            process.name,
            str(process.pid),
            Text(process.state, style=_COLOURS[process.state]),
            f"{age_s:.0f}",
            Text(last[0] if last else "", style="dim"),
        )
