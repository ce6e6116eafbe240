"""The tiers of the chunk store as an engine meets them: how fast chunks are stored and read, and how long one takes.

A chunk comes out of pages that lie in random order, as in an engine's KV cache, and goes into such pages again. All of
it runs on one thread, beside one memcpy of as many bytes in the same rounds. Bytes are compared before anything counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import Any, ClassVar

import torch

from pdx.bench.harness.interrupts import whole
from pdx.bench.harness.nodes import TO, Asking, asking, node_pair, one_node
from pdx.bench.harness.report import significant
from pdx.bench.harness.timing import Spread, spread
from pdx.bench.store.engine_memory import EngineMemory, Load
from pdx.cli.tables import size
from pdx.client.api import Node, connect
from pdx.cuda.gpu import why_no_gpu
from pdx.errors import ConfigError
from pdx.testing.waiting import wait_until
from pdx.transports.registry import FOR_GPUS, find, schemes
from pdx.wire.messages import Admit, Ping, Release

OWN, GPU = "host", "gpu"
ELSEWHERE = {  # what needs a folder on a disk, or a store
    "disk": "measured by python -m pdx.bench.store.disk FOLDER",
    "remote": "measured by python -m pdx.bench.store.paying",
}
FIRST_GPU = "0"
HERE = "a"  # the name of the engine's own node, where there is another one
ARRIVE_S = 60.0
ATTACH_S = 20.0
IDLE_S = 60.0  # a node whose bench was killed ends after this
SHM = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Row:
    """One tier with one size of chunks; rates in GB/s, each the median of the rounds."""

    tier: str
    chunk_bytes: int
    chunks: int
    rounds: int
    memcpy_gb_s: float  # one thread; on a GPU a copy within its memory
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
    """The arena of the engine's own node, in host memory or on a GPU."""

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
        started_at = time.perf_counter()
        for index, name in enumerate(names):
            with watch("lookup and lease"):
                chunk = self._node.get(name)
            with watch("scatter"):
                self._memory.load(index, chunk)
            with watch("release"):
                chunk.release()
        taken_s = time.perf_counter() - started_at
        self._node.delete(*names)
        return taken_s


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
        started_at = time.perf_counter()
        for index, name in enumerate(names):
            with watch("fetch"):
                chunk = self._there.get(name, source=HERE)
            with watch("scatter"):
                self._memory.load(index, chunk)
            with watch("release"):
                chunk.release()
        taken_s = time.perf_counter() - started_at
        self._forget(names)
        return taken_s


def why_missing(name: str) -> str:
    """Why the tier of that name (`OWN`, `GPU`, `ELSEWHERE`, or a channel) is not measured here; empty if it can.

    :raises ConfigError: there is none of that name.
    """
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name == OWN:
        return ""
    if name in (GPU, FOR_GPUS):
        if why := why_no_gpu():
            return why
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no GPU; install PyTorch for CUDA"
    if name == GPU:
        return ""
    found = find(name).availability()
    return "" if found.is_ok else "; ".join(part for part in (found.why, found.fix) if part)


def all_tiers() -> list[str]:
    """The names of all, whether they work here or not."""
    return [OWN, GPU, *schemes(), *ELSEWHERE]


def title(name: str) -> str:
    """What the tier of that name is."""
    titles = {OWN: "own node", GPU: "own node on the GPU", "disk": "disk", "remote": "remote storage"}
    return titles.get(name, f"other node over {name}")


def measure_tier(name: str, load: Load) -> Row:
    """One tier with one size of chunks, with nodes of its own.

    :raises PdxError: it does not work here after all. :raises RuntimeError: it gave back other bytes.
    """
    torch.set_num_threads(1)
    on_gpu = name in (GPU, FOR_GPUS)
    load = dataclasses.replace(load, gpu=FIRST_GPU if on_gpu else "")
    if not load.gpu:
        check_room(load.arena_bytes * (1 if name == OWN else 2))
    memory = EngineMemory(load)
    with whole(_tier(name, load, memory)) as tier:
        return _measure(name, tier, load, memory)


