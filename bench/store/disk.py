"""The disk tier against plain files: `python -m pdx.bench.store.disk FOLDER`, a folder on the disk in question.

Each round writes and reads the same chunks twice, through the tier and by `pwrite` and `pread` on one thread, in turns.
Nothing is synced by either, so the page cache takes part in all of it. A ratio of 1 means as fast as plain files. The
last line is JSON.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pdx.bench.harness.report import show_rows
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.memory.slot import Slot
from pdx.store import chunk_file
from pdx.store.disk import DiskTier
from pdx.store.tier import Job, Part

TOTAL_BYTES = 256 << 20
CHUNK_MIB = (1, 8, 32)
LAYERS = 32
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Row:
    """One operation with chunks of one size; medians of the rounds."""

    operation: str
    chunk_mib: int
    plain_gb_s: float
    gb_s: float
    ratio: float  # of the rates, in the same round


class Bed:
    """An arena full of chunks, a tier, and plain files of the same bytes."""

    def __init__(self, folder: Path, arena: Arena, chunk_bytes: int) -> None:
        self._arena = arena
        self._paths = [folder / f"plain-{number}" for number in range(TOTAL_BYTES // chunk_bytes)]
        starts = range(0, TOTAL_BYTES, chunk_bytes)
        self._slots = [Slot(start, chunk_bytes, arena.generations[start // GRANULE_BYTES]) for start in starts]
        self._keys = [number.to_bytes(2, "big") * 8 for number in range(len(self._slots))]
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = 0
        limit_bytes = 2 * len(self._slots) * chunk_file.disk_bytes(chunk_bytes, LAYERS)
        self.tier = DiskTier(
            folder / "tier",
            limit_bytes,
            arenas=[arena],
            post=self._calls.put,
            on_done=self._done,
            counters=Counter(),
        )
        while not self.tier.is_counted:
            self._calls.get()()

    def _done(self, name: str, job: Job, error: Exception | None) -> None:
        if error is not None:
            raise error
        self._over += 1

    def _run(self, give: Callable[[Job], None]) -> None:
        self._over = 0
        for key, slot in zip(self._keys, self._slots, strict=True):
            give(Job(1, [Part(key, 0, LAYERS, 0, LAYERS, slot)], slot.nbytes))
        while self._over < len(self._slots):
            self._calls.get()()

    def write(self) -> None:
        chunks = [SimpleNamespace(slot=slot, layers=LAYERS) for slot in self._slots]
        copy: Any = SimpleNamespace(number=1, keys=self._keys, shards=1, chunks=chunks)
        self.tier.admit(copy)
        self._run(self.tier.store)
        self.tier.over(copy)

    def read(self) -> None:
        self._run(self.tier.load)

    def plain_write(self) -> None:
        for path, slot in zip(self._paths, self._slots, strict=True):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            if os.pwrite(fd, self._arena.view(slot), 0) != slot.nbytes:
                raise OSError(f"{path} was not written at once")
            os.close(fd)

    def plain_read(self) -> None:
        for path, slot in zip(self._paths, self._slots, strict=True):
            fd = os.open(path, os.O_RDONLY)
            if os.preadv(fd, [self._arena.view(slot)], 0) != slot.nbytes:
                raise OSError(f"{path} was not read at once")
            os.close(fd)

    def clear(self) -> None:
        self.tier.evict(self._keys)
        while self.tier.used_bytes:
            self._calls.get()()
        for path in self._paths:
            path.unlink(missing_ok=True)


def seconds(call: Callable[[], None]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def rows(bed: Bed, chunk_mib: int) -> list[Row]:
    """One row for writing, one for reading."""
    calls = {"write": (bed.plain_write, bed.write), "read": (bed.plain_read, bed.read)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, (plain, own) in calls.items():
            order = [plain, own] if number % 2 else [own, plain]
            times = {call: seconds(call) for call in order}
            if number:  # the first round warms up
                taken[name].append((times[plain], times[own]))
        bed.clear()
    found = []
    for name, pairs in taken.items():
        plain_s, own_s = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(plain / own for plain, own in pairs)
        gb = TOTAL_BYTES / 1e9
        found.append(Row(name, chunk_mib, round(gb / plain_s, 2), round(gb / own_s, 2), round(ratio, 3)))
    return found


def main(folder: str) -> None:
    found: list[Row] = []
    with tempfile.TemporaryDirectory(dir=folder) as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        arena = Arena.create(Path(memory) / "arena", TOTAL_BYTES)
        arena.data[:] = os.urandom(1 << 20) * (TOTAL_BYTES >> 20)
        for chunk_mib in CHUNK_MIB:
            bed = Bed(Path(name), arena, chunk_mib << 20)
            try:
                found += rows(bed, chunk_mib)
            finally:
                bed.tier.close()
        arena.close()
    show_rows(found, f"The disk tier against plain files, {TOTAL_BYTES >> 20} MiB, median of {ROUNDS}")
    print(json.dumps({"bench": "disk", "rows": [asdict(row) for row in found]}))


if __name__ == "__main__":
    main(sys.argv[1])
