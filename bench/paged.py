"""KV pages from one engine's memory into another's, gathered and scattered, against NIXL moving each page by itself:
`python -m bench.paged`.

Ours: pages in random order → gathered into slices of 1 MiB of an arena → channel → scattered from the other arena into
pages in another order; slice by slice, so that the three overlap. NIXL directly: from page to page, without a copy
beside the one on its way. Everything is timed until the receiver says that it has all. Once as UCX chooses within a
host, that is shared memory, and once over TCP alone, as between hosts without RDMA. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy
import torch
from torch import Tensor

from bench.channel_raw import RawNixl, SharedFile
from bench.channels import Sender
from bench.pair import why_not
from bench.report import Figure, at_least, plain, publish
from bench.timing import Timing, measure
from pdx.channel import TOKEN_BYTES, Memory, Piece, RemoteRegion, Transfer
from pdx.kernels.pages import gather, page_rows, scatter
from pdx.registry import find

TOTAL_BYTES = 128 << 20
SLICE_BYTES = 1 << 20
PAGE_KIB = (16, 32, 64)
WAYS = ("host", "tcp")  # what UCX may use: all there is on a host, or TCP alone
IN_FLIGHT = 16  # slices of ours
PAGES_IN_FLIGHT = 64
REPEATS = 5
GOAL = 3.0
LOOK_S = 0.0002  # between looks at what cannot wake us, as a node has it
ONE_BY_ONE, ONE_LIST = "NIXL, page by page", "NIXL, one list"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case; rates in GB/s of pages moved, once counted."""

    way: str
    page_kib: int
    mover: str
    gb_s: float
    ratio: float  # to NIXL page by page, of the same way


class TcpNixl(RawNixl):
    """Only over TCP."""

    settings: ClassVar[dict[str, str]] = {"engine_config": "TLS=tcp"}


