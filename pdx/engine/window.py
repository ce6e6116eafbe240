"""A node's arena as the engine's GPU sees it: mapped memory of a GPU, or host memory that is being page-locked."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdx.cuda.arena import GpuArena
from pdx.cuda.gpu import Gpu
from pdx.cuda.page_lock import PageLock
from pdx.kernels.batch import Place
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot


class ArenaWindow:
    """Slots as addresses. It stays open until `close` was called and nobody holds it: kernels may be on their way.

    Unmapping may wait for the GPU, so the engine's thread must not be the last to `release` it. `_lock` guards the
    count of holds.
    """

    def __init__(self, arena: Arena, place: Place, lock: PageLock | None) -> None:
        self.arena = arena
        self.place = place  # for the GPU that copies
        self._page_lock = lock
        self._lock = threading.Lock()
        self._holds = 1  # the owner's, until `close`
        self._is_closed = False

    @classmethod
    def open(cls, arena: Arena, gpu: Gpu, on_refused: Callable[[str], None]) -> ArenaWindow:
        """Map the arena for `gpu`, or begin to page-lock it; `on_refused` hears, from another thread, if that fails.

        :raises PdxError: it cannot be mapped; the class says why.
        """
        if isinstance(arena, GpuArena):
            arena.map(gpu)
            return cls(arena, Place.HERE if arena.gpu == gpu.uuid else Place.PEER, None)
        anchor = arena.data[:]  # keeps the mapping
        lock = PageLock(arena.address, arena.nbytes, gpu, anchor=anchor, on_refused=on_refused)
        return cls(arena, Place.HOST, lock)

    def __repr__(self) -> str:
        return f"<ArenaWindow {self.arena!r} {self._page_lock!r}, {self._holds} holds>"

    def hold(self) -> bool:
        """Keep it open until `release`; whether it still is."""
        with self._lock:
            if self._holds:
                self._holds += 1
            return bool(self._holds)

    def release(self) -> None:
        """End one `hold`. The last one closes the mapping, which may take long."""
        with self._lock:
            self._holds -= 1
            is_over = not self._holds
        if is_over:
            if self._page_lock is not None:
                self._page_lock.close()
            else:
                self.arena.close()

    def close(self) -> None:
        """The owner's hold ends. Idempotent, from one thread."""
        if not self._is_closed:
            self._is_closed = True
            self.release()

    def address_of(self, slot: Slot, nbytes: int) -> int | None:
        """Where the GPU finds the slot's `nbytes`; None if it is not (any more) a slot of that size, or out of reach.

        Only while held.
        """
        if nbytes > slot.nbytes or not self.arena.is_current(slot):
            return None
        if self._page_lock is not None and not self._page_lock.covers(slot.offset, slot.nbytes):
            return None
        return self.arena.address + slot.offset
