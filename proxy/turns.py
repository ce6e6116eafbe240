"""Work in steps: a generator that yields between them, where other requests have their turn, and returns a result."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


async def in_turns(steps: Steps[T]) -> T:
    """The result; the event loop serves others between the steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)


def at_once(steps: Steps[T]) -> T:
    """The result; nothing else happens meanwhile."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
