"""Scatters loads into the engine's pages from a thread, and collects what came of them."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from pdx.client.connection import Connection
from pdx.engine.copier import Scatter
from pdx.engine.plan import LoadPlan
from pdx.memory.layout import KvLayout
from pdx.telemetry.timeline import Event
from pdx.telemetry.trace import Lane, Tracer
from pdx.wire.messages import Mark

log = logging.getLogger("pdx")

OVERTAKEN = 4


class _Job(NamedTuple):
    load: LoadPlan
    scatter: Scatter
    connection: Connection


class Loader:
    """One load thread, which takes small loads first. `_lock` guards the results; everything else is the queue's.

    A load's place is what was submitted before it plus `OVERTAKEN` times its own blocks: a small one overtakes large
    ones that have not begun, and those behind a load that go before it have at most `OVERTAKEN` times its blocks.
    """

    def __init__(self, layout: KvLayout, tracer: Tracer | None = None) -> None:
        self._layout = layout
        self._tracer = tracer
        self._jobs: queue.PriorityQueue[tuple[float, int, _Job | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()  # of two at one place the first one goes first
        self._submitted_blocks = 0
        self._lock = threading.Condition()
        self._under_way = 0
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="pdx-load", daemon=True)
        self._thread.start()

    def submit(self, load: LoadPlan, scatter: Scatter, connection: Connection) -> None:
        """Load this in its turn, by calling `scatter`; never waits. One thread."""
        with self._lock:
            self._under_way += 1
        num_blocks = len(load.block_ids)
        place = self._submitted_blocks + OVERTAKEN * num_blocks
        self._submitted_blocks += num_blocks
        self._jobs.put((place, next(self._numbers), _Job(load, scatter, connection)))

    def fail(self, loads: Iterable[LoadPlan]) -> None:
        """These cannot be loaded: the engine recomputes their blocks."""
        with self._lock:
            for load in loads:
                self._finished.add(load.request_id)
                self._failed_blocks.update(load.block_ids)

    def wait(self, timeout_s: float) -> None:
        """Wait until a load is over, if one is under way."""
        with self._lock:
            if self._under_way and not self._finished:
                self._lock.wait(timeout_s)

    def take_finished(self) -> tuple[set[str], set[int]]:
        """Requests whose load is over, and blocks that were not loaded, since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed_blocks = self._failed_blocks, set()
        return finished, failed

    def close(self) -> None:
        """Finish what is queued and stop. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put((math.inf, next(self._numbers), None))
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()[-1]) is not None:
            failed = set(job.load.block_ids)
            try:
                failed = self._load(job)
            except Exception:  # the thread's root: the load failed, the engine recomputes it
                log.exception("loading request %s failed", job.load.request_id)
            if failed:
                text = "request %s: %d blocks are not loaded: evicted before that, or out of the GPU's reach"
                job.connection.count("load_failed", text, job.load.request_id, len(failed))
            with self._lock:
                self._under_way -= 1
                self._finished.add(job.load.request_id)
                self._failed_blocks |= failed
                self._lock.notify_all()
            if self._tracer is not None:
                self._tracer.flush()

    def _load(self, job: _Job) -> set[int]:
        load = job.load
        start_ns = time.monotonic_ns()
        failed = {block for pages in job.scatter(load) for block in pages.block_ids}
        end_ns = time.monotonic_ns()
        if load.transfer is not None:
            num_pages = len(load.block_ids) - len(failed)
            nbytes = num_pages * self._layout.page_bytes * self._layout.num_layers
            job.connection.tell(Mark(load.transfer, Event.LOAD_START, start_ns))
            job.connection.tell(Mark(load.transfer, Event.LOAD_END, end_ns, nbytes=nbytes))
            if self._tracer is not None and self._tracer.is_on:
                self._tracer.span(Lane.SCATTER, load.transfer, 0, self._layout.num_layers, start_ns, end_ns, nbytes)
        return failed
