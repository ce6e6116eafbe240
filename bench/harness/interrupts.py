"""SIGINT and SIGTERM end a measurement, leave none of its processes behind, and keep what was measured.

For the main thread, except `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any, Self, TypeVar

from pdx.bench.harness.progress import ProgressBar

_T = TypeVar("_T")
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context in which the first of these signals raises KeyboardInterrupt; later ones do not disturb the cleanup."""

    def __init__(self) -> None:
        self._was_received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._take) for number in _NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if not self._was_received:
            self._was_received = True
            raise KeyboardInterrupt


def run(coroutine: Coroutine[Any, Any, _T], *, runner: Callable[[Coroutine[Any, Any, _T]], _T] = asyncio.run) -> _T:
    """Run `runner(coroutine)` within `Interrupts`: a signal cancels the coroutine, and takes effect after that.

    A KeyboardInterrupt raised inside an event loop would be raised a second time while its tasks are cancelled, and
    leave the loop open; the same while the loop is created. Only the main thread handles signals: in any other thread
    this is just `runner(coroutine)`.
    """
    if threading.current_thread() is not threading.main_thread():
        return runner(coroutine)
    running: list[asyncio.Task[Any]] = []

    def cancel() -> None:
        for task in running:
            task.get_loop().call_soon_threadsafe(task.cancel)  # this also wakes a loop that waits for sockets

    with deferred_signals(cancel) as received:

        async def cancellable() -> _T:
            task = asyncio.current_task()
            assert task is not None
            running.append(task)
            if received:
                task.cancel()
            try:
                return await coroutine
            finally:
                running.clear()

        return runner(cancellable())


@contextlib.contextmanager
def shielded(context: AbstractContextManager[_T]) -> Iterator[_T]:
    """Enter and leave `context` undisturbed: a signal during its start would leave a process behind.

    Signals take effect right afterwards, so `context` must have its own deadlines.
    """
    stack = ExitStack()
    try:
        with deferred_signals():
            entered = stack.enter_context(context)
        yield entered
    finally:
        with deferred_signals():
            stack.close()


@contextlib.contextmanager
def deferred_signals(first: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Signals take effect when this context ends: its body must have its own deadlines.

    Yields the signals received so far; `first` is called on the first of them.
    """
    received: list[int] = []

    def take(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            first()

    before = {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        for number in _NUMBERS:
            signal.signal(number, take)
        yield received
    finally:
        _restore(before)
        if received:
            signal.raise_signal(received[0])


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Steps(ProgressBar):
    """A context for a measurement. SIGINT and SIGTERM end it without an error; see `was_interrupted`.

    For the main thread.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.was_interrupted = False
        self._total = total
        self._at = 0
        self._interrupts = Interrupts()

    def step(self, name: str) -> None:
        self.advance(min(self._at, 1))
        self._at += 1
        if self.is_terminal:
            self.set_status(name)
        else:
            self.say(f"[{self._at}/{self._total}] {name}")

    def __enter__(self) -> Self:
        self._interrupts.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> bool:
        self.stop()
        self._interrupts.__exit__()
        self.was_interrupted = isinstance(error[1], KeyboardInterrupt)
        return self.was_interrupted
