"""The tiers of the chunk store as an engine meets them: how fast chunks are stored and read, and how long one takes.

A chunk comes out of pages that lie in random order, as in an engine's KV cache, and goes into such pages again. All of
it runs on one thread, beside one memcpy of as many bytes in the same rounds. Bytes are compared before anything counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from pdx.bench.harness.commands import Step
from pdx.bench.harness.interrupts import whole
from pdx.bench.harness.nodes import TO, node_pair, one_node
from pdx.bench.harness.report import Figure, plain, significant
from pdx.bench.harness.timing import Spread, spread
from pdx.cli.tables import size
from pdx.client.api import Node, ReadableChunk, WritableChunk, connect
from pdx.errors import ConfigError
from pdx.kernels.page_rows import page_rows
from pdx.kernels.pages import PageCopy, gather, scatter
from pdx.testing.waiting import wait_until
from pdx.transports.registry import FOR_GPUS, find, schemes

if TYPE_CHECKING:
    from pdx.bench.harness.commands import Run

MIB = 1 << 20
PAGE_BYTES = 64 << 10  # of a chunk that is a multiple of it
SMALLEST = 4 << 10
PART_BYTES = 1 * MIB  # a chunk is sent in parts of so much, as nodes group an engine's layers
OWN = "host"
ELSEWHERE = {  # what needs a folder on a disk, a store, or a GPU
    "disk": "measured by python -m pdx.bench.store.disk FOLDER",
    "remote": "measured by pdx bench reuse --systems recompute,pdx-central",
    FOR_GPUS: "measured by python -m pdx.bench.gpu",
}
HERE = "a"  # the name of the engine's own node, where there is another one
ARRIVE_S = 60.0
ATTACH_S = 20.0
IDLE_S = 60.0  # a node whose bench was killed ends after this
SHM = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Load:
    """What is moved in a round."""

    chunk_bytes: int
    chunks: int
    rounds: int

    def __post_init__(self) -> None:
        """:raises ConfigError: a chunk that is not made of pages."""
        if self.chunk_bytes < SMALLEST or self.chunk_bytes % SMALLEST:
            raise ConfigError(f"chunks of {self.chunk_bytes} bytes cannot be measured; take a multiple of 4 KiB")

    @property
    def page_bytes(self) -> int:
        return PAGE_BYTES if self.chunk_bytes % PAGE_BYTES == 0 else SMALLEST

    @property
    def parts(self) -> int:
        """In which a chunk is sent while it is filled."""
        units, most = self.chunk_bytes // self.page_bytes, max(1, self.chunk_bytes // PART_BYTES)
        return next(parts for parts in range(min(most, units), 0, -1) if units % parts == 0)

    @property
    def total_bytes(self) -> int:
        return self.chunk_bytes * self.chunks

    @property
    def arena_bytes(self) -> int:
        """Of a node: a round's chunks, those on their way to or from a peer, and some room."""
        return 3 * self.total_bytes + 16 * MIB


