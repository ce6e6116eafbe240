"""How far a measurement is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class Shown:
    """A context in which a bar is on the screen, if `console` is a terminal. For one thread.

    The bar is drawn only when something is told: a thread that draws would take time from what is measured.
    """

    def __init__(self, console: Console, *columns: ProgressColumn, **settings: Any) -> None:
        self.is_terminal = console.is_terminal
        self.bar = Progress(
            *columns,
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
            **settings,
        )

    def say(self, line: str) -> None:
        """A line that stays."""
        self.bar.console.print(line, markup=False, soft_wrap=True)
        self.bar.console.file.flush()

    def stop(self) -> None:
        """The bar is gone. Idempotent."""
        self.bar.stop()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> bool | None:
        self.stop()
        return None
