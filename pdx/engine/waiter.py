"""A thread that waits for events of a GPU, so that the engine's thread does not."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from pdx.engine.streams import Event

log = logging.getLogger("pdx")


class Waiter:
    """Waits for events in the order in which they were queued, and does what was queued with each.

    The queue is as long as the GPU is behind: a step's compute waits for the copies of the step before it.
    If waiting fails, it is over: nobody knows then what still runs, so no action is called any more.
    """

    def __init__(self, name: str, bind_thread: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """`failed` is called on the thread, at most once, with the reason."""
        self._bind_thread = bind_thread
        self._failed = failed
        self._queue: queue.SimpleQueue[tuple[Event | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: Event | None, action: Callable[[], None]) -> None:
        """Call `action` on the thread when `event` and everything queued before has passed."""
        self._queue.put((event, action))

    def close(self) -> None:
        """Finish what is queued and stop. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  the thread's root
            self._failed(error)
        else:
            return
        while self._queue.get() is not None:
            pass

    def _serve(self) -> None:
        self._bind_thread()
        while (job := self._queue.get()) is not None:
            event, action = job
            if event is not None:
                event.synchronize()
            try:
                action()
            except Exception:  # what was queued behind it concerns other copies
                log.exception("the node was not told of copies that have ended")
