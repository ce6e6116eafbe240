"""KV pages from one engine's memory into another's, gathered and scattered, against NIXL moving each page by itself:
`python -m pdx.bench.channels.paged`.

Ours: pages in random order → gathered into slices of 1 MiB of an arena → channel → scattered from the other arena into
pages in another order; slice by slice, so that the three overlap. NIXL directly: from page to page, without a copy
beside the one on its way. Everything is timed until the receiver says that it has all. Once as UCX chooses within a
host, that is shared memory, and once over TCP alone, as between hosts without RDMA. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

from pdx.bench.channels.measure import Sender
from pdx.bench.channels.paged_receiver import (
    HOST,
    MOVERS,
    PAGE_KIB,
    RECEIVER,
    SENDER,
    SLICE_BYTES,
    TCP,
    TOTAL_BYTES,
    WAYS,
    Pages,
    Slices,
    digest,
    ids_of,
    raw_nixl,
    region_class,
)
from pdx.bench.channels.raw import RawNixl, SharedFile
from pdx.bench.harness.child import end_child
from pdx.bench.harness.nodes import why_not
from pdx.bench.harness.report import Figure, at_least, plain, publish
from pdx.bench.harness.timing import measure
from pdx.kernels.pages import PageCopy, gather
from pdx.transports.channel import Piece, RemoteRegion, Transfer

SLICES_IN_FLIGHT = 16
PAGES_IN_FLIGHT = 64
REPEATS = 5
GOAL = 3.0
ONE_BY_ONE, ONE_LIST = "NIXL page by page", "NIXL with one list"
ALONE = "NIXL page by page, one in flight"
WORDS = {HOST: "within a host", TCP: "over TCP alone"}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case; the rate in GB/s of pages moved, once counted."""

    way: str
    page_kib: int
    mover: str
    gb_s: float
    ratio: float  # to NIXL page by page, of the same way


class Ends:
    """The sending process: the pages, the arena and all movers, and the receiver as it is told what comes."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._process = process
        told = self._heard()
        self._pages = Pages(SENDER)
        self._pages.bytes.numpy()[:] = numpy.frombuffer(numpy.random.default_rng(7).bytes(TOTAL_BYTES), numpy.uint8)
        self._arena = SharedFile(folder / "source", TOTAL_BYTES)
        self._slices = {kib: Slices(self._pages, self._arena, kib) for kib in PAGE_KIB}
        self._senders: dict[str, Sender] = {}
        self._raws: dict[str, RawNixl] = {}
        for mover in MOVERS:
            if mover in told:
                self._senders[mover] = Sender(region_class(mover), self._arena)
                self._senders[mover].connect(msgspec.msgpack.decode(bytes.fromhex(told[mover]), type=RemoteRegion))
        for way in WAYS:
            if f"raw {way}" in told:
                self._raws[way] = raw_nixl(way, self._pages.memory)
                self._raws[way].connect(bytes.fromhex(told[f"raw {way}"]))

    def movers(self, way: str, kib: int) -> dict[str, Callable[[], None]]:
        """What is measured, by name."""
        raw = self._raws[way]
        local, remote = _spans(SENDER, self._pages.memory.address, kib), _spans(RECEIVER, raw.target, kib)
        calls: dict[str, Callable[[], None]] = {
            ONE_BY_ONE: self._pass(f"raw {way}", lambda: _page_by_page(raw, local, remote, PAGES_IN_FLIGHT)),
            ALONE: self._pass(f"raw {way}", lambda: _page_by_page(raw, local, remote, 1)),
            ONE_LIST: self._pass(f"raw {way}", lambda: raw.wait(raw.begin(local, remote, b"done"))),
        }
        for mover, sender in self._senders.items():
            scheme, its_way = mover.split()
            if its_way == way:
                calls[f"pdx over {scheme}"] = self._pass(mover, self._sliced(sender, kib))
        return calls

    def check(self, mover: Callable[[], None], kib: int, what: str) -> None:
        """After a pass the receiver's pages hold ours, in its order."""
        expected = torch.empty_like(self._pages.bytes)
        source, target = (each.view(-1, kib << 10) for each in (self._pages.bytes, expected))
        target[ids_of(RECEIVER, kib)] = source[ids_of(SENDER, kib)]
        self._ask("digest", "")  # zeroes all
        mover()
        if self._ask("digest", "") != digest(expected):
            raise RuntimeError(f"{what} did not bring all bytes to their places")

    def _pass(self, name: str, move: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            self._ask("expect", name)
            move()
            if self._heard() != "done":
                raise RuntimeError(f"the receiver lost count of {name}")

        return call

    def _sliced(self, sender: Sender, kib: int) -> Callable[[], None]:
        slices = self._slices[kib]

        def call() -> None:
            under_way: deque[Transfer] = deque()
            for index, (row, ids) in enumerate(zip(slices.rows, slices.ids, strict=True)):
                gather([PageCopy(row, ids, slices.pages)])
                at = index * SLICE_BYTES
                under_way.append(sender.write([Piece(at, at, SLICE_BYTES)], msgspec.msgpack.encode((kib, index))))
                if len(under_way) == SLICES_IN_FLIGHT:
                    sender.finish(under_way.popleft())
            while under_way:
                sender.finish(under_way.popleft())

        return call

    def _ask(self, verb: str, argument: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, argument]) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the receiver has died")
        return json.loads(line)

    def close(self) -> None:
        """End all movers."""
        for sender in self._senders.values():
            sender.region.close()
        for raw in self._raws.values():
            raw.close()


