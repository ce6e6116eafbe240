"""Functions that the threads of what is tested wait at, until the test says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest


class Gate:
    """Who calls this function of an object or module waits at it until `open`; `behind`: with its answer in hand."""

    def __init__(self, patch: pytest.MonkeyPatch, of: Any, name: str, *, behind: bool = False) -> None:
        self.arrived = threading.Semaphore(0)
        self._opened = threading.Event()
        real = getattr(of, name)

        def gated(*args: Any, **settings: Any) -> Any:
            found = real(*args, **settings) if behind else None
            self.arrived.release()
            assert self._opened.wait(60)
            return found if behind else real(*args, **settings)

        patch.setattr(of, name, gated)

    def open(self) -> None:
        self._opened.set()
