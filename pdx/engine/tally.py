"""What an engine's own metrics say of PDX: each half counts, and its engine takes that after a step."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """What was counted since it was last taken: by metric and the value of its one label
    (`pdx.telemetry.names.OF_ENGINES`). Any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, label: str, count: float) -> None:
        with self._lock:
            self._counts[f"{name}/{label}"] += count  # type: ignore[assignment]  # seconds, too

    def moved(self, direction: str, nbytes: int, seconds: float) -> None:
        """Bytes were copied to the engine's pages, or from them."""
        self.add("copied_bytes", direction, nbytes)
        self.add("copied_seconds", direction, seconds)

    def take(self) -> dict[str, float]:
        if not self._counts:  # as after most steps
            return {}
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)
