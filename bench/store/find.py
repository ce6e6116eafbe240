"""`Store.find` of one prompt among few and among very many chunks: `python -m pdx.bench.store.find`.

512 keys of one prompt, all there, in a store of 10,000 and in one of 1,000,000 chunks, in turns and in processor time.
The prompts' keys are random, as real ones are. No byte of a chunk is touched. The last line is JSON.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.memory.arena import GRANULE_BYTES, TABLE_BYTES, Arena
from pdx.store.chunk import Claim
from pdx.store.store import Store
from pdx.telemetry.env import Env

KEYS = 512
FEW, MANY = 10_000, 1_000_000
ROUNDS = 300
GOAL = 1.1


class Bed:
    """A store that is full of the chunks of prompts."""

    def __init__(self, folder: Path, chunks: int) -> None:
        path, nbytes = folder / str(chunks), chunks * GRANULE_BYTES
        with path.open("wb") as file:
            file.truncate(nbytes + chunks * TABLE_BYTES)  # sparse
        self.arena = Arena(path, nbytes, writable_generations=True)
        self.store = Store(self.arena, Env())
        self.keys: list[bytes] = []
        while len(self.keys) + KEYS <= chunks:
            prompt = [os.urandom(16) for _ in range(KEYS)]
            _, slots, _ = self.store.reserve(Claim(keys=prompt, nbytes=GRANULE_BYTES, layers=1, owner=1, writers=[1]))
            self.store.seal(self.store.fill(slots, 0, 1, 1))
            self.keys += prompt

    def find_ms(self) -> float:
        """One prompt's, in processor time."""
        start = random.randrange(len(self.keys) - KEYS)
        asked = self.keys[start : start + KEYS]
        began = time.thread_time()
        hits = self.store.find(asked, 1)
        took = time.thread_time() - began
        assert len(hits) == KEYS
        return took * 1e3


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdx-bench-") as folder:
        few, many = (Bed(Path(folder), chunks) for chunks in (FEW, MANY))
        gc.freeze()  # as a node does
        times = [(few.find_ms(), many.find_ms()) for _ in range(ROUNDS)]
        gc.unfreeze()
        for bed in (few, many):
            bed.arena.close()
    among_few, among_many = (statistics.median(column) for column in zip(*times, strict=True))
    found: list[Figure] = [
        plain(f"find {KEYS} keys among {FEW:,} chunks", among_few, "ms"),
        plain(f"find {KEYS} keys among {MANY:,} chunks", among_many, "ms"),
        at_most("the one against the other", among_many / among_few, "×", GOAL, "caches hold the small index alone"),
    ]
    publish("find", f"find {KEYS} keys among {FEW:,} and among {MANY:,} chunks, median of {ROUNDS}", found)


if __name__ == "__main__":
    main()
