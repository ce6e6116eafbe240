"""The receiving process of the `ipc` bench: scatters what lands into its pages.

    python -m pdx.bench.gpu.ipc_peer BED FOLDER HANDLE FD

FOLDER has the board and takes UCX's log. HANDLE is the sender's memory (hexadecimal), FD its descriptor, -1 if it has
none. The first line it says is what a sender needs. It answers ["digest"] (and zeroes its pages), one JSON list per
line, until its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.gpu.bed import Bed, bed
from pdx.bench.gpu.ipc_stage import BOARD, RECEIVER, SIZES, TOKEN, Board, Pages
from pdx.bench.gpu.nixl import start_nixl
from pdx.cuda.memory import DeviceMemory, Handle
from pdx.transports.channel import GpuMemory
from pdx.transports.registry import find

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
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        stack.callback(os.close, self._bell)
        self._region = find("cuda_ipc").register(GpuMemory(arena, total), wake=lambda: os.eventfd_write(self._bell, 1))
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
            os.eventfd_read(self._bell)
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
