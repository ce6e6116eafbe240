"""How far a measurement is: lines on standard error, so that standard output has nothing but results."""

from __future__ import annotations

import time

from rich.console import Console


class Shown:
    """Says what is done now and what came of it, each with the time since the start. For one thread."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._started_at = time.monotonic()

    def note(self, line: str) -> None:
        self.say(f"[{time.monotonic() - self._started_at:6.0f} s] {line}")

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
        self._console.file.flush()
