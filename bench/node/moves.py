"""A controller's `move` of 1 GiB against what it takes: `python -m pdx.bench.node.moves FOLDER`, a folder on the disk.

Two nodes on this host, 128 chunks of 8 MiB. From memory to disk and back against raw direct I/O of the same bytes by as
many threads as the tier has; from memory to the other node's memory against a plain push of the same chunks, which is
all that the channel does. In turns, each with bytes of its own. Then moves that are cancelled on the way: until the
answer, and until nothing of them is under way. Ratios are of rates. The last line is JSON.

Where `/dev/shm` gives huge pages (`mount -o remount,huge=advise /dev/shm`), the result is kept as `moves-huge`.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pdx.bench.harness.nodes import ATTACH_S, TO, node_pair
from pdx.bench.harness.report import Figure, at_least, at_most, plain, publish
from pdx.cli.machine import huge_pages
from pdx.client.connection import Connection
from pdx.store.disk.files import THREADS
from pdx.testing.waiting import wait_until
from pdx.wire.base import Kind
from pdx.wire.messages import VERSION, Admit, Admitted, Done, Fill, Hello, Push
from pdx.wire.verbs import CheckFinish, Clear, EndJob, Find, Found, JobStatus, Move, Selection

CHUNKS, CHUNK_BYTES = 128, 8 << 20
TOTAL_BYTES = CHUNKS * CHUNK_BYTES
ROUNDS = 5
GOAL, CANCEL_S = 0.9, 1.0
LAYERS = 32


class Engine:
    """Both halves of an engine at a node: names of clients stay with their node, and are not moved to another."""

    def __init__(self, address: str) -> None:
        self._scheduler, self._worker = (_attached(address, kind) for kind in ("scheduler", "worker"))

    def fresh(self) -> list[bytes]:
        """New chunks in the node's memory, by key."""
        keys = [os.urandom(16) for _ in range(CHUNKS)]
        data = os.urandom(CHUNK_BYTES)
        granted = self._scheduler.call(Admit(keys, CHUNK_BYTES, LAYERS), ATTACH_S)
        assert isinstance(granted, Admitted)
        for slot in granted.granted_slots:
            self._worker.arena.view(slot)[:] = data
        filled = self._worker.call(Fill(granted.granted_slots, layers=LAYERS, seal=True), ATTACH_S)
        assert filled == Done(CHUNKS), filled
        return keys

    def push(self, keys: Sequence[bytes]) -> None:
        self._scheduler.call(Push(list(keys), TO), ATTACH_S)

    def close(self) -> None:
        for half in (self._scheduler, self._worker):
            half.close()


def _attached(address: str, kind: Kind) -> Connection:
    connection = Connection(address, Hello(VERSION, os.getpid(), kind, name="bench", engine="bench"))
    connection.attach(ATTACH_S)
    return connection


class Controller:
    """Says verbs to one node."""

    def __init__(self, address: str) -> None:
        self.connection = _attached(address, "controller")

    def job(self, ask: Move | CheckFinish | EndJob) -> JobStatus:
        answer = self.connection.call(ask, ATTACH_S)
        assert isinstance(answer, JobStatus), answer
        return answer

    def start(self, keys: Sequence[bytes], source: str, target: str, node: str = "") -> str:
        return self.job(Move(Selection(list(keys)), source, target, node)).job

    def has_done(self, name: str, chunks: int) -> bool:
        return self.job(CheckFinish(name)).chunks_done >= chunks

    def clear(self, keys: Sequence[bytes]) -> None:
        self.connection.call(Clear(Selection(list(keys))), ATTACH_S)

    def move(self, keys: Sequence[bytes], source: str, target: str, node: str = "") -> float:
        """Seconds, by the node's own clock."""
        ask = CheckFinish(self.start(keys, source, target, node))
        wait_until(lambda: self.job(ask).is_over, "the move is over", 120.0, pause_s=0.02)
        status = self.job(ask)
        assert (status.state, status.chunks_done) == ("done", len(keys)), status
        return status.seconds

    def found(self, keys: Sequence[bytes]) -> Found:
        answer = self.connection.call(Find(Selection(list(keys))), ATTACH_S)
        assert isinstance(answer, Found)
        return answer