def _spans(whose: int, address: int, kib: int) -> numpy.ndarray:
    """(address, bytes, 0) of all pages, in the order of the prompt."""
    order = ids_of(whose, kib).numpy().astype(numpy.uint64)
    spans = numpy.zeros((len(order), 3), dtype=numpy.uint64)
    spans[:, 0] = order * numpy.uint64(kib << 10) + numpy.uint64(address)
    spans[:, 1] = kib << 10
    return spans


def _page_by_page(raw: RawNixl, local: numpy.ndarray, remote: numpy.ndarray, in_flight: int) -> None:
    """A request per page, without a notification; one behind the last."""
    under_way: deque[int] = deque()
    for mine, theirs in zip(local.tolist(), remote.tolist(), strict=True):
        under_way.append(raw.begin([tuple(mine)], [tuple(theirs)], b""))
        if len(under_way) == in_flight:
            raw.wait(under_way.popleft())
    while under_way:
        raw.wait(under_way.popleft())
    raw.notify(b"done")


@contextlib.contextmanager
def both_ends() -> Iterator[Ends]:
    """The receiver runs until this ends."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdx-bench-", dir="/dev/shm")))
        command = [sys.executable, "-m", "pdx.bench.channels.paged_receiver", str(folder / "target")]
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(end_child, process)
        yield stack.enter_context(contextlib.closing(Ends(folder, process)))


def rows() -> Iterator[Row]:
    """All cases."""
    with both_ends() as ends:
        for way in WAYS:
            for kib in PAGE_KIB:
                calls = ends.movers(way, kib)
                for name, call in calls.items():
                    ends.check(call, kib, name)
                for name, timing in measure(calls, reference=ONE_BY_ONE, repeats=REPEATS).items():
                    yield Row(way, kib, name, round(timing.rate(TOTAL_BYTES / 1e9), 3), round(timing.ratio, 3))


def figures(measured: list[Row]) -> list[Figure]:
    """One per way, page size and mover of ours."""
    found = []
    for row in measured:
        if not row.mover.startswith("pdx"):
            continue
        others = {each.mover: each.gb_s for each in measured if (each.way, each.page_kib) == (row.way, row.page_kib)}
        single, alone, listed = (others[name] for name in (ONE_BY_ONE, ALONE, ONE_LIST))
        name = f"{row.mover}, {WORDS[row.way]}, {row.page_kib} KiB pages: times NIXL page by page"
        note = (
            f"{row.gb_s:.2f} GB/s; NIXL {single:.2f}, with one page in flight {alone:.2f}, with one list {listed:.2f}"
        )
        found.append(at_least(name, row.ratio, "", GOAL, note))
    return found


def main() -> None:
    torch.set_num_threads(1)
    title = f"{TOTAL_BYTES >> 20} MiB of KV pages from memory to memory, median of {REPEATS} rounds"
    if why := why_not("nixl"):
        publish("paged", title, [plain("nixl: skipped, and with it the comparison", 0.0, "", why)])
        return
    measured = list(rows())
    publish("paged", title, figures(measured), {"rows": [asdict(row) for row in measured]})


if __name__ == "__main__":
    main()
