"""The threads of a tier that keeps chunks outside of memory, and what they are given.

The control loop gives work to lanes; a thread that is free takes what waits in the first lane that has a thread left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import TierError
from pdx.store.tier import Job, Part

if TYPE_CHECKING:
    from pdx.store.store_tier import StoreTier

log = logging.getLogger("pdx.node")


class Work(msgspec.Struct, eq=False):
    """For a thread: a job, or something of the tier's own. The thread sets `error` and `seen_at`."""

    job: Job | None = None
    is_load: bool = False
    is_cancelled: bool = False
    error: TierError | None = None
    seen_at: float = 0.0  # when the last call came back, by the tier's clock
    is_silent: bool = False  # that was long ago, as the control loop knows

    @property
    def part(self) -> Part:
        """What the job is about."""
        assert self.job is not None
        return self.job.parts[0]

    def drop(self, error: TierError) -> None:
        """No thread begins it."""
        self.error = error


class Lane(msgspec.Struct, eq=False):
    """What waits for a thread, and how many may be at it. `first`: goes before the rest, and is done by a tier that
    closes, too."""

    limit: int
    first: deque[Work] = msgspec.field(default_factory=deque)
    rest: deque[Work] = msgspec.field(default_factory=deque)
    running: int = 0


class Threads:
    """Owned by the control loop, whose methods never wait but `close`."""

    def __init__(self, name: str, count: int, owner: StoreTier, lanes: Sequence[Lane]) -> None:
        """So many threads for these lanes, the first of which goes first."""
        self._owner = owner
        self._lanes = lanes
        self._condition = threading.Condition()  # guards the lanes
        self._at_work: list[tuple[Lane, Work] | None] = [None] * count
        self.is_closing = False
        self.has_silent = False  # there may be work that was found silent
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"pdx-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, work: Work, lane: Lane, *, is_first: bool = False) -> None:
        """Have this done; of a tier that is closed, it ends at once."""
        if self.is_closing:
            self._drop([work])
            return
        with self._condition:
            (lane.first if is_first else lane.rest).append(work)
            self._condition.notify()

    def take_back(self, *lanes: Lane) -> list[Work]:
        """What no thread has begun of these, and never will, but for what goes first."""
        with self._condition:
            works = [work for lane in lanes for work in lane.rest]
            for lane in lanes:
                lane.rest.clear()
        return works

    def silent(self, before: float) -> list[Work]:
        """What threads are at whose last call has not come back since `before`, each once."""
        found = [at[1] for at in self._at_work if at is not None and at[1].seen_at < before and not at[1].is_silent]
        for work in found:
            work.is_silent = self.has_silent = True
        return found

    def takes(self, lane: Lane) -> bool:
        """Whether a thread may come to what is given there: not all that may wait for calls that were found silent."""
        silent = [at[0] for at in self._at_work if at is not None and at[1].is_silent]
        self.has_silent = bool(silent)
        return silent.count(lane) < lane.limit

    def has_room(self, lane: Lane) -> bool:
        """Whether a thread would begin at once what is given there."""
        return lane.running + len(lane.rest) < lane.limit

    def close(self, timeout_s: float | None = None) -> bool:
        """End all but what goes first, and wait; whether all threads have ended."""
        with self._condition:
            self.is_closing = True
            left = self.take_back(*self._lanes)  # before a thread may begin any of it
            self._condition.notify_all()
        self._drop(left)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        for lane in self._lanes:
            with self._condition:
                left = list(lane.first)
                lane.first.clear()
            self._drop(left)
        return not any(thread.is_alive() for thread in self._threads)

    def _drop(self, works: Sequence[Work]) -> None:
        for work in works:
            work.drop(TierError("the tier is closed", "cancelled"))
            self._owner.env.mailbox.post(partial(self._owner.performed, work))

    # ---- on the threads ---------------------------------------------------------------------

    def _work(self, number: int) -> None:
        while (at := self._next()) is not None:
            lane, work = at
            work.seen_at = self._owner.env.clock()
            self._at_work[number] = at
            try:
                self._owner.perform(work)
            except TierError as error:  # a traceback would keep the arena's memory mapped
                work.error = TierError(str(error), error.kind, is_left=error.is_left)
            except Exception as error:  # the thread's root: a job must end, and the thread must not
                log.exception("a thread of a tier failed")
                work.error = TierError(f"{type(error).__name__}: {error}", "failed")
            self._at_work[number] = None
            with self._condition:
                lane.running -= 1
                self._condition.notify()
            self._owner.env.mailbox.post(partial(self._owner.performed, work))
            del at, work  # what it is about may be closed while this thread waits

    def _next(self) -> tuple[Lane, Work] | None:
        with self._condition:
            while True:
                for lane in self._lanes:
                    if lane.running < lane.limit or self.is_closing:
                        for queue in (lane.first, lane.rest):
                            if queue:
                                lane.running += 1
                                return lane, queue.popleft()
                if self.is_closing:
                    return None
                self._condition.wait()
