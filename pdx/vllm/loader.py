"""Scatters loads into the engine's pages from a thread, and collects what came of them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

import torch

from pdx.connection import Connection
from pdx.kernels.pages import scatter
from pdx.layout import KvLayout
from pdx.messages import Mark
from pdx.timeline import Event
from pdx.vllm.plan import LoadPlan, PagesPlan
from pdx.vllm.rows import ArenaRows

log = logging.getLogger("pdx")


class Loader:
    """One load thread. `_lock` guards the results; everything else is the queue's."""

    def __init__(self, layout: KvLayout, shard: int, count: Callable[[str], None]) -> None:
        self.pages: list[torch.Tensor] = []  # per layer: rows of the engine's blocks
        self._layout = layout
        self._shard = shard
        self._count = count
        self._jobs: queue.SimpleQueue[tuple[LoadPlan, ArenaRows, Connection] | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._under_way = 0
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="pdx-load", daemon=True)
        self._thread.start()

    def submit(self, loads: Iterable[LoadPlan], rows: ArenaRows, connection: Connection) -> None:
        """Load these, in order; never waits."""
        for load in loads:
            with self._lock:
                self._under_way += 1
            self._jobs.put((load, rows, connection))

    def fail(self, loads: Iterable[LoadPlan]) -> None:
        """These cannot be loaded: the engine recomputes their blocks."""
        for load in loads:
            log.warning("request %s: its node is gone, %d chunks are not loaded", load.request_id, len(load.pages))
            self._count("load_failed")
            with self._lock:
                self._finished.add(load.request_id)
                self._failed_blocks.update(block for pages in load.pages for block in pages.block_ids)

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
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            load, rows, connection = job
            failed: set[int] = {block for pages in load.pages for block in pages.block_ids}
            try:
                failed = self._load(load, rows, connection)
            except Exception:  # the thread's root: the load failed, the engine recomputes it
                log.exception("loading request %s failed", load.request_id)
            if failed:
                self._count("load_failed")
            with self._lock:
                self._under_way -= 1
                self._finished.add(load.request_id)
                self._failed_blocks |= failed
                self._lock.notify_all()

    def _load(self, load: LoadPlan, rows: ArenaRows, connection: Connection) -> set[int]:
        start_ns = time.monotonic_ns()
        failed: set[int] = set()
        nbytes = 0
        for pages in load.pages:
            if self._scatter(pages, rows):
                nbytes += len(pages.block_ids) * self._layout.page_bytes * self._layout.num_layers
            else:
                failed.update(pages.block_ids)
        if failed:
            log.warning("request %s: %d blocks were evicted before they were loaded", load.request_id, len(failed))
        if load.transfer is not None:
            self._mark(load.transfer, connection, start_ns, nbytes)
        return failed

    def _scatter(self, pages: PagesPlan, rows: ArenaRows) -> bool:
        """Copy one chunk; whether its slot was the promised one before and after."""
        slot = pages.slots[self._shard]
        if not rows.arena.is_current(slot):
            return False
        source = rows.of(slot, self._layout.num_layers * pages.num_blocks)
        block_ids = torch.tensor(pages.block_ids, dtype=torch.int64)
        for layer, target in enumerate(self.pages):
            first = layer * pages.num_blocks + pages.first
            scatter(source[first : first + len(block_ids)], block_ids, target)
        return rows.arena.is_current(slot)

    @staticmethod
    def _mark(transfer: str, connection: Connection, start_ns: int, nbytes: int) -> None:
        connection.tell(Mark(transfer, Event.LOAD_START, start_ns))
        connection.tell(Mark(transfer, Event.LOAD_END, time.monotonic_ns(), nbytes=nbytes))
