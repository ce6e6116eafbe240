"""What both processes of the `ipc` bench have: one engine's pages, in groups of slices, and a board between them."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pdx.bench.gpu.bed import REAL, TOY, Bed
from pdx.transports.channel import TOKEN_BYTES

MIB = 1 << 20
TOKEN = bytes(range(TOKEN_BYTES))  # nobody else can reach the memory of a bench on its own machine
SENDER, RECEIVER = 1, 2  # whose pages
BOARD = "board"  # the file's name
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is moved. A group of slices is gathered by one launch, written by one write and scattered by one launch."""

    total_bytes: int
    page_bytes: int
    slice_bytes: int
    groups: Sequence[int]  # bytes of a group, one case each
    repeats: int


SIZES = {
    REAL: Sizes(1 << 30, 64 << 10, MIB, (8 * MIB, 32 * MIB, 128 * MIB), 21),
    TOY: Sizes(32 << 10, 1 << 10, 4 << 10, (8 << 10,), 2),
}


def order(sizes: Sizes, whose: int) -> list[int]:
    """Block ids of a prompt's pages: shuffled, differently at each end."""
    found = list(range(sizes.total_bytes // sizes.page_bytes))
    random.Random(whose).shuffle(found)
    return found


class Pages:
    """The KV pages of one engine in the order in which a prompt has them, and their places in slices."""

    def __init__(self, bed: Bed, whose: int) -> None:
        from pdx.kernels.paged import PageMap

        self._sizes = sizes = SIZES[bed.name]
        self._bed = bed
        self.bytes = bed.zeros(sizes.total_bytes)
        self.rows = self.bytes.view(-1, sizes.page_bytes)
        self.ids = order(sizes, whose)
        self.map = PageMap.of([self.rows], len(self.rows))

    def groups(self, address: int) -> dict[int, list[Group]]:
        """By bytes of a group: one batch per group, its slices from `address` on."""
        return {size: [Group(self, address, start, size) for start in self.starts(size)] for size in self._sizes.groups}

    def starts(self, group_bytes: int) -> range:
        """Where the groups begin."""
        return range(0, self._sizes.total_bytes, group_bytes)

    def digest(self) -> str:
        """Of all pages in the prompt's order."""
        ids = torch.tensor(self.ids, device=self.rows.device)
        return hashlib.blake2b(self.rows[ids].cpu().numpy().data, digest_size=16).hexdigest()


class Group:
    """One group: the pages of its slices."""

    def __init__(self, pages: Pages, address: int, start: int, nbytes: int) -> None:
        from pdx.kernels.paged import Batch, Run

        sizes = pages._sizes
        per_slice = sizes.slice_bytes // sizes.page_bytes
        self.start = start
        self.nbytes = nbytes
        runs = []
        for offset in range(start, start + nbytes, sizes.slice_bytes):
            first = offset // sizes.page_bytes
            runs.append(Run(pages.ids[first : first + per_slice], address + offset, sizes.slice_bytes))
        self._pages = pages.map
        self._batch = Batch.of(pages.map, runs)

    def gather(self) -> None:
        """Pages to slices; one launch."""
        from pdx.kernels.paged import gather

        gather(self._pages, self._batch)

    def scatter(self) -> None:
        """Slices to pages; one launch."""
        from pdx.kernels.paged import scatter

        scatter(self._pages, self._batch)


class Board:
    """Three numbers that both processes see: how far a pass is, without a message. Each has one writer."""

    _FILLED, _DONE, _GROUP_BYTES, _COUNT = range(4)

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 8 * self._COUNT)
            self._numbers = memoryview(mmap.mmap(fd, 8 * self._COUNT)).cast("Q")
        finally:
            os.close(fd)

    @property
    def filled(self) -> int:
        """Groups that the sender has filled in the receiver's sight, of all passes."""
        return self._numbers[self._FILLED]

    @property
    def group_bytes(self) -> int:
        """Of the pass under way."""
        return self._numbers[self._GROUP_BYTES]

    def begin(self, group_bytes: int) -> None:
        """A pass with groups in the receiver's sight begins."""
        self._numbers[self._GROUP_BYTES] = group_bytes

    def fill(self) -> None:
        """One more group is filled."""
        self._numbers[self._FILLED] += 1

    @property
    def done(self) -> int:
        """Passes that the receiver has in its pages."""
        return self._numbers[self._DONE]

    def finish(self) -> None:
        """One more pass is there."""
        self._numbers[self._DONE] += 1

    def wait(self, done: int) -> None:
        """Until so many passes are there. Other threads run meanwhile.

        :raises RuntimeError: that took too long.
        """
        deadline = time.monotonic() + DEADLINE_S
        while self.done < done:
            time.sleep(0)
            if time.monotonic() > deadline:
                raise RuntimeError("the receiver does not get on")
