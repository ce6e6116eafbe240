"""Two processes on one GPU: scattered KV pages of one engine into scattered pages of the other.

Each way is timed until the receiver has everything in its pages: over the channel `cuda_ipc` (gather into our arena,
the channel copies into the receiver's, it scatters), through one arena that both have mapped, as two engines at one
node (gather, scatter), and by NIXL page by page, once written and once read, of which the faster one is compared with.
The reference is one copy of the same bytes within the GPU, which reads and writes each byte once. The channel does so
three times, the shared arena twice, and two processes on one GPU take turns, so a third and a half of the copy's speed
are what the bytes allow.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.gpu.bed import Bed, Findings
from pdx.bench.gpu.ipc_peer import BOARD, MIB, RECEIVER, SENDER, SIZES, TOKEN, Board, Group, Pages, order
from pdx.bench.gpu.nixl import READ, WRITE, VramNixl, lanes, start_nixl, ucx_settings
from pdx.bench.harness.nodes import Child
from pdx.bench.harness.report import Figure, at_least, plain
from pdx.bench.harness.timing import Timing, measure
from pdx.cuda.memory import DeviceMemory
from pdx.transports.channel import GpuMemory, Piece, RemoteRegion, Transfer
from pdx.transports.registry import find

COPY, CHANNEL, ARENA = "copy", "cuda_ipc", "one arena"
NIXL = {"NIXL reads": READ, "NIXL writes": WRITE}
MOVES = {CHANNEL: 3, ARENA: 2}  # how often a byte is read and written on its way
BOUND_GOAL, NIXL_GOAL = 0.8, 5.0
WARMUPS = 2
ENDS_S = 20.0
SLOW_S, SLOW_REPEATS = 0.5, 5  # what takes longer is measured less often


@dataclass(frozen=True, slots=True)
class Row:
    """One measured way; GB/s of pages moved, once counted."""

    way: str
    group_bytes: int
    gb_s: float
    share_of_copy: float
    ms: float


class Writer:
    """The sending process: its pages, its arena, the ways out of it."""

    def __init__(self, bed: Bed, folder: Path, stack: contextlib.ExitStack) -> None:
        self._sizes = SIZES[bed.name]
        self._bed = bed
        total = self._sizes.total_bytes
        self.pages = Pages(bed, SENDER)
        self.pages.bytes.copy_(bed.noise(total, 7))
        self._other = bed.zeros(total)
        self._folder = folder
        self._board = Board(folder / BOARD)
        arena = DeviceMemory.create(bed.gpu, total)
        stack.callback(arena.close)
        self._groups = self.pages.groups(arena.address)
        self._peer = self._start(arena, stack)
        told = self._peer.heard()
        self._woken = threading.Event()
        region = find("cuda_ipc").register(GpuMemory(arena, total), wake=self._woken)
        stack.callback(region.close)
        remote = msgspec.msgpack.decode(bytes.fromhex(told["remote"]), type=RemoteRegion)
        assert remote.token == TOKEN
        self._channel = region.connect(remote)
        self._nixl, self.why_no_nixl = self._start_nixl(told, stack)

    def _start(self, arena: DeviceMemory, stack: contextlib.ExitStack) -> Child:
        handle, fd = arena.export()
        try:
            encoded = msgspec.msgpack.encode(handle).hex()
            child = Child("pdx.bench.gpu.ipc_peer", self._bed.name, str(self._folder), encoded, str(fd), fd=fd)
        finally:
            if fd >= 0:
                os.close(fd)
        stack.callback(child.close)
        return child

    def _start_nixl(self, told: dict[str, str], stack: contextlib.ExitStack) -> tuple[VramNixl | None, str]:
        if told["why"]:
            return None, told["why"]
        nixl, why = start_nixl(self._bed, self.pages.bytes, self._folder)
        if nixl is not None:
            stack.callback(nixl.close)
            nixl.connect(bytes.fromhex(told["nixl"]))
        return nixl, why

    # ---- the ways ---------------------------------------------------------------------------

    def copy(self) -> None:
        self._other.copy_(self.pages.bytes)
        self._bed.wait()

    def through_channel(self, group_bytes: int) -> None:
        """All pages over the channel: every gather is launched at once, each group goes when it is filled."""
        done = self._board.done
        filled = self._launched(group_bytes)
        under_way: list[Transfer] = []
        for index, (group, wait) in enumerate(filled):
            wait()
            payload = msgspec.msgpack.encode((group_bytes, index))
            under_way.append(self._channel.write([Piece(group.start, group.start, group.nbytes)], payload))
        for transfer in under_way:
            self._finish(transfer)
        self._board.wait(done + 1)

    def through_arena(self, group_bytes: int) -> None:
        """All pages through our arena, which the receiver has mapped."""
        done = self._board.done
        self._board.begin(group_bytes)
        for _, wait in self._launched(group_bytes):
            wait()
            self._board.fill()
        self._board.wait(done + 1)

    def by_nixl(self, operation: str) -> None:
        """Page by page, the receiver's pages into ours (READ), or ours into its (WRITE)."""
        assert self._nixl is not None
        page_bytes = self._sizes.page_bytes
        ours, theirs = ([number * page_bytes for number in order(self._sizes, whose)] for whose in (SENDER, RECEIVER))
        self._nixl.move(operation, ours, theirs, page_bytes)

    def _launched(self, group_bytes: int) -> list[tuple[Group, Callable[[], None]]]:
        filled = []
        for group in self._groups[group_bytes]:
            group.gather()
            filled.append((group, self._bed.mark()))
        return filled

    def _finish(self, transfer: Transfer) -> None:
        while True:
            self._woken.clear()
            if transfer.poll():
                break
            if not self._woken.wait(ENDS_S):
                raise RuntimeError(f"a write was not over within {ENDS_S} s")
        if transfer.error is not None:
            raise transfer.error

    # ---- the measurement --------------------------------------------------------------------

    def ways(self) -> dict[tuple[str, int], Callable[[], None]]:
        """All that work here, by name and bytes of a group."""
        calls: dict[tuple[str, int], Callable[[], None]] = {(COPY, 0): self.copy}
        for size in self._sizes.groups:
            calls[CHANNEL, size] = partial(self.through_channel, size)
            calls[ARENA, size] = partial(self.through_arena, size)
        if self._nixl is not None:
            calls |= {(way, 0): partial(self.by_nixl, operation) for way, operation in NIXL.items()}
        return calls

    def ucx(self) -> dict[str, Any]:
        """What UCX was told, and which lanes it says it takes for GPU memory."""
        logs = sorted(self._folder.glob("ucx-*.log"))
        text = "\n".join(log.read_text(errors="replace") for log in logs)
        return {"settings": ucx_settings(), "lanes": lanes(text)}

    def check(self, way: str, call: Callable[[], None]) -> float:
        """After a pass the receiver's pages hold ours, in its order; its seconds. :raises RuntimeError: they do not."""
        if way == COPY:
            return 0.0
        expected = self.pages.digest()
        is_read = NIXL.get(way) == READ  # the other way round
        if is_read:
            self.through_arena(self._sizes.groups[0])
            self.pages.bytes.zero_()
            self._bed.wait()
        else:
            self._asked_digest()  # zeroes the receiver's
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        if (self.pages.digest() if is_read else self._asked_digest()) != expected:
            raise RuntimeError(f"{way} did not bring all bytes to their places")
        return took

    def _asked_digest(self) -> str:
        self._peer.tell(["digest"])
        return str(self._peer.heard())


