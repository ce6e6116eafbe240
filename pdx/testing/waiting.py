"""Waiting for what another process or thread will do: how all tests and benches do it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 30.0
PAUSE_S = 0.005
_ROUND_S = 0.05


def came_true(condition: Callable[[], Any], timeout_s: float, *, pause_s: float = PAUSE_S) -> Any:
    """Poll until `condition()` is true or the time is over. Returns its last result.

    A round counts for at most `_ROUND_S` and a pause: while the machine stood still, so did the awaited process.
    """
    left_s = timeout_s
    while True:
        started = time.monotonic()
        if (result := condition()) or left_s < 0:
            return result
        time.sleep(pause_s)
        left_s -= min(time.monotonic() - started, _ROUND_S + pause_s)


def wait_until(
    condition: Callable[[], Any], what: str = "", timeout_s: float = DEADLINE_S, *, pause_s: float = PAUSE_S
) -> Any:
    """Poll until `condition()` is true and return what it returned.

    :raises AssertionError: it was not in time; the message says `what`.
    """
    if result := came_true(condition, timeout_s, pause_s=pause_s):
        return result
    raise AssertionError(f"not within {timeout_s} s: {what or condition}")
