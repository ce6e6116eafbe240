"""Memory as an engine has it, for the bench of the store: pages in random order, and a round's worth of chunks."""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.client.api import ReadableChunk, WritableChunk
from pdx.errors import ConfigError
from pdx.kernels.page_rows import page_rows
from pdx.kernels.pages import PageCopy, gather, scatter

MIB = 1 << 20
PAGE_BYTES = 64 << 10  # of a chunk that is a multiple of it
SMALLEST = 4 << 10
PART_BYTES = 1 * MIB  # a chunk is sent in parts of so much, as nodes group an engine's layers


@dataclass(frozen=True, slots=True)
class Load:
    """What is moved in a round. `gpu`: ordinal of the GPU that has pages and arena; empty: host memory."""

    chunk_bytes: int
    chunks: int
    rounds: int
    gpu: str = ""

    def __post_init__(self) -> None:
        """:raises ConfigError: a chunk that is not made of pages."""
        if self.chunk_bytes < SMALLEST or self.chunk_bytes % SMALLEST:
            raise ConfigError(f"chunks of {self.chunk_bytes} bytes cannot be measured; take a multiple of 4 KiB")

    @property
    def page_bytes(self) -> int:
        """Of the engine's pages."""
        return PAGE_BYTES if self.chunk_bytes % PAGE_BYTES == 0 else SMALLEST

    @property
    def parts(self) -> int:
        """In which a chunk is sent while it is filled."""
        units, most = self.chunk_bytes // self.page_bytes, max(1, self.chunk_bytes // PART_BYTES)
        return next(parts for parts in range(min(most, units), 0, -1) if units % parts == 0)

    @property
    def total_bytes(self) -> int:
        """Of a round."""
        return self.chunk_bytes * self.chunks

    @property
    def arena_bytes(self) -> int:
        """Of a node: a round's chunks, those on their way to or from a peer, and some room."""
        return 3 * self.total_bytes + 16 * MIB


class EngineMemory:
    """An engine's KV cache: what is stored, in random order, and as many pages to read into, in another order."""

    def __init__(self, load: Load) -> None:
        self._device = f"cuda:{load.gpu}" if load.gpu else "cpu"
        self._page_bytes = load.page_bytes
        self._bytes = [self._random(load.total_bytes), self._random(load.total_bytes)]
        self._rows = [page_rows(each.view(-1, load.page_bytes)) for each in self._bytes]
        per_chunk = load.chunk_bytes // load.page_bytes
        self._ids = [self._shuffled(seed, load.total_bytes // load.page_bytes).view(-1, per_chunk) for seed in (1, 2)]
        shared = torch.frombuffer(mmap.mmap(-1, load.total_bytes), dtype=torch.uint8)
        self._copy = self._random(load.total_bytes) if load.gpu else shared.fill_(1)

    def _random(self, nbytes: int) -> Tensor:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self._device)

    def _shuffled(self, seed: int, count: int) -> Tensor:
        ids = list(range(count))
        random.Random(seed).shuffle(ids)
        return torch.tensor(ids, device=self._device)

    def rows_of(self, chunk: WritableChunk | ReadableChunk) -> Tensor:
        """A chunk's memory as rows."""
        return page_rows(chunk.tensor(torch.uint8, (-1, self._page_bytes)))

    def save(self, index: int, chunk: WritableChunk, *, part: int = 0, parts: int = 1) -> None:
        """Gather the pages of a part of chunk `index`."""
        rows = self.rows_of(chunk)
        first, last = (len(rows) * each // parts for each in (part, part + 1))
        gather([PageCopy(rows[first:last], self._ids[0][index][first:last], self._rows[0])])
        self.finish()

    def load(self, index: int, chunk: ReadableChunk) -> None:
        """Scatter them again, to the other pages."""
        scatter([PageCopy(self.rows_of(chunk), self._ids[1][index], self._rows[1])])
        self.finish()

    def check(self, what: str) -> None:
        """:raises RuntimeError: what was read is not what was stored."""
        for mine, read in zip(*self._ids, strict=True):
            if not torch.equal(self._rows[0][mine].view(torch.uint8), self._rows[1][read].view(torch.uint8)):
                raise RuntimeError(f"{what} gave back other bytes than it was given")

    def memcpy(self) -> float:
        """The seconds that a plain copy of a round's bytes takes."""
        source = self._bytes[0]
        started_at = time.perf_counter()
        if self._device == "cpu":
            ctypes.memmove(self._copy.data_ptr(), source.data_ptr(), source.numel())
        else:
            self._copy.copy_(source)
            self.finish()
        return time.perf_counter() - started_at

    def finish(self) -> None:
        """Wait for the GPU, if there is one."""
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)
