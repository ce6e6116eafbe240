"""One copy of the KV of a prompt, as fast as this machine does it, to the kind of memory that engines have."""

from __future__ import annotations

import os
import time

import numpy
import torch

from pdx.bench.store.pages import shared_memory
from pdx.memory.arena import populate_in_background

COPIES = 5  # in one go, of memory that has just been in use
CALM_S = 1.5  # engines poll for a second after their last step, and would share the core with the copy


class Memcpy:
    """Copies from shared to anonymous memory, all of it touched before, on one core and while the engines sleep.

    `targets`: that many of them take turns, so that each lies idle meanwhile.
    """

    def __init__(self, nbytes: int, core: int, *, targets: int = 1) -> None:
        self._source = shared_memory(nbytes).fill_(1).numpy()
        self._targets = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(targets)]
        for target in self._targets:
            populate_in_background(target.data_ptr(), nbytes, target).join()
            target.fill_(2)
        self._core = core

    def times_ms(self, nbytes: int | None = None) -> tuple[float, list[float]]:
        """A copy to the target that has lain idle longest, then more to the same one; `nbytes`: of only so many."""
        self._targets.append(self._targets.pop(0))
        time.sleep(CALM_S)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        try:
            return self._once_ms(nbytes), [self._once_ms(nbytes) for _ in range(COPIES)]
        finally:
            os.sched_setaffinity(0, cores)

    def _once_ms(self, nbytes: int | None) -> float:
        target, source = self._targets[-1].numpy()[:nbytes], self._source[:nbytes]
        start_at = time.perf_counter()
        numpy.copyto(target, source)
        return (time.perf_counter() - start_at) * 1e3
