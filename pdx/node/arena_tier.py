"""The arenas of this node as a tier of each other: host memory and GPUs, copied by memcpy and by copy engines.

Slices go as they lie, in whole slices: no kernel runs, and nothing is gathered. One thread moves all bytes; the GIL is
released meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu
from pdx.errors import ArenaTooSmall, GpuError, PdxError, StaleSlot, TransferAborted
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.store.chunk import NODE
from pdx.store.copies import Copies
from pdx.store.copy import Copy
from pdx.store.store import Claim, Store
from pdx.store.tier import Grant, Held, Job, Part, Tier

log = logging.getLogger("pdx.node")

JOIN_S = 5.0


class ArenaTier(Tier):
    """See `Tier`. A copy names by `Copy.arenas` where its chunks go; the slots there are this node's own to fill."""

    kind = name = "arenas"
    max_job_bytes = 64 << 20  # one launch of copies shall not keep those behind it waiting for long
    max_inflight_bytes = 256 << 20

    def __init__(
        self,
        arenas: Sequence[Arena],
        store: Store,
        copies: Copies,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`post` has the control loop call something."""
        self._arenas = arenas
        self._store = store
        self._copies = copies
        self._post = post
        self._slots: dict[int, list[Slot]] = {}  # by copy: granted to it
        self._cancelled: set[int] = set()  # copies
        self._is_closing = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._streams: dict[str, CopyStream] = {}  # by GPU; the thread's
        self._thread = threading.Thread(target=self._run, name="pdx-arenas", daemon=True)
        self._thread.start()

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        """Nothing: what other arenas have is copied to where it is missing by `store`."""
        return []

    def admit(self, copy: Copy) -> Grant:
        """Room in the arenas that the copy names, for what is not there."""
        first, last = copy.chunks[0], copy.chunks[-1]
        claim = Claim(
            keys=copy.keys,
            nbytes=first.slot.nbytes,
            layers=first.layers,
            owner=NODE,
            writers=[NODE] * copy.shards,
            arenas=tuple(copy.arenas),
            tail_nbytes=last.slot.nbytes if last.tail else 0,
            partial=True,
            transfer=copy.transfer if last.tail else None,
            deadline=copy.deadline,
        )
        try:
            granted, slots, _ = self._store.reserve(claim)
        except ArenaTooSmall:
            granted, slots = [], []
        self._slots[copy.number] = slots
        return Grant(granted, slots)

    def store(self, job: Job) -> None:
        """Copy between two arenas."""
        self._jobs.put(job)

    def load(self, job: Job) -> None:
        """Copies between arenas are stores."""
        raise NotImplementedError("a copy between arenas is a store into one of them")

    def cancel(self, copy: Copy) -> None:
        """Jobs of this copy that have not begun are not begun."""
        self._cancelled.add(copy.number)

    def over(self, copy: Copy) -> None:
        """What was not copied has no use any more."""
        self._cancelled.discard(copy.number)
        self._copies.give_back(self._slots.pop(copy.number, []))

    def evict(self, keys: Sequence[bytes]) -> int:
        """Forget these in all arenas."""
        return self._store.delete(keys)

    def close(self) -> None:
        """End the thread, and wait for the job that it does, for some seconds. Idempotent."""
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join(JOIN_S)

    def _over(self, job: Job, error: PdxError | None) -> None:
        """On the control loop's thread: a job has ended."""
        if error is None:
            for part in job.parts:
                assert part.remote is not None
                with contextlib.suppress(StaleSlot):  # it was deleted meanwhile
                    self._copies.land(part.remote, part.first_layer, part.count)
        self._copies.done(self.name, job, error)

    # ---- on its own thread ------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._post(self._ended(job, self._move(job)))
        for stream in self._streams.values():
            stream.close()

    def _ended(self, job: Job, error: PdxError | None) -> Callable[[], None]:
        return lambda: self._over(job, error)

    def _move(self, job: Job) -> PdxError | None:
        if job.number in self._cancelled or self._is_closing:
            return TransferAborted("the copy was given up")
        used: dict[str, CopyStream] = {}
        views = [arena.data[:0] for arena in self._arenas if not arena.gpu]  # they keep the memory mapped, see `close`
        try:
            with contextlib.ExitStack() as ends:
                for part in job.parts:
                    self._copy(part, used, ends)
        except PdxError as error:
            return error
        except Exception as error:  # the thread goes on with other jobs
            log.exception("a copy between arenas failed")
            return GpuError(f"{type(error).__name__}: {error}")
        finally:
            views.clear()
        return None

    def _copy(self, part: Part, used: dict[str, CopyStream], ends: contextlib.ExitStack) -> None:
        assert part.remote is not None
        source, target = self._arenas[part.slot.arena], self._arenas[part.remote.arena]
        start, nbytes = part.span
        to, at = target.address + part.remote.offset + start, source.address + part.slot.offset + start
        gpu = source.gpu or target.gpu
        if not gpu:
            ctypes.memmove(to, at, nbytes)
            return
        if gpu not in used:
            used[gpu] = self._stream(gpu)
            ends.callback(used[gpu].wait)
        used[gpu].copy(to, at, nbytes)

    def _stream(self, gpu: str) -> CopyStream:
        if gpu not in self._streams:
            self._streams[gpu] = CopyStream(Gpu.find(gpu))
        return self._streams[gpu]