class Pages:
    """One engine's KV cache: anonymous memory, and the order in which a prompt's pages lie there."""

    def __init__(self, seed: int) -> None:
        self.bytes = torch.zeros(TOTAL_BYTES, dtype=torch.uint8)
        self.memory = Memory(memoryview(self.bytes.numpy()))
        self._seed = seed

    def order(self, page_bytes: int) -> list[int]:
        """Block ids; this engine's own, but both processes know both."""
        order = list(range(TOTAL_BYTES // page_bytes))
        random.Random(self._seed).shuffle(order)
        return order


def region_class(scheme: str, way: str) -> Any:
    """Our region, held to TCP where that is asked for."""
    region = find(scheme)
    if scheme == "nixl" and way == "tcp":
        return type("TcpNixlRegion", (region,), {"settings": {"TLS": "tcp"}})
    return region


def raw_nixl(way: str, memory: Memory) -> RawNixl:
    """NIXL itself, held to TCP where that is asked for."""
    return (TcpNixl if way == "tcp" else RawNixl)(memory)


class Slices:
    """The slices of an arena and of pages of one size, pairwise."""

    def __init__(self, pages: Pages, arena: SharedFile, page_bytes: int) -> None:
        per_slice = SLICE_BYTES // page_bytes
        self.pages = page_rows(pages.bytes.view(-1, page_bytes))
        self.arena = torch.from_numpy(arena.array).view(-1, per_slice, page_bytes)
        self.rows = [page_rows(each) for each in self.arena]
        self.ids: list[Tensor] = list(torch.tensor(pages.order(page_bytes)).view(-1, per_slice))


class Receiver:
    """The receiving process: regions of ours and NIXL itself, by way; scatters what lands and says when it has all."""

    def __init__(self, schemes: list[str], path: Path) -> None:
        torch.set_num_threads(1)
        self._pages = Pages(seed=2)
        self._arena = SharedFile(path, TOTAL_BYTES)
        self._slices = {kib: Slices(self._pages, self._arena, kib << 10) for kib in PAGE_KIB}
        self._landed = 0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._regions: dict[str, Any] = {}
        self._token = secrets.token_bytes(TOKEN_BYTES)
        told: dict[str, str] = {}
        for way in WAYS:
            for scheme in ("nixl", "tcp"):
                if scheme in schemes and (scheme, way) != ("tcp", "host"):
                    told[f"{scheme} {way}"] = self._register(scheme, way)
        self._raws = {way: raw_nixl(way, self._pages.memory) for way in WAYS if "nixl" in schemes}
        told |= {f"raw {way}": raw.listen().hex() for way, raw in self._raws.items()}
        say(told)

    def _register(self, scheme: str, way: str) -> str:
        region = region_class(scheme, way).register(self._arena.memory, wake=lambda: os.eventfd_write(self._bell, 1))
        self._regions[f"{scheme} {way}"] = region
        remote = region.listen().invite(self._token)
        region.listen().grant(self._token, 0, TOTAL_BYTES)
        return msgspec.msgpack.encode(remote).hex()

    def serve(self) -> None:
        """Until standard input ends."""
        poll = select.poll()
        poll.register(sys.stdin, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        mover = ""
        while True:
            ready = {fd for fd, _ in poll.poll(0 if mover and not mover.startswith("tcp") else None)}
            if sys.stdin.fileno() in ready:
                line = sys.stdin.readline()
                if not line:
                    break
                mover = self._obey(*json.loads(line))
                continue
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            if mover and self._look(mover):
                mover = ""
            elif not mover.startswith("tcp"):
                time.sleep(LOOK_S)
        for region in self._regions.values():
            region.close()
        for raw in self._raws.values():
            raw.close()
        os.close(self._bell)

    def _obey(self, verb: str, argument: str) -> str:
        """Expect a pass by a mover (its name is returned), or say what is in the pages."""
        if verb == "expect":
            say("ready")
            return argument
        say(digest(self._pages.bytes))
        self._pages.bytes.zero_()
        return ""

    def _look(self, mover: str) -> bool:
        """Whether the pass is over."""
        if mover.startswith("raw"):
            over = bool(self._raws[mover.removeprefix("raw ")].take())
        else:
            for notification in self._regions[mover].listen().take():
                kib, index = msgspec.msgpack.decode(notification.payload)
                slices = self._slices[kib]
                scatter(slices.rows[index], slices.ids[index], slices.pages)
                self._landed += 1
            over = self._landed == TOTAL_BYTES // SLICE_BYTES
        if over:
            self._landed = 0
            say("done")
        return over

    def close(self) -> None:
        """End what is open."""


def say(value: Any) -> None:
    """A line to the sender."""
    print(json.dumps(value), flush=True)


def digest(pages: Tensor) -> str:
    """Of all bytes."""
    return hashlib.blake2b(pages.numpy().data, digest_size=16).hexdigest()


class Bench:
    """The sending process: the pages, the arena, and all movers."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        torch.set_num_threads(1)
        self._process = process
        told = self._heard()
        self.pages = Pages(seed=1)
        self.pages.bytes.numpy()[:] = numpy.frombuffer(numpy.random.default_rng(7).bytes(TOTAL_BYTES), numpy.uint8)
        self._arena = SharedFile(folder / "source", TOTAL_BYTES)
        self._slices = {kib: Slices(self.pages, self._arena, kib << 10) for kib in PAGE_KIB}
        self._senders: dict[str, Sender] = {}
        self._raws: dict[str, RawNixl] = {}
        for name, detail in told.items():
            scheme, way = name.split()
            if scheme != "raw":
                self._senders[name] = Sender(region_class(scheme, way), self._arena)
                self._senders[name].connect(msgspec.msgpack.decode(bytes.fromhex(detail), type=RemoteRegion))
        for way in WAYS:
            if f"raw {way}" in told:
                self._raws[way] = raw_nixl(way, self.pages.memory)
                self._raws[way].connect(bytes.fromhex(told[f"raw {way}"]))

    def movers(self, way: str, kib: int) -> dict[str, Callable[[], None]]:
        """What is measured, by name."""
        calls: dict[str, Callable[[], None]] = {}
        if way in self._raws:
            calls[ONE_BY_ONE] = lambda: self._pass(f"raw {way}", lambda: self._page_by_page(way, kib << 10))
            calls[ONE_LIST] = lambda: self._pass(f"raw {way}", lambda: self._one_list(way, kib << 10))
        for scheme in ("nixl", "tcp"):
            name = f"{scheme} {way}"
            if name in self._senders:
                calls[f"pdx over {scheme}"] = lambda name=name: self._pass(name, lambda: self._sliced(name, kib))
        return calls

    def check(self, mover: Callable[[], None], kib: int, what: str) -> None:
        """After a pass the receiver's pages hold ours, in its order."""
        expected = torch.empty_like(self.pages.bytes)
        target, source = (each.view(-1, kib << 10) for each in (expected, self.pages.bytes))
        target[torch.tensor(Pages(seed=2).order(kib << 10))] = source[torch.tensor(self.pages.order(kib << 10))]
        self._tell("digest", "")
        self._heard()  # and zero all
        mover()
        self._tell("digest", "")
        if self._heard() != digest(expected):
            raise RuntimeError(f"{what} did not bring all bytes to their places")

    def _pass(self, name: str, move: Callable[[], None]) -> None:
        self._tell("expect", name)
        self._heard()
        move()
        if self._heard() != "done":
            raise RuntimeError(f"the receiver lost count of {name}")

    def _sliced(self, name: str, kib: int) -> None:
        sender, slices = self._senders[name], self._slices[kib]
        under_way: deque[Transfer] = deque()
        for index, (row, ids) in enumerate(zip(slices.rows, slices.ids, strict=True)):
            gather(slices.pages, ids, row)
            at = index * SLICE_BYTES
            under_way.append(sender.write([Piece(at, at, SLICE_BYTES)], msgspec.msgpack.encode((kib, index))))
            if len(under_way) == IN_FLIGHT:
                sender.finish(under_way.popleft())
        while under_way:
            sender.finish(under_way.popleft())

    def _spans(self, way: str, page_bytes: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(address, bytes, 0) of all pages, here and there, in the order of the prompt."""
        found = []
        for seed, address in ((1, self.pages.memory.address), (2, self._raws[way].target)):
            order = numpy.array(Pages.order_of(seed, page_bytes), dtype=numpy.uint64)
            spans = numpy.zeros((len(order), 3), dtype=numpy.uint64)
            spans[:, 0] = numpy.uint64(address) + order * numpy.uint64(page_bytes)
            spans[:, 1] = page_bytes
            found.append(spans)
        return found[0], found[1]

    def _page_by_page(self, way: str, page_bytes: int) -> None:
        raw = self._raws[way]
        local, remote = (spans.tolist() for spans in self._spans(way, page_bytes))
        under_way: deque[int] = deque()
        for mine, theirs in zip(local, remote, strict=True):
            under_way.append(raw.begin([tuple(mine)], [tuple(theirs)], b""))
            if len(under_way) == PAGES_IN_FLIGHT:
                raw.wait(under_way.popleft())
        while under_way:
            raw.wait(under_way.popleft())
        raw.notify(b"done")

    def _one_list(self, way: str, page_bytes: int) -> None:
        raw = self._raws[way]
        raw.wait(raw.begin(*self._spans(way, page_bytes), b"done"))

    def _tell(self, verb: str, argument: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, argument]) + "\n")
        self._process.stdin.flush()

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
