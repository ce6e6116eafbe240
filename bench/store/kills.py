"""A node that is killed 200 times while it writes to its disk: `python -m pdx.bench.store.kills FOLDER`.

The disk tier has 100,000 chunks of 4 KiB, which is its cap. Each life of the node: it is started; a client asks for one
of the chunks that were written last, until it has it; the client writes new chunks and reads old ones, each of which it
compares; then the node is killed (`kill -9`), and the blocks of all files are counted. At the end all files are
verified. A first hit counts from the start of the process. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import xxhash

from pdx.bench.harness.nodes import end
from pdx.client.api import Node, connect
from pdx.config import NodeConfig, private_folder
from pdx.errors import ArenaFull, ChunkExists, ChunkMissing, NodeError, NodeUnavailable
from pdx.memory.arena import Arena
from pdx.memory.keys import named_key
from pdx.memory.slot import Slot
from pdx.node.start import start
from pdx.store.disk import chunk_file, folder
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.scrub import scrub
from pdx.store.tier import Part

CHUNK_BYTES = 4096
CHARGE = chunk_file.disk_bytes(CHUNK_BYTES, 1)
ARENA_BYTES = 4 << 20  # so small that nearly every chunk that is read comes from the disk
WRITERS = 4
FIRST_HIT_S = 60.0


def content(number: int) -> bytes:
    """The bytes of a chunk, which nobody has to remember."""
    return xxhash.xxh3_128_digest(number.to_bytes(8, "big")) * (CHUNK_BYTES // 16)


def fill(root: Path, count: int, memory: Path) -> None:
    """Files of chunks 0 to `count`, as a tier writes them."""
    private_folder(root)
    arena = Arena.create(memory / "arena", WRITERS * CHUNK_BYTES)
    is_direct = folder.takes_direct(root)

    def write(writer: int) -> None:
        slot = Slot(writer * CHUNK_BYTES, CHUNK_BYTES, arena.generations[writer * CHUNK_BYTES // 4096])
        for number in range(writer, count, WRITERS):
            arena.data[slot.offset : slot.offset + CHUNK_BYTES] = content(number)
            part = Part(named_key(str(number)), 0, 1, 0, 1, slot)
            path = chunk_file.path_of(root, ChunkFile(part.key, 0, 1, CHUNK_BYTES))
            chunk_file.write(path, part, arena, lambda: False, is_direct=is_direct)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    arena.close()


def disk_bytes(root: Path) -> int:
    """Blocks of all files of the tier."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(_folder_bytes, [each.path for each in os.scandir(root) if each.is_dir()]))


def _folder_bytes(folder: str) -> int:
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))


class Run:
    """What has been seen over all lives."""

    def __init__(self, root: Path, count: int, seed: int) -> None:
        self._root = root
        self._limit_bytes = count * CHARGE
        self._random = random.Random(seed)
        self._numbers = itertools.count(count)
        self._newest = count
        self.first_hits_s: list[float] = []
        self.read = self.missing = self.wrong = self.written = 0
        self.most_above = -self._limit_bytes

    def life(self, folder: Path) -> None:
        """One life of a node, to its death."""
        address = f"ipc://{folder}/node.sock"
        config = NodeConfig(
            address=address,
            arena_bytes=ARENA_BYTES,
            disks=[str(self._root)],
            disk_limit_bytes=self._limit_bytes,
            disk_reserve_bytes=0,
        )
        started_at = time.perf_counter()
        process = start(config)
        try:
            with self._attached(address) as node:
                self._first_hit(node, started_at)
                self._use(node, time.perf_counter() + self._random.uniform(0.05, 0.5))
                process.kill()
                process.wait()
        finally:
            end(process)
        self.most_above = max(self.most_above, disk_bytes(self._root) - self._limit_bytes)

    @staticmethod
    def _attached(address: str) -> Node:
        end_at = time.perf_counter() + FIRST_HIT_S
        while True:
            with contextlib.suppress(NodeUnavailable):
                return connect(address)
            if time.perf_counter() > end_at:
                raise NodeUnavailable(f"no node at {address} within {FIRST_HIT_S:g} s")

    def _first_hit(self, node: Node, started_at: float) -> None:
        """One of the chunks that were written long enough before the kill to be there, and lately enough to stay."""
        while time.perf_counter() < started_at + FIRST_HIT_S:
            if self._is_there(node, self._random.randrange(self._newest - 5000, self._newest - 1000)):
                self.first_hits_s.append(time.perf_counter() - started_at)
                return
            time.sleep(0.002)
        raise ChunkMissing(f"no chunk was found on the disk within {FIRST_HIT_S:g} s")

    def _use(self, node: Node, until: float) -> None:
        while time.perf_counter() < until:
            for _ in range(8):
                number = next(self._numbers)
                with contextlib.suppress(ArenaFull, ChunkExists, NodeError):
                    with node.reserve(str(number), CHUNK_BYTES) as chunk:
                        chunk.view[:] = content(number)
                        chunk.seal()
                    self.written += 1
                self._newest = number
            self._is_there(node, self._random.randrange(self._newest - 20_000, self._newest))

    def _is_there(self, node: Node, number: int) -> bool:
        try:
            with node.get(str(number), wait_s=0.5) as chunk:
                self.read += 1
                self.wrong += bytes(chunk.view) != content(number)
                return True
        except ChunkMissing:
            self.missing += 1
            return False


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--kills", default=200)
@click.option("--chunks", default=100_000)
@click.option("--seed", default=1)
def main(folder: Path, kills: int, chunks: int, seed: int) -> None:
    """Kill a node again and again; FOLDER is on the disk in question."""
    with tempfile.TemporaryDirectory(dir=folder) as name, tempfile.TemporaryDirectory(prefix="pdx-bench-") as memory:
        root = Path(name) / "tier"
        fill(root, chunks, Path(memory))
        run = Run(root, chunks, seed)
        for number in range(kills):
            run.life(Path(memory))
            if not (number + 1) % 20:
                print(f"{number + 1} kills, first hit {run.first_hits_s[-1]:.2f} s", flush=True)
        report = scrub(root, lambda error: None)
    quantiles = statistics.quantiles(run.first_hits_s, n=20, method="inclusive") if kills > 1 else run.first_hits_s
    found = {
        "bench": "kills",
        "kills": kills,
        "chunks": chunks,
        "written": run.written,
        "read": run.read,
        "missing": run.missing,
        "wrong": run.wrong,
        "bad_files": report.bad.total(),
        "good_files": report.good,
        "most_bytes_above_the_cap": max(0, run.most_above),
        "first_hit_p50_s": round(statistics.median(run.first_hits_s), 3),
        "first_hit_p95_s": round(quantiles[-1], 3),
        "first_hit_max_s": round(max(run.first_hits_s), 3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