@contextlib.contextmanager
def _tier(name: str, load: Load, memory: EngineMemory) -> Iterator[Tier]:
    settings: dict[str, Any] = {"gpu": load.gpu, "exit_when_idle_s": IDLE_S}
    if name not in (OWN, GPU):
        with node_pair(name, load.arena_bytes, **settings) as (here, there):
            yield OtherNode(here, there, memory, load)
        return
    with one_node(load.arena_bytes, **settings) as address, connect(address, ATTACH_S) as node:
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


def check_room(nbytes: int) -> None:
    """:raises ConfigError: shared memory has no room for so much."""
    stats = os.statvfs(SHM)
    room = stats.f_bavail * stats.f_frsize
    if nbytes > room:
        raise ConfigError(f"{size(nbytes)} of {SHM} are needed, {size(room)} are free; measure fewer or smaller chunks")


CHUNK_BYTES = 4 << 10
ROOM_BYTES = 16 << 20
KEY_BYTES = 16
PROMPT_KEYS = 512  # 128k tokens at 256 per chunk
LEASE_S = 30.0
PROMPTS = 10  # one in so many questions is about a whole prompt


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One size of the index."""

    chunks: int
    lookups_per_s: float  # of one chunk that is there, with its lease, one after the other
    keys_per_s: float  # where a prompt of `PROMPT_KEYS` chunks is asked for at once
    ping: Spread  # the way to the node and back, to compare with
    hit: Spread
    miss: Spread
    release: Spread  # of the lease
    prompt: Spread


def measure_index(chunks: int, questions: int) -> IndexRow:
    """Put so many chunks into a node, and ask so many times for each kind of answer.

    :raises NodeUnavailable: the node does not answer. :raises ConfigError: no room in shared memory.
    """
    arena_bytes = chunks * CHUNK_BYTES + ROOM_BYTES
    check_room(arena_bytes)
    with whole(one_node(arena_bytes, exit_when_idle_s=IDLE_S)) as address, asking(address) as client:
        keys = [os.urandom(KEY_BYTES) for _ in range(chunks)]
        for first in range(0, chunks, PROMPT_KEYS):
            client.seal(keys[first : first + PROMPT_KEYS], CHUNK_BYTES)
        _ask(client, keys, max(1, questions // 10))
        client.times.clear()
        _ask(client, keys, questions)
    times = client.times
    return IndexRow(
        chunks=chunks,
        lookups_per_s=round(len(times["hit"]) / sum(times["hit"]), 1),
        keys_per_s=round(min(PROMPT_KEYS, chunks) * len(times["prompt"]) / sum(times["prompt"]), 1),
        ping=spread(times["ping"]),
        hit=spread(times["hit"]),
        miss=spread(times["miss"]),
        release=spread(times["release"]),
        prompt=spread(times["prompt"]),
    )


def _ask(client: Asking, keys: Sequence[bytes], rounds: int) -> None:
    """Every question in each round; that for a prompt in some of them."""
    draw = random.Random(0)
    prompt = min(PROMPT_KEYS, len(keys))

    def hit(name: str, wanted: Sequence[bytes], release: str) -> None:
        found = client.admit(name, Admit(list(wanted), lease_s=LEASE_S))
        if found.hits != len(wanted):
            raise RuntimeError(f"not all of {len(wanted)} chunks are there any more: {found}")
        if release:
            client.timed(release, Release(found.lease))
        else:
            client.call(Release(found.lease))

    for turn in range(rounds):
        client.timed("ping", Ping())
        hit("hit", [draw.choice(keys)], "release")
        client.timed("miss", Admit([os.urandom(KEY_BYTES)], lease_s=LEASE_S))
        if turn % PROMPTS == 0:
            first = draw.randrange(len(keys) - prompt + 1)
            hit("prompt", keys[first : first + prompt], "")
