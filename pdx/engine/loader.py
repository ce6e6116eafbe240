"""Scatters loads into the engine's pages from a thread, slice by slice as they are filled, and collects what came of
them."""

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
LOOK_S = 0.0005  # how often a load looks for more slices: what is filled last waits half of it …
LOOK_AT_ALL_S = 0.02  # … of the first chunk that lacks some; how often it looks at all of them
PIECE_S = 0.004  # for so long a load stands behind a piece of another one …
PIECE_BYTES = 4 << 20  # … which has so much at least
ALIVE_S = 0.05  # how often one that finds none asks whether the node lives


class _Job:
    """One load: which slices of each of its chunks are copied. Owned by the load thread once it has begun."""

    def __init__(self, load: LoadPlan, scatter: Scatter, connection: Connection, arena: Arena) -> None:
        self.load = load
        self.connection = connection
        self.arena = arena
        self.failed: set[int] = set()  # blocks
        self._scatter = scatter
        self._left: dict[int, tuple[PagesPlan, int]] | None = None  # by number: slices from this one on are not copied
        self._watched: tuple[PagesPlan, int] | None = None  # the first chunk that lacks slices, and how many it had
        self._look_at = 0.0  # at all chunks, whatever the watched one says
        self.start_ns = 0  # of the first copy
        self.loaded_bytes = 0
        self.moved_at = time.monotonic()  # something was copied then
        self.asked_at = 0.0

    def begin(self, share: Share, own: Mapping[int, int] | None) -> None:
        """Once, before `advance`. `own`: see `SavePlan.of_stage`."""
        if self._left is None:
            self._left = {number: (pages, 0) for number, pages in enumerate(self.load.pages_of(share, own))}

    @property
    def is_over(self) -> bool:
        return not self._left

    def advance(self, groups: CacheGroups, most_bytes: float) -> list[tuple[range, int, int, int]]:
        """Copy what is filled and not copied, about `most_bytes` of it at most, and a chunk at least.

        :returns: (layers, bytes, from when, until when) of each copy.
        """
        assert self._left is not None
        if self._watched is not None and time.monotonic() < self._look_at:
            pages, filled = self._watched  # chunks are filled in their order: a look costs the same for any number
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
        """What is not copied yet will not be."""
        if self._left is None:
            self.failed.update(self.load.block_ids)
        else:
            self._lose(pages for pages, _ in self._left.values())
        self._left = {}

    def close(self) -> None:
        """Nothing more is copied."""
        self._scatter.close()

    def _filled(self, pages: PagesPlan) -> int:
        """Leading slices that are filled in every shard; `NEVER` where one of them will never have more."""
        least = NEVER
        for slot in pages.slots:
            if not self.arena.is_current(slot) or (filled := self.arena.filled_slices(slot)) == NEVER:
                return NEVER
            if filled < least:
                least = filled
        return least

    def _lose(self, lost: Iterable[PagesPlan]) -> None:
        self.failed.update(block for pages in lost for block in pages.block_ids)


_Place = tuple[float, int, _Job | None]  # None: nothing comes behind it


class Loader:
    """One load thread, which takes small loads first. `_lock` guards the results; everything else is the queue's.

    A load's place is what was submitted before it plus `OVERTAKEN` times its own blocks: a small one overtakes large
    ones, and those behind a load that go before it have at most `OVERTAKEN` times its blocks. A load is copied in
    pieces of about `PIECE_S`, and after each the first in place goes on: a small load does not stand behind a large one
    that has begun. One whose chunks are still being filled lets others go before it meanwhile.
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
        self._numbers = itertools.count()  # of two at one place the first one goes first
        self._submitted_blocks = 0
        self._rate = Rate()
        self._lock = threading.Condition()
        self._under_way = 0
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._thread: threading.Thread | None = None  # while there was a load since the last `close`

    def submit(self, load: LoadPlan, scatter: Scatter, connection: Connection, arena: Arena) -> None:
        """Load this in its turn, by `scatter`, which is closed then; never waits. One thread."""
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
        """Finish what is queued and whole, give up what is still being filled, and stop, until the next `submit`.
        Idempotent."""
        if self._thread is not None:
            self._jobs.put((math.inf, next(self._numbers), None))
            self._thread.join()
            self._thread = None

    # ---- the load thread --------------------------------------------------------------------

    def _run(self) -> None:
        filling: list[_Place] = []  # nothing more of them was there to be copied
        look_at = 0.0  # at them, again
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
        """Copy a piece of what is there of it; whether there was any."""
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
        """Whether nothing more of it comes, as far as can be known: the node ends what its writers leave."""
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
        """What was copied: to whoever wants to know how fast that is, and to the trace."""
        transfer, tracer = job.load.transfer, self._tracer
        for layers, nbytes, start_ns, end_ns in copies:
            if nbytes:  # what was not copied says nothing of how long that takes
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
