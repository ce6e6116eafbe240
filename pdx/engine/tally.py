"""Counts for an engine's own metrics: each half counts, and its engine takes the counts after a step."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """Counts since the last `take`, by metric and the value of its one label (`pdx.telemetry.names.OF_ENGINES`).
    Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, label: str, count: float) -> None:
        with self._lock:
            self._counts[f"{name}/{label}"] += count  # type: ignore[assignment]  # seconds, too

    def moved(self, direction: str, nbytes: int, seconds: float) -> None:
        """Count bytes that were copied to the engine's pages, or from them."""
        self.add("copied_bytes", direction, nbytes)
        self.add("copied_seconds", direction, seconds)

    def take(self) -> dict[str, float]:
        if not self._counts:  # as after most steps
            return {}
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)
