"""The arenas of this node as a tier of each other: host memory and GPUs, copied by memcpy and by copy engines.

Slices are copied whole and as they lie: no kernel runs, and nothing is gathered. One thread moves all bytes, without
the GIL. A job's copies from or to one GPU are one call of the driver if all host memory involved is page-locked.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from pdx.cuda.arena import GpuArena
from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu
from pdx.cuda.page_lock import PageLock
from pdx.errors import ArenaTooSmall, GpuError, PdxError, StaleSlot, TransferAborted
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.store.chunk import NODE, Claim, Origin
from pdx.store.copies import Copies
from pdx.store.copy import Copy
from pdx.store.history import Cause
from pdx.store.store import Store
from pdx.store.tier import Grant, Job, Part, Tier
from pdx.telemetry.env import Env
from pdx.telemetry.faults import counted
from pdx.wire.hints import Hints

log = logging.getLogger("pdx.node")

JOIN_S = 5.0


class ArenaTier(Tier):
    """See `Tier`. `Copy.arenas` names the arenas that a copy's chunks go to; the node itself fills the slots there."""

    kind = name = "arenas"
    max_job_bytes = 64 << 20  # so that one launch of copies does not delay the next for long
    max_inflight_bytes = 256 << 20

    def __init__(self, arenas: Sequence[Arena], store: Store, copies: Copies, env: Env) -> None:
        self._arenas = arenas
        self._store = store
        self._copies = copies
        self._post = env.mailbox.post
        self._counters = env.counters
        self._slots: dict[int, list[Slot]] = {}  # granted to each copy, by its number
        self._cancelled: set[int] = set()  # numbers of copies
        self._is_closing = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._streams: dict[str, CopyStream] = {}  # by GPU; on the thread only
        self._pairs: dict[tuple[str, str], bool] = {}  # whether a GPU may use another's memory; on the thread only
        self._page_lock = self._lock_host()
        self._thread = threading.Thread(target=self._run, name="pdx-arenas", daemon=True)
        self._thread.start()

    def admit(self, copy: Copy) -> Grant:
        """Reserve room for missing chunks in the arenas that the copy names."""
        first, last = copy.chunks[0], copy.chunks[-1]
        claim = Claim(
            keys=copy.keys,
            nbytes=first.slot.nbytes,
            layers=first.reservation.layers,
            owner=NODE,
            writers=[NODE] * copy.shards,
            arenas=tuple(copy.arenas),
            tail_nbytes=last.slot.nbytes if last.tail else 0,
            partial=True,
            transfer=copy.transfer if last.tail else None,
            hints=Hints("", form=first.hints.form),
            deadline=copy.deadline,
            origin=Origin("another arena"),
            who="a copy between arenas",
            passed={at for at in range(len(copy.keys)) if copy.chunks[at * copy.shards].is_passed},
        )
        try:
            granted, slots, _ = self._store.reserve(claim)
        except ArenaTooSmall:
            granted, slots = [], []
        self._slots[copy.number] = slots
        return Grant(granted, slots)

    def store(self, job: Job) -> None:
        self._jobs.put(job)

    def cancel(self, copy: Copy) -> None:
        """Drop jobs of this copy that have not begun."""
        self._cancelled.add(copy.number)

    def copy_ended(self, copy: Copy) -> None:
        """Give back the slots into which nothing was copied."""
        self._cancelled.discard(copy.number)
        self._copies.give_back(self._slots.pop(copy.number, []), Cause.NOT_COPIED)

    def close(self) -> None:
        """End the thread; wait up to JOIN_S for its current job. Idempotent."""
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join(JOIN_S)

    def _lock_host(self) -> PageLock | None:
        """Begin to page-lock the arena in host memory if there is a GPU arena to copy from and to. Its pages are all
        allocated, so this takes no memory. If it is refused, copies are slower and each is a call of its own."""
        host = next((arena for arena in self._arenas if not arena.gpu), None)
        gpu = next((arena.gpu for arena in self._arenas if arena.gpu), "")
        if host is None or not gpu:
            return None
        try:
            return PageLock(host.address, host.nbytes, Gpu.find(gpu), anchor=host.data[:], on_refused=self._refused)
        except RuntimeError as error:  # no more threads can be had
            self._refused(str(error))
            return None

    def _refused(self, why: str) -> None:
        text = "copies between host memory and GPUs are slow: %s"
        self._post(lambda: counted(log, self._counters, "page_lock_refused", text, why))

    def _over(self, job: Job, error: PdxError | None) -> None:
        """Handle the end of a job, on the control loop's thread."""
        if error is None:
            for part in job.parts:
                assert part.remote is not None
                with contextlib.suppress(StaleSlot):  # the chunk was deleted meanwhile
                    self._copies.land(part.remote, part.first_layer, part.count)
        self._copies.done(self, job, error)

    # ---- on its own thread ------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._post(partial(self._over, job, self._move(job)))
        for stream in self._streams.values():
            stream.close()
        if self._page_lock is not None:
            self._page_lock.close()

    def _move(self, job: Job) -> PdxError | None:
        if job.number in self._cancelled or self._is_closing:
            return TransferAborted("the copy was given up")
        views = [arena.data[:0] for arena in self._arenas if not arena.gpu]  # they keep the memory mapped, see `close`
        job.start_ns = time.monotonic_ns()
        try:
            self._copy(job.parts)
            job.end_ns = time.monotonic_ns()
        except PdxError as error:
            return error
        except Exception as error:  # the thread goes on with other jobs
            log.exception("a copy between arenas failed")
            return GpuError(f"{type(error).__name__}: {error}")
        finally:
            views.clear()
        return None

    def _copy(self, parts: Sequence[Part]) -> None:
        """Return when all parts are copied. After an error too, no copy is in flight any more."""
        queued: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)  # by GPU
        by_host: list[ctypes.Array[ctypes.c_char]] = []  # bytes between GPUs that go through host memory
        are_reached = True
        for part in parts:
            assert part.remote is not None
            source, target = self._arenas[part.slot.arena], self._arenas[part.remote.arena]
            start, nbytes = part.span
            to, at = target.address + part.remote.offset + start, source.address + part.slot.offset + start
            gpu = source.gpu or target.gpu
            if not gpu:
                ctypes.memmove(to, at, nbytes)
                continue
            if not self._may_use(gpu, target):
                read = source.read(part.slot.offset + start, nbytes)
                by_host.append((ctypes.c_char * nbytes).from_buffer(read))
                gpu, at, are_reached = target.gpu, ctypes.addressof(by_host[-1]), False
            queued[gpu].append((to, at, nbytes))
            are_reached = are_reached and self._is_reached(part.slot) and self._is_reached(part.remote)
        with contextlib.ExitStack() as ends:
            for gpu, copies in queued.items():
                stream = self._stream(gpu)
                ends.callback(stream.wait)
                if are_reached:
                    stream.copy_all(copies)
                else:
                    for each in copies:
                        stream.copy(*each)

    def _is_reached(self, slot: Slot) -> bool:
        """Whether this memory is a GPU's or page-locked, as copies in one call require."""
        lock = self._page_lock
        return bool(self._arenas[slot.arena].gpu) or (lock is not None and lock.covers(slot.offset, slot.nbytes))

    def _may_use(self, gpu: str, arena: Arena) -> bool:
        """Whether the copy engine of that GPU may write to the arena."""
        if not isinstance(arena, GpuArena) or arena.gpu == gpu:
            return True
        if (gpu, arena.gpu) not in self._pairs:
            self._pairs[gpu, arena.gpu] = arena.device.allow(Gpu.find(gpu))
        return self._pairs[gpu, arena.gpu]

    def _stream(self, gpu: str) -> CopyStream:
        if gpu not in self._streams:
            self._streams[gpu] = CopyStream(Gpu.find(gpu))
        return self._streams[gpu]