class Raw:
    """As many files as the tier has, written and read by as many threads, past the page cache, each on the disk before
    the next: what a disk gives for that. A single file that takes its own blocks again is written several times
    faster where disks are virtual."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        aligned = mmap.mmap(-1, TOTAL_BYTES)
        aligned[:] = os.urandom(1 << 20) * (TOTAL_BYTES >> 20)
        self._data = memoryview(aligned)
        for at in range(CHUNKS):
            (folder / f"{at:02x}").mkdir(parents=True)

    def _run(self, flags: int, call: Callable[[int, memoryview], int]) -> float:
        def one(at: int) -> int:
            fd = os.open(self._folder / f"{at:02x}" / "chunk", flags | os.O_DIRECT, 0o600)
            try:
                return call(fd, self._data[at * CHUNK_BYTES : (at + 1) * CHUNK_BYTES])
            finally:
                os.close(fd)

        started_at = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            counts = list(pool.map(one, range(CHUNKS)))
        took_s = time.perf_counter() - started_at
        assert set(counts) == {CHUNK_BYTES}
        return took_s

    def write(self) -> float:
        def write(fd: int, data: memoryview) -> int:
            count = os.pwrite(fd, data, 0)
            os.fdatasync(fd)
            return count

        return self._run(os.O_WRONLY | os.O_CREAT | os.O_EXCL, write)

    def read(self) -> float:
        """Seconds for all of them, which are gone then, as those of a move are."""
        took_s = self._run(os.O_RDONLY, lambda fd, data: os.preadv(fd, [data], 0))
        for each in self._folder.glob("*/chunk"):
            each.unlink()
        return took_s


def pushed(engine: Engine, there: Controller, keys: Sequence[bytes]) -> float:
    started_at = time.perf_counter()
    engine.push(keys)
    wait_until(lambda: there.found(keys).hits == CHUNKS, "all have come", 120.0, pause_s=0.005)
    return time.perf_counter() - started_at


def measure(folder: Path) -> list[Figure]:
    times: dict[str, list[float]] = {}
    cancels: list[float] = []
    quiet: list[float] = []
    settings = {"disks": [str(folder / "disk")], "store": "write-back", "store_window": 1e-9, "pin_share": 1.0}
    with node_pair("tcp", TOTAL_BYTES + (512 << 20), of_first=settings, peer_share=1.0) as (a, b):
        engine, controller, there = Engine(a.address), Controller(a.address), Controller(b.address)
        raw = Raw(folder / "raw")
        wait_until(lambda: a.status().tiers[0].state != "counting the files", "the disk is counted")
        try:
            for number in range(ROUNDS + 1):
                kept = times if number else {}  # the first round warms up
                keys = engine.fresh()
                kept.setdefault("raw write", []).append(raw.write())
                kept.setdefault("host to disk", []).append(controller.move(keys, "host", "disk"))
                kept.setdefault("raw read", []).append(raw.read())
                kept.setdefault("disk to host", []).append(controller.move(keys, "disk", "host"))
                kept.setdefault("push", []).append(pushed(engine, there, keys))
                there.clear(keys)
                kept.setdefault("to the other node", []).append(controller.move(keys, "host", "host", TO))
                there.clear(keys)
                keys = engine.fresh()
                job = controller.start(keys, "host", "disk")
                wait_until(partial(controller.has_done, job, 8), "it is under way", pause_s=0.002)
                started_at = time.perf_counter()
                assert controller.job(EndJob(job)).state == "cancelled"
                cancels.append(time.perf_counter() - started_at)
                wait_until(lambda: not a.status().tiers[0].copies, "nothing is under way", pause_s=0.002)
                quiet.append(time.perf_counter() - started_at)
                places = [controller.found([key]).tiers for key in keys]
                assert all(sum(each.values()) for each in places), "a chunk is lost"
                controller.clear(keys)
        finally:
            engine.close()
            for one in (controller, there):
                one.connection.close()
    found = []
    for name, reference in (("host to disk", "raw write"), ("disk to host", "raw read"), ("to the other node", "push")):
        ratios = (theirs / ours for ours, theirs in zip(times[name], times[reference], strict=True))
        ratio = statistics.median(ratios)
        rate = TOTAL_BYTES / statistics.median(times[name]) / 1e9
        other = TOTAL_BYTES / statistics.median(times[reference]) / 1e9
        note = f"{rate:.2f} GB/s against {other:.2f} GB/s of {reference}"
        found.append(at_least(f"{name}: rate over that of {reference}", ratio, "", GOAL, note))
    found.append(at_most("cancel: until the answer, the worst", max(cancels) * 1e3, "ms", CANCEL_S * 1e3))
    found.append(at_most("cancel: until nothing is under way, the worst", max(quiet) * 1e3, "ms", CANCEL_S * 1e3))
    found.append(plain("chunks of one move", CHUNKS, "", f"{CHUNK_BYTES >> 20} MiB each"))
    return found


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        figures = measure(Path(name))
    pages = huge_pages()
    title = f"a controller's moves of {TOTAL_BYTES >> 30} GiB, median of {ROUNDS}; huge pages: {pages.found}"
    publish("moves" if pages.finding else "moves-huge", title, figures, facts={"huge_pages": pages.found})


if __name__ == "__main__":
    main(sys.argv[1])
