"""The disk tier against raw direct I/O: `python -m pdx.bench.store.disk FOLDER`, a folder on the disk in question.

Each round writes and reads the same bytes both ways, in alternating order: as chunks through the tier, and raw, in one
file with as many threads as the tier has, each with a chunk at a time. Both bypass the page cache (O_DIRECT), and
nothing is synced. "write" makes new files; "replace" is a write to a tier whose cap is reached, and raw to an existing
file. A ratio of 1 means as fast as raw. CPU time is this process's, with its control loop. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pdx.bench.harness.report import show_rows
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.memory.slot import Slot
from pdx.store.disk import chunk_file
from pdx.store.disk.files import THREADS
from pdx.store.disk.tier import DiskTier
from pdx.store.tier import Job, Part, Tier, TierHost
from pdx.telemetry.env import Env
from pdx.testing.tier_stage import Calls

TOTAL_BYTES = 256 << 20
CHUNK_MIB = (0.25, 1, 8, 32)
LAYERS = 32
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Row:
    """One operation with chunks of one size: medians over the rounds."""

    operation: str
    chunk_mib: float
    raw_gb_s: float
    gb_s: float
    ratio: float  # of the rates within a round
    raw_cpu_s_gb: float
    cpu_s_gb: float


class Bed(TierHost):
    """An arena full of chunks, a tier, and a raw file of the same bytes."""

    def __init__(self, folder: Path, arena: Arena, chunk_bytes: int) -> None:
        self._arena = arena
        self._path = folder / "raw"
        self._raw = self._open_raw()
        starts = range(0, TOTAL_BYTES, chunk_bytes)
        self._slots = [Slot(start, chunk_bytes, arena.generations[start // GRANULE_BYTES]) for start in starts]
        self._keys: list[bytes] = []
        self.env, self.memory = Env(), [arena]
        self.env.mailbox = calls = Calls()
        self._calls = calls.waiting
        self._num_done = 0
        limit_bytes = len(self._slots) * chunk_file.disk_bytes(chunk_bytes, LAYERS)
        self.tier = DiskTier(self, folder / "tier", limit_bytes)
        while not self.tier.is_counted:
            self._calls.get()()

    def done(self, tier: Tier, job: Job, error: Exception | None) -> None:
        if error is not None:
            raise error
        self._num_done += 1

    def _run(self, give: Callable[[Job], None]) -> None:
        self._num_done = 0
        for key, slot in zip(self._keys, self._slots, strict=True):
            give(Job(1, [Part(key, 0, LAYERS, 0, LAYERS, slot)], slot.nbytes))
        while self._num_done < len(self._slots):
            self._calls.get()()

    def _open_raw(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)

    def write(self) -> None:
        """Write new chunks, which replace the last ones if these are still there."""
        self._keys = [os.urandom(16) for _ in self._slots]
        chunks = [SimpleNamespace(slot=slot, layers=LAYERS) for slot in self._slots]
        copy: Any = SimpleNamespace(number=1, keys=self._keys, shards=1, chunks=chunks)
        self.tier.admit(copy)
        self._run(self.tier.store)
        self.tier.copy_ended(copy)

    def read(self) -> None:
        self._run(self.tier.load)

    def raw_write(self) -> None:
        os.close(self._raw)
        self._raw = self._open_raw()
        self.raw_replace()

    def raw_replace(self) -> None:
        self._run_raw(lambda slot: os.pwrite(self._raw, self._arena.view(slot), slot.offset))

    def raw_read(self) -> None:
        self._run_raw(lambda slot: os.preadv(self._raw, [self._arena.view(slot)], slot.offset))

    def _run_raw(self, call: Callable[[Slot], int]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            if any(count != slot.nbytes for count, slot in zip(pool.map(call, self._slots), self._slots, strict=True)):
                raise OSError("the raw file was not read or written at once")

    def clear(self) -> None:
        self.tier.evict(self._keys)
        while self.tier.used_bytes:
            self._calls.get()()

    def close(self) -> None:
        self.tier.close()
        os.close(self._raw)


def seconds(call: Callable[[], None]) -> tuple[float, float]:
    """Run the call; return its wall time and its CPU time."""
    started_at, cpu_s = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - started_at, time.process_time() - cpu_s


def rows(bed: Bed, chunk_mib: float) -> list[Row]:
    """One row each for writing, reading and replacing."""
    calls = {
        "write": (bed.raw_write, bed.write),
        "read": (bed.raw_read, bed.read),
        "replace": (bed.raw_replace, bed.write),
    }
    taken: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, (raw, own) in calls.items():
            order = [raw, own] if number % 2 else [own, raw]
            times = {call: seconds(call) for call in order}
            if number:  # the first round warms up
                taken[name].append((*times[raw], *times[own]))
        bed.clear()
    found = []
    gb = TOTAL_BYTES / 1e9
    for name, rounds in taken.items():
        raw_s, raw_cpu_s, own_s, cpu_s = (statistics.median(each) for each in zip(*rounds, strict=True))
        ratio = round(statistics.median(raw / own for raw, _, own, _ in rounds), 3)
        rates = round(gb / raw_s, 2), round(gb / own_s, 2)
        found.append(Row(name, chunk_mib, *rates, ratio, round(raw_cpu_s / gb, 3), round(cpu_s / gb, 3)))
    return found


def main(folder: str) -> None:
    found: list[Row] = []
    with tempfile.TemporaryDirectory(dir=folder) as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        arena = Arena.create(Path(memory) / "arena", TOTAL_BYTES)
        arena.data[:] = os.urandom(1 << 20) * (TOTAL_BYTES >> 20)
        for chunk_mib in CHUNK_MIB:
            bed = Bed(Path(name), arena, int(chunk_mib * (1 << 20)))
            try:
                found += rows(bed, chunk_mib)
            finally:
                bed.close()
        arena.close()
    show_rows(found, f"The disk tier against raw direct I/O, {TOTAL_BYTES >> 20} MiB, median of {ROUNDS}")
    print(json.dumps({"bench": "disk", "rows": [asdict(row) for row in found]}))


if __name__ == "__main__":
    main(sys.argv[1])
