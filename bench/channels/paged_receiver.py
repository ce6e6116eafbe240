"""The receiving process of `pdx.bench.channels.paged`: scatters what lands, and says when it has all of a pass.

    python -m pdx.bench.channels.paged_receiver FILE

Its standard input says ["expect", MOVER] and ["digest", ""], one JSON list per line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import secrets
import select
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from pdx.bench.channels.raw import RawNixl, SharedFile
from pdx.bench.harness.nodes import why_not
from pdx.kernels.page_rows import page_rows
from pdx.kernels.pages import PageCopy, scatter
from pdx.transports.channel import TOKEN_BYTES, Memory
from pdx.transports.registry import find

TOTAL_BYTES = 128 << 20
SLICE_BYTES = 1 << 20
PAGE_KIB = (16, 32, 64)
HOST, TCP = "host", "tcp"  # what UCX may use: all there is within a host, or TCP alone
WAYS = (HOST, TCP)
MOVERS = ("nixl host", "nixl tcp", "tcp tcp")  # ours, with their ways
SENDER, RECEIVER = 1, 2  # whose pages
LOOK_S = 0.0002  # between looks at what cannot wake us, as a node has it


class TcpNixl(RawNixl):
    """NIXL itself, held to TCP."""

    settings: ClassVar[dict[str, str]] = {"engine_config": "TLS=tcp"}


class Pages:
    """One engine's KV cache: anonymous memory, and the order in which a prompt's pages lie there."""

    def __init__(self, whose: int) -> None:
        self.bytes = torch.zeros(TOTAL_BYTES, dtype=torch.uint8)
        self.memory = Memory(memoryview(self.bytes.numpy()))
        self._whose = whose

    def ids(self, kib: int) -> Tensor:
        """Block ids."""
        return ids_of(self._whose, kib)


class Slices:
    """The slices of an arena, and the pages that belong into each."""

    def __init__(self, pages: Pages, arena: SharedFile, kib: int) -> None:
        per_slice = SLICE_BYTES // (kib << 10)
        self.pages = page_rows(pages.bytes.view(-1, kib << 10))
        self.rows = [page_rows(each) for each in torch.from_numpy(arena.array).view(-1, per_slice, kib << 10)]
        self.ids: list[Tensor] = list(pages.ids(kib).view(-1, per_slice))


def ids_of(whose: int, kib: int) -> Tensor:
    """The block ids of all pages of a prompt, in its order: shuffled, differently at each end."""
    order = list(range(TOTAL_BYTES // (kib << 10)))
    random.Random(whose).shuffle(order)
    return torch.tensor(order)


def region_class(mover: str) -> Any:
    """Our region; NIXL's held to TCP where that is asked for."""
    scheme, way = mover.split()
    region = find(scheme)
    return type("TcpNixlRegion", (region,), {"settings": {"TLS": "tcp"}}) if mover == "nixl tcp" else region


def raw_nixl(way: str, memory: Memory) -> RawNixl:
    """NIXL itself."""
    return (TcpNixl if way == TCP else RawNixl)(memory)


def digest(pages: Tensor) -> str:
    """Of all bytes."""
    return hashlib.blake2b(pages.numpy().data, digest_size=16).hexdigest()


class Receiver:
    """Regions of ours and NIXL itself, for all ways at once; only one has something to do at a time."""

    def __init__(self, path: Path) -> None:
        self._pages = Pages(RECEIVER)
        self._arena = SharedFile(path, TOTAL_BYTES)
        self._slices = {kib: Slices(self._pages, self._arena, kib) for kib in PAGE_KIB}
        self._landed = 0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._regions: dict[str, Any] = {}
        told = {mover: self._register(mover) for mover in MOVERS if not why_not(mover.split()[0])}
        self._raws = {} if why_not("nixl") else {f"raw {way}": raw_nixl(way, self._pages.memory) for way in WAYS}
        told |= {name: raw.listen().hex() for name, raw in self._raws.items()}
        _say(told)

    def _register(self, mover: str) -> str:
        region = region_class(mover).register(self._arena.memory, wake=lambda: os.eventfd_write(self._bell, 1))
        self._regions[mover] = region
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
            is_polled = bool(mover) and mover != "tcp tcp"
            ready = {fd for fd, _ in poll.poll(0 if is_polled else None)}
            if sys.stdin.fileno() in ready:
                line = sys.stdin.readline()
                if not line:
                    break
                mover = self._obey(*json.loads(line))
                continue
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            if mover and not self._look(mover) and is_polled:
                time.sleep(LOOK_S)
            if self._is_over:
                mover = ""
                self._landed = 0
                _say("done")

    @property
    def _is_over(self) -> bool:
        return self._landed == TOTAL_BYTES // SLICE_BYTES

    def _obey(self, verb: str, argument: str) -> str:
        """Expect a pass by a mover (its name is returned), or say what is in the pages."""
        if verb == "expect":
            _say("ready")
            return argument
        _say(digest(self._pages.bytes))
        self._pages.bytes.zero_()
        return ""

    def _look(self, mover: str) -> bool:
        """Whether something has landed."""
        if mover in self._raws:
            if not self._raws[mover].take():
                return False
            self._landed = TOTAL_BYTES // SLICE_BYTES
            return True
        notifications = self._regions[mover].listen().take()
        for notification in notifications:
            kib, index = msgspec.msgpack.decode(notification.payload)
            slices = self._slices[kib]
            scatter([PageCopy(slices.rows[index], slices.ids[index], slices.pages)])
        self._landed += len(notifications)
        return bool(notifications)

    def close(self) -> None:
        """End all."""
        for region in self._regions.values():
            region.close()
        for raw in self._raws.values():
            raw.close()
        os.close(self._bell)


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.closing(Receiver(Path(sys.argv[1]))) as receiver:
        receiver.serve()


if __name__ == "__main__":
    main()