@contextlib.contextmanager
def writer(bed: Bed) -> Iterator[Writer]:
    """Both processes; the other one ends with this context."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdx-bench-"))
        yield Writer(bed, Path(folder), stack)


def ipc(bed: Bed) -> Findings:
    sizes = SIZES[bed.name]
    with writer(bed) as ours:
        calls, why_not, slow = ours.ways(), {}, set()
        for (way, size), call in list(calls.items()):
            try:
                if ours.check(way, call) > SLOW_S:
                    slow.add(f"{way} {size}")
            except Exception as error:
                if way not in NIXL:
                    raise
                why_not[way] = f"{type(error).__name__}: {error}"
                del calls[way, size]
        named = {f"{way} {size}": call for (way, size), call in calls.items()}
        timings: dict[str, Timing] = {}
        for repeats, names in ((sizes.repeats, named.keys() - slow), (SLOW_REPEATS, slow)):
            measured = {name: named[name] for name in named if name in names or name == f"{COPY} 0"}
            timings = measure(measured, reference=f"{COPY} 0", repeats=repeats, warmups=WARMUPS) | timings
        why_not |= {way: ours.why_no_nixl for way in NIXL if ours.why_no_nixl}
        ucx = ours.ucx()
    rows = []
    for way, size in calls:
        timing = timings[f"{way} {size}"]
        rate = round(timing.rate(sizes.total_bytes / 1e9), 2)
        rows.append(Row(way, size, rate, round(timing.ratio, 4), round(timing.median_s * 1e3, 3)))
    title = (
        f"{sizes.total_bytes / MIB:g} MiB of pages of {sizes.page_bytes >> 10} KB between two processes on one GPU, "
        f"median of {sizes.repeats}"
    )
    details = {"rows": [asdict(row) for row in rows], "ucx": ucx, "mps": has_mps()}
    return Findings(title, ipc_figures(rows, why_not, ucx["lanes"]), details)


def has_mps() -> bool:
    """Whether NVIDIA's MPS serves this machine, with which processes on one GPU need not take turns."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def ipc_figures(rows: list[Row], why_not: dict[str, str], lane_of: dict[str, str]) -> list[Figure]:
    """Of each way its fastest group size, against what the bytes allow and against the faster way of NIXL.

    `why_not`: ways of NIXL that did not run; `lane_of`: by NIXL's operation what UCX used.
    """
    copy = next(row for row in rows if row.way == COPY)
    nixl = max((row for row in rows if row.way in NIXL), key=lambda row: row.gb_s, default=None)
    found = [plain("copy within the GPU", copy.gb_s, "GB/s", f"{copy.ms:.2f} ms, each byte counted once")]
    for way, moves in MOVES.items():
        best = max((row for row in rows if row.way == way), key=lambda row: row.gb_s)
        note = f"{best.gb_s:.0f} GB/s, {best.ms:.2f} ms in groups of {best.group_bytes / MIB:g} MiB"
        found.append(plain(f"{way}, pages to pages: share of a device copy", best.share_of_copy, "", note))
        note = f"each byte is copied {moves} times, which takes {moves * copy.ms:.2f} ms"
        name = f"{way}, pages to pages: share of what the bytes allow"
        found.append(at_least(name, best.share_of_copy * moves, "", BOUND_GOAL, note))
        if nixl is not None:
            name = f"{way}, pages to pages: times NIXL page by page"
            found.append(at_least(name, best.gb_s / nixl.gb_s, "", NIXL_GOAL, f"{nixl.way}: {nixl.gb_s:.2f} GB/s"))
    for way, operation in NIXL.items():
        row = next((row for row in rows if row.way == way), None)
        if row is None:
            found.append(plain(f"{way} page by page: skipped", 0.0, "", why_not.get(way, "")))
        else:
            lane = lane_of.get(operation, "what UCX did not say")
            found.append(plain(f"{way} page by page", row.gb_s, "GB/s", f"UCX used {lane}"))
    return found
