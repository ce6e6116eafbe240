"""The receiving process of the `ipc` bench: scatters what lands into its pages.

    python -m pdx.bench.gpu.ipc_peer BED FOLDER HANDLE FD

FOLDER has the board and takes UCX's log. HANDLE is the sender's memory (hexadecimal), FD its descriptor, -1 if it has
none. The first line it says is what a sender needs. It answers ["digest"] (and zeroes its pages), one JSON list per
line, until its standard input ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import random
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from pdx.bench.channels.receiver import WakeFd
from pdx.bench.gpu.bed import REAL, TOY, Bed, bed
from pdx.bench.gpu.nixl import start_nixl
from pdx.cuda.memory import DeviceMemory, Handle
from pdx.transports.channel import TOKEN_BYTES, GpuMemory
from pdx.transports.registry import find

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
        self._numbers[self._FILLED] += 1

    @property
    def done(self) -> int:
        """Passes that the receiver has in its pages."""
        return self._numbers[self._DONE]

    def finish(self) -> None:
        self._numbers[self._DONE] += 1

    def wait(self, done: int) -> None:
        """Until so many passes are there. Other threads run meanwhile. :raises RuntimeError: that took too long."""
        deadline = time.monotonic() + DEADLINE_S
        while self.done < done:
            time.sleep(0)
            if time.monotonic() > deadline:
                raise RuntimeError("the receiver does not get on")


TURNS = 64  # between looks at standard input


class Peer:
    """An arena that is written to through the channel, and the sender's arena, mapped."""

    def __init__(self, the_bed: Bed, folder: Path, theirs: DeviceMemory, stack: contextlib.ExitStack) -> None:
        total = SIZES[the_bed.name].total_bytes
        self._bed = the_bed
        self._board = Board(folder / BOARD)
        self._pages = Pages(the_bed, RECEIVER)
        arena = DeviceMemory.create(the_bed.gpu, total)
        stack.callback(arena.close)
        self._wake = WakeFd()
        stack.callback(os.close, self._wake.fd)
        self._region = find("cuda_ipc").register(GpuMemory(arena, total), wake=self._wake)
        stack.callback(self._region.close)
        self._listener = self._region.listen()
        remote = self._listener.invite(TOKEN)
        self._listener.grant(TOKEN, 0, total)
        self._landed = self._pages.groups(arena.address)
        self._mapped = self._pages.groups(theirs.address)
        self._num_landed = self._num_mapped = self._num_seen = 0
        nixl, why = start_nixl(the_bed, self._pages.bytes, folder)
        if nixl is not None:
            stack.callback(nixl.close)
        _say(
            {
                "remote": msgspec.msgpack.encode(remote).hex(),
                "nixl": "" if nixl is None else nixl.detail().hex(),
                "why": why,
            }
        )

    def serve(self) -> None:
        """Until standard input ends. It spins, and lets other threads run each time."""
        while True:
            for _ in range(TURNS):
                if not (self._take_mapped() or self._take_landed()):
                    time.sleep(0)
            if select.select([sys.stdin], [], [], 0)[0]:
                if not sys.stdin.readline():
                    return
                _say(self._pages.digest())
                self._pages.bytes.zero_()
                self._bed.wait()

    def _take_mapped(self) -> bool:
        """Scatter the next group of the sender's own arena, if it is filled."""
        if self._board.filled == self._num_seen:
            return False
        groups = self._mapped[self._board.group_bytes]
        groups[self._num_mapped].scatter()
        self._num_seen += 1
        self._num_mapped = (self._num_mapped + 1) % len(groups)
        if not self._num_mapped:
            self._finish()
        return True

    def _take_landed(self) -> bool:
        """Scatter what has come through the channel."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake.fd)
            for notification in self._listener.take():
                group_bytes, index = msgspec.msgpack.decode(notification.payload)
                groups = self._landed[group_bytes]
                groups[index].scatter()
                self._num_landed = (self._num_landed + 1) % len(groups)
                if not self._num_landed:
                    self._finish()
            return True
        return False

    def _finish(self) -> None:
        self._bed.wait()
        self._board.finish()


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    bed_name, folder, handle, fd = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        the_bed = stack.enter_context(bed(bed_name))
        decoded = msgspec.msgpack.decode(bytes.fromhex(handle), type=Handle)
        theirs = DeviceMemory.open(decoded, int(fd), on=the_bed.gpu)
        stack.callback(theirs.close)
        Peer(the_bed, Path(folder), theirs, stack).serve()


if __name__ == "__main__":
    main()