class EngineMemory:
    """An engine's KV cache: what is stored, in random order, and as many pages to read into, in another order."""

    def __init__(self, load: Load) -> None:
        self._page_bytes = load.page_bytes
        nbytes, per_chunk = load.total_bytes, load.chunk_bytes // load.page_bytes
        self._bytes = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for _ in range(2)]
        self._rows = [page_rows(each.view(-1, load.page_bytes)) for each in self._bytes]
        self._ids = []
        for seed in (1, 2):
            ids = list(range(nbytes // load.page_bytes))
            random.Random(seed).shuffle(ids)
            self._ids.append(torch.tensor(ids).view(-1, per_chunk))
        self._copy = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)

    def _rows_of(self, chunk: WritableChunk | ReadableChunk) -> Tensor:
        return page_rows(chunk.tensor(torch.uint8, (-1, self._page_bytes)))

    def save(self, index: int, chunk: WritableChunk, *, part: int = 0, parts: int = 1) -> None:
        """Gather the pages of a part of chunk `index`."""
        rows = self._rows_of(chunk)
        first, last = (len(rows) * each // parts for each in (part, part + 1))
        gather([PageCopy(rows[first:last], self._ids[0][index][first:last], self._rows[0])])

    def load(self, index: int, chunk: ReadableChunk) -> None:
        """Scatter them again, to the other pages."""
        scatter([PageCopy(self._rows_of(chunk), self._ids[1][index], self._rows[1])])

    def check(self, what: str) -> None:
        """:raises RuntimeError: what was read is not what was stored."""
        for mine, read in zip(*self._ids, strict=True):
            if not torch.equal(self._rows[0][mine].view(torch.uint8), self._rows[1][read].view(torch.uint8)):
                raise RuntimeError(f"{what} gave back other bytes than it was given")

    def memcpy(self) -> float:
        """The seconds that a plain copy of a round's bytes takes."""
        started_at = time.perf_counter()
        ctypes.memmove(self._copy.data_ptr(), self._bytes[0].data_ptr(), self._copy.numel())
        return time.perf_counter() - started_at


@dataclass(frozen=True, slots=True)
class Row:
    """One tier with one size of chunks; rates in GB/s, each the median of the rounds."""

    tier: str
    chunk_bytes: int
    chunks: int
    rounds: int
    memcpy_gb_s: float  # one thread
    write_gb_s: float  # until others find the chunks there
    write_ratio: float  # to memcpy, in the same round
    read_gb_s: float  # from the question whether they are there until the bytes may be used
    read_ratio: float
    store: Spread  # one chunk: write
    hit: Spread  # one chunk: found and leased, and over a channel all of it here
    phases: dict[str, Spread]  # what the two consist of, and more


@dataclass(slots=True)
class Stopwatch:
    """Seconds that named phases took, per chunk."""

    times: dict[str, list[float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started_at = time.perf_counter()
        yield
        self.times.setdefault(name, []).append(time.perf_counter() - started_at)

    def together(self, *names: str) -> list[float]:
        """These phases of each chunk, added up."""
        return [sum(each) for each in zip(*(self.times[name] for name in names), strict=True)]


class Tier(ABC):
    """A place for chunks. In each round `write` puts chunks there, and `read` gets all of them and forgets them."""

    STORE: ClassVar[tuple[str, ...]]  # the phases of one chunk that is written alone
    HIT: ClassVar[tuple[str, ...]]  # and of one that is found

    @abstractmethod
    def write(self, names: Sequence[str], watch: Stopwatch) -> float:
        """The seconds from the first page until others find all chunks there."""

    @abstractmethod
    def read(self, names: Sequence[str], watch: Stopwatch) -> float:
        """The seconds from the first question until all is in the engine's pages again."""


class OwnArena(Tier):
    """The arena of the engine's own node."""

    STORE = ("reserve", "gather", "seal")
    HIT = ("lookup and lease",)

    def __init__(self, node: Node, memory: EngineMemory, load: Load) -> None:
        self._node = node
        self._memory = memory
        self._chunk_bytes = load.chunk_bytes

    def write(self, names: Sequence[str], watch: Stopwatch) -> float:
        started_at = time.perf_counter()
        for index, name in enumerate(names):
            with watch("reserve"):
                chunk = self._node.reserve(name, self._chunk_bytes)
            with watch("gather"):
                self._memory.save(index, chunk)
            with watch("seal"):
                chunk.seal()
        return time.perf_counter() - started_at

    def read(self, names: Sequence[str], watch: Stopwatch) -> float:
        taken_s = _read(self._node, self._memory, names, watch, self.HIT[0])
        self._node.delete(*names)
        return taken_s


def _read(
    node: Node, memory: EngineMemory, names: Sequence[str], watch: Stopwatch, phase: str, source: str = ""
) -> float:
    started_at = time.perf_counter()
    for index, name in enumerate(names):
        with watch(phase):
            chunk = node.get(name, source=source)
        with watch("scatter"):
            memory.load(index, chunk)
        with watch("release"):
            chunk.release()
    return time.perf_counter() - started_at


class OtherNode(Tier):
    """The arena of another node. It gets chunks while they are filled, part by part; they are fetched from the
    engine's own node, which has them too."""

    STORE = ("one chunk alone, until it is there",)
    HIT = ("fetch",)

    def __init__(self, here: Node, there: Node, memory: EngineMemory, load: Load) -> None:
        self._here = here
        self._there = there
        self._memory = memory
        self._load = load

    def write(self, names: Sequence[str], watch: Stopwatch) -> float:
        for index, name in enumerate(names):
            with watch(self.STORE[0]):
                self._send(index, name)
                self._arrived([name])
        self._forget(names)
        started_at = time.perf_counter()
        for index, name in enumerate(names):
            self._send(index, name)
        with watch("after the last seal, until all are there"):
            self._arrived(names)
        return time.perf_counter() - started_at

    def _send(self, index: int, name: str) -> None:
        load = self._load
        chunk = self._here.reserve(name, load.chunk_bytes, parts=load.parts, push_to=TO)
        for part in range(load.parts):
            self._memory.save(index, chunk, part=part, parts=load.parts)
            chunk.fill(part)
        chunk.seal()

    def _arrived(self, names: Sequence[str]) -> None:
        wait_until(
            lambda: self._there.lookup(names) == len(names), "all chunks are at the other node", ARRIVE_S, pause_s=0.001
        )

    def _forget(self, names: Sequence[str]) -> None:
        for node in (self._here, self._there):
            node.delete(*names)

    def read(self, names: Sequence[str], watch: Stopwatch) -> float:
        self._there.delete(*names)
        taken_s = _read(self._there, self._memory, names, watch, self.HIT[0], HERE)
        self._forget(names)
        return taken_s


def why_missing(name: str) -> str:
    """Why the tier of that name is not measured here; empty if it can be.

    :raises ConfigError: there is none of that name.
    """
    if name in ELSEWHERE or name == OWN:
        return ELSEWHERE.get(name, "")
    found = find(name).availability()
    return "" if found.is_ok else "; ".join(filter(None, (found.why, found.fix)))


def title(name: str) -> str:
    """What the tier of that name is."""
    return {OWN: "own node"}.get(name, f"other node over {name}")


def measure_tier(name: str, load: Load) -> Row:
    """One tier with one size of chunks, with nodes of its own.

    :raises PdxError: it does not work here after all. :raises RuntimeError: it gave back other bytes.
    """
    torch.set_num_threads(1)
    needed, stats = load.arena_bytes * (1 if name == OWN else 2), os.statvfs(SHM)
    if needed > (room := stats.f_bavail * stats.f_frsize):
        raise ConfigError(f"{size(needed)} of {SHM} are needed, {size(room)} are free; measure fewer or smaller chunks")
    memory = EngineMemory(load)
    with whole(_tier(name, load, memory)) as tier:
        return _measure(name, tier, load, memory)


@contextlib.contextmanager
def _tier(name: str, load: Load, memory: EngineMemory) -> Iterator[Tier]:
    if name != OWN:
        with node_pair(name, load.arena_bytes, exit_when_idle_s=IDLE_S) as (here, there):
            yield OtherNode(here, there, memory, load)
        return
    with one_node(load.arena_bytes, exit_when_idle_s=IDLE_S) as address, connect(address, ATTACH_S) as node:
        yield OwnArena(node, memory, load)


def _measure(name: str, tier: Tier, load: Load, memory: EngineMemory) -> Row:
    watch = Stopwatch()
    taken: dict[str, list[float]] = {"memcpy": [], "write": [], "read": []}
    for turn in range(-1, load.rounds):
        names = [f"{turn} {index}" for index in range(load.chunks)]
        parts: list[tuple[str, Callable[[], float]]] = [
            ("memcpy", memory.memcpy),
            ("write", partial(tier.write, names, watch)),
            ("read", partial(tier.read, names, watch)),
        ]
        for what, call in parts if turn % 2 else [*parts[1:], parts[0]]:
            taken[what].append(call())
        if turn < 0:
            memory.check(title(name))
            watch.times.clear()
            for times in taken.values():
                times.clear()
    rates = {what: load.total_bytes / 1e9 / statistics.median(times) for what, times in taken.items()}
    ratios = {what: statistics.median(map(truediv, taken["memcpy"], taken[what])) for what in ("write", "read")}
    return Row(
        tier=name,
        chunk_bytes=load.chunk_bytes,
        chunks=load.chunks,
        rounds=load.rounds,
        memcpy_gb_s=significant(rates["memcpy"]),
        write_gb_s=significant(rates["write"]),
        write_ratio=significant(ratios["write"]),
        read_gb_s=significant(rates["read"]),
        read_ratio=significant(ratios["read"]),
        store=spread(watch.together(*tier.STORE)),
        hit=spread(watch.together(*tier.HIT)),
        phases={what: spread(times) for what, times in watch.times.items()},
    )


def steps_of(run: Run, *, tiers: Sequence[str], sizes: Sequence[int], chunks: int, rounds: int) -> list[Step]:
    """Of the tiers that there are here; `run.missing` has the others. No tiers: all.

    :raises ConfigError: there is no such tier, or a chunk is not made of pages.
    """
    loads = [Load(nbytes, chunks, rounds) for nbytes in sizes]
    known = [OWN, *(name for name in schemes() if name not in ELSEWHERE), *ELSEWHERE]
    for name in tiers:
        if name not in known:
            raise ConfigError(f"no tier is named {name!r}; there are {', '.join(known)}")
    run.missing.update({name: why for name in tiers or known if (why := why_missing(name))})

    def measured(name: str, load: Load) -> list[Figure]:
        row = measure_tier(name, load)
        run.details["rows"].append(row)
        head = f"{title(name)}, chunks of {size(load.chunk_bytes)}"
        return [
            plain(f"{head}: write", row.write_gb_s, "GB/s", f"{row.write_ratio:.3f} of memcpy, {row.memcpy_gb_s:.2f}"),
            plain(f"{head}: read", row.read_gb_s, "GB/s", f"{row.read_ratio:.3f} of memcpy"),
            plain(f"{head}: store one, p50", row.store.p50_ms, "ms", f"p99 {row.store.p99_ms:.3f}"),
            plain(f"{head}: find one, p50", row.hit.p50_ms, "ms", f"p99 {row.hit.p99_ms:.3f}"),
        ]

    return [
        Step(f"{title(name)}, chunks of {size(load.chunk_bytes)}", partial(measured, name, load), name)
        for name in tiers or known
        if name not in run.missing
        for load in loads
    ]
