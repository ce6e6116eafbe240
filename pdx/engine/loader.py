"""Scatters loads into the engine's pages on a thread, slice by slice as they are filled, and collects the results."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pdx.client.connection import Connection
from pdx.engine.copier import Scatter
from pdx.engine.plan import LoadPlan, PagesPlan
from pdx.engine.tally import Tally
from pdx.memory.arena import NEVER, Arena
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.memory.share import Share
from pdx.telemetry.rate import Rate
from pdx.telemetry.timeline import Event
from pdx.telemetry.trace import Lane, Tracer
from pdx.wire.messages import Mark

log = logging.getLogger("pdx.engine")

OVERTAKEN = 4
LOOK_S = 0.0005  # how often a load looks for slices of the first chunk that lacks some: half of it delays the last
LOOK_AT_ALL_S = 0.02  # how often it looks at all its chunks
PIECE_S = 0.004  # how long a load waits for a piece of another one …
PIECE_BYTES = 4 << 20  # … which has at least so much
ALIVE_S = 0.05  # how often a load that finds no slices checks that the node lives


class _Job:
    """One load: which slices of each of its chunks are copied. Owned by the load thread once it has begun."""

    def __init__(self, load: LoadPlan, scatter: Scatter, connection: Connection, arena: Arena) -> None:
        self.load = load
        self.connection = connection
        self.arena = arena
        self.failed: set[int] = set()  # blocks
        self._scatter = scatter
        self._left: dict[int, tuple[PagesPlan, int]] | None = None  # by number: the first slice not copied
        self._watched: tuple[PagesPlan, int] | None = None  # the first chunk that lacks slices, and how many it had
        self._look_at = 0.0  # at all chunks, whatever the watched one says
        self.start_ns = 0  # of the first copy
        self.loaded_bytes = 0
        self.moved_at = time.monotonic()  # when something was last copied
        self.asked_at = 0.0

    def begin(self, share: Share, own: Mapping[int, int] | None) -> None:
        """Once, before `advance`. `own`: see `SavePlan.of_stage`."""
        if self._left is None:
            self._left = {number: (pages, 0) for number, pages in enumerate(self.load.pages_of(share, own))}

    @property
    def is_over(self) -> bool:
        return not self._left

    def advance(self, groups: CacheGroups, most_bytes: float) -> list[tuple[range, int, int, int]]:
        """Copy slices that are filled and not yet copied: at most about `most_bytes`, and at least a chunk.

        :returns: (layers, bytes, start ns, end ns) of each copy.
        """
        assert self._left is not None
        if self._watched is not None and time.monotonic() < self._look_at:
            pages, filled = self._watched  # chunks are filled in order, so one look suffices
            if self._filled(pages) == filled:
                return []
        runs: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        left_bytes = most_bytes
        for number, (pages, start) in self._left.items():
            filled = self._filled(pages)
            if filled > start:
                layout = groups[pages.group]
                runs[pages.group, start, filled].append(number)
                num_slices = (min(filled, layout.num_layers) - start) * len(pages.slots)
                left_bytes -= len(pages.block_ids) * num_slices * layout.page_bytes
                if left_bytes <= 0:
                    break
        copies = []
        for (group, start, stop), numbers in runs.items():
            layout = groups[group]
            pages_of = {number: self._left.pop(number)[0] for number in numbers}
            if stop == NEVER:
                self._lose(pages_of.values())
                continue
            layers = range(start, min(stop, layout.num_layers))
            start_ns = time.monotonic_ns()
            lost = {id(pages) for pages in self._scatter.copy(list(pages_of.values()), layers)}
            end_ns = time.monotonic_ns()
            self._lose(pages for pages in pages_of.values() if id(pages) in lost)
            pages_of = {number: pages for number, pages in pages_of.items() if id(pages) not in lost}
            num_pages = sum(len(pages.block_ids) * len(pages.slots) for pages in pages_of.values())
            nbytes = num_pages * len(layers) * layout.page_bytes
            self.loaded_bytes += nbytes
            copies.append((layers, nbytes, start_ns, end_ns))
            if layers.stop < layout.num_layers:
                self._left |= {number: (pages, layers.stop) for number, pages in pages_of.items()}
        self._watched = None
        if self._left and left_bytes > 0:
            first, copied = self._left[min(self._left)]
            self._watched = first, copied
            self._look_at = time.monotonic() + LOOK_AT_ALL_S
        if copies:
            self.start_ns = self.start_ns or copies[0][2]
            self.moved_at = time.monotonic()
        return copies

    def give_up(self) -> None:
        """Fail everything that is not copied yet."""
        if self._left is None:
            self.failed.update(self.load.block_ids)
        else:
            self._lose(pages for pages, _ in self._left.values())
        self._left = {}

    def close(self) -> None:
        """Release the arena: nothing more is copied."""
        self._scatter.close()

    def _filled(self, pages: PagesPlan) -> int:
        """Leading slices that are filled in every shard; `NEVER` if a shard will never have more."""
        least = NEVER
        for slot in pages.slots:
            if not self.arena.is_current(slot) or (filled := self.arena.filled_slices(slot)) == NEVER:
                return NEVER
            if filled < least:
                least = filled
        return least

    def _lose(self, lost: Iterable[PagesPlan]) -> None:
        self.failed.update(block for pages in lost for block in pages.block_ids)


_Place = tuple[float, int, _Job | None]  # None: the end


class Loader:
    """The load thread, which prefers small loads. `_lock` guards the results; everything else goes through the queue.

    A load's place is the number of blocks submitted before it plus `OVERTAKEN` times its own: small loads overtake
    large ones, and all those that overtake a load together have at most `OVERTAKEN` times its blocks. A load is copied
    in pieces of about `PIECE_S`, and after each the first in place continues: a small load does not wait for a large
    one that has begun. A load whose chunks are still being filled lets others go first.
    """

    def __init__(
        self,
        layout: KvLayout | Sequence[KvLayout],
        share: Share,
        tracer: Tracer | None = None,
        *,
        tally: Tally | None = None,
        patience_s: float = 30.0,
    ) -> None:
        """`tally`: counts what is copied. `patience_s`: a load that has copied nothing for so long fails."""
        self._groups = CacheGroups.of(layout)
        self._share = share
        self._tracer = tracer
        self._tally = tally or Tally()
        self._patience_s = patience_s
        self._jobs: queue.PriorityQueue[_Place] = queue.PriorityQueue()
        self._numbers = itertools.count()  # at one place, the first to come goes first
        self._submitted_blocks = 0
        self._rate = Rate()
        self._lock = threading.Condition()
        self._under_way = 0
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._thread: threading.Thread | None = None  # from the first load to `close`

    def submit(self, load: LoadPlan, scatter: Scatter, connection: Connection, arena: Arena) -> None:
        """Enqueue a load; `scatter` copies it in its turn and is then closed. Never waits. One thread."""
        with self._lock:
            self._under_way += 1
        job = _Job(load, scatter, connection, arena)
        num_blocks = len(load.block_ids)
        place = self._submitted_blocks + OVERTAKEN * num_blocks
        self._submitted_blocks += num_blocks
        self._jobs.put((place, next(self._numbers), job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pdx-load", daemon=True)
            self._thread.start()

    def fail(self, loads: Iterable[LoadPlan]) -> None:
        """These cannot be loaded: the engine recomputes their blocks."""
        with self._lock:
            for load in loads:
                self._finished.add(load.request_id)
                self._failed_blocks.update(load.block_ids)

    def wait(self, timeout_s: float) -> None:
        """Wait until a load is over, if one is in flight."""
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
        """Finish queued loads that are whole, give up those still being filled, and stop, until the next `submit`.
        Idempotent."""
        if self._thread is not None:
            self._jobs.put((math.inf, next(self._numbers), None))
            self._thread.join()
            self._thread = None

    # ---- the load thread --------------------------------------------------------------------

    def _run(self) -> None:
        filling: list[_Place] = []  # loads that had nothing to copy
        look_at = 0.0  # again, at these
        while True:
            if filling and time.monotonic() >= look_at:
                for place in filling:
                    self._jobs.put(place)
                filling = []
            try:
                place = self._jobs.get(timeout=max(0.0, look_at - time.monotonic()) if filling else None)
            except queue.Empty:
                continue
            job = place[-1]
            if job is None:
                break
            has_copied = self._advance(job)
            if job.is_over:
                continue
            if has_copied:
                self._jobs.put(place)
                continue
            look_at = look_at if filling else time.monotonic() + LOOK_S
            filling.append(place)
        for *_, job in filling:
            if job is not None:
                job.give_up()
                self._end(job)

    def _advance(self, job: _Job) -> bool:
        """Copy a piece of its filled slices. Returns whether there were any."""
        copies: list[tuple[range, int, int, int]] = []
        try:
            job.begin(self._share, self._groups.renumbered)
            copies = job.advance(self._groups, max(PIECE_BYTES, self._rate.gb_s * PIECE_S * 1e9))
            self._tell(job, copies)
            if not job.is_over and not copies and self._is_lost(job):
                job.give_up()
        except Exception:  # the thread's root: the load failed, the engine recomputes it
            log.exception("loading request %s failed", job.load.request_id)
            job.give_up()
            job.failed.update(job.load.block_ids)
        if job.is_over:
            self._end(job)
        return bool(copies)

    def _is_lost(self, job: _Job) -> bool:
        """Whether no more slices can be expected. While the node lives, it ends what its writers abandon."""
        now = time.monotonic()
        if now - max(job.moved_at, job.asked_at) < ALIVE_S:
            return False
        job.asked_at = now
        if not job.connection.is_alive:
            return True
        if now - job.moved_at < self._patience_s:
            return False
        text = "request %s: nothing of it was filled for %s s, the rest is not loaded"
        job.connection.count("load_late", text, job.load.request_id, self._patience_s)
        return True

    def _tell(self, job: _Job, copies: Iterable[tuple[range, int, int, int]]) -> None:
        """Report the copies to the measured rate, the metrics and the trace."""
        transfer, tracer = job.load.transfer, self._tracer
        for layers, nbytes, start_ns, end_ns in copies:
            if nbytes:  # a failed copy says nothing about the rate
                self._rate.moved(nbytes, start_ns, end_ns)
                self._tally.moved("load", nbytes, (end_ns - start_ns) / 1e9)
            if transfer is not None and tracer is not None and tracer.is_on:
                tracer.span(Lane.SCATTER, transfer, layers.start, len(layers), start_ns, end_ns, nbytes)
        job.connection.load_s = self._rate.seconds(self._groups.chunk_bytes * self._share.count)

    def _end(self, job: _Job) -> None:
        load = job.load
        job.close()
        if job.failed:
            text = "request %s: %d blocks are not loaded: evicted before that, never filled, or out of the GPU's reach"
            job.connection.count("load_failed", text, load.request_id, len(job.failed))
        if load.transfer is not None and job.start_ns:
            nbytes = job.loaded_bytes
            job.connection.tell(Mark(load.transfer, Event.LOAD_START, job.start_ns))
            job.connection.tell(Mark(load.transfer, Event.LOAD_END, time.monotonic_ns(), nbytes=nbytes))
        with self._lock:
            self._under_way -= 1
            self._finished.add(load.request_id)
            self._failed_blocks |= job.failed
            self._lock.notify_all()
        if self._tracer is not None:
            self._tracer.flush()
