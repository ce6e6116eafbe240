"""Compares each channel with the technology it uses, called directly, for `pdx bench transfer`.

Messages go from one process to another, one or many in flight. Both sides cycle through the same two pieces of shared
memory, which are larger than caches; both are timed in the same rounds, one after the other.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy

from pdx.bench.channels.raw import RAW, Flow, Raw, SharedFile
from pdx.bench.channels.receiver import Receiver
from pdx.bench.harness.report import Figure, at_least, significant
from pdx.bench.harness.timing import measure
from pdx.errors import ChannelUnavailable
from pdx.transports.channel import Channel, Piece, Region, RemoteRegion, Transfer
from pdx.transports.registry import find

MIB = 1 << 20
PASS_BYTES = 128 * MIB  # per measurement, unless one message needs more
PASS_MESSAGES = 1024
GOAL = 0.9
CHECKED = 4 * MIB  # message size for verifying that all bytes arrive
LARGE = 1 * MIB  # goals apply from this size on
NOTIFY = b"bench"
POLL_S = 0.0002  # between polls of whatever cannot wake this process
MEMCPY = "memcpy"  # used in place of a scheme: not a channel, for comparison


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case; median rates in GB/s of bytes sent. None: the raw technology was not measured."""

    scheme: str
    nbytes: int
    in_flight: int
    raw_gb_s: float | None
    gb_s: float
    ratio: float | None  # channel / raw, median over the rounds

    @property
    def us_per_message(self) -> float:
        """Microseconds from the end of one message to the end of the next."""
        return self.nbytes / self.gb_s / 1e3


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured. `ring`: bytes that each side cycles through, a multiple of `CHECKED`; all messages in flight
    must fit."""

    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    repeats: int
    has_raw: bool
    ring: int

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Pairs of size and number in flight, in the order of measurement."""
        return [(size, depth) for depth in self.depths for size in self.sizes]


class Sender:
    """Drives a channel like `Raw.send` drives a raw technology."""

    def __init__(self, region: type[Region], file: SharedFile) -> None:
        self._woken = threading.Event()
        self.region = region.register(file.memory, wake=self._woken)
        self._ring = file.memory.nbytes
        self._channel: Channel | None = None

    def connect(self, remote: RemoteRegion) -> None:
        self._channel = self.region.connect(remote)

    def send(self, flow: Flow) -> None:
        """Send all messages; returns when all are acknowledged."""
        assert self._channel is not None
        write = self._channel.write
        flow.carry_out(self._ring, lambda offset: write([Piece(offset, offset, flow.nbytes)], NOTIFY), self._finish)

    def _finish(self, transfer: Transfer) -> None:
        """Wait until it is over, as a node does."""
        while True:
            self._woken.clear()
            if transfer.poll():
                break
            self._woken.wait(POLL_S if self.region.is_polled else 5.0)
        if transfer.error is not None:
            raise transfer.error


class Walk:
    """Creates flows, each continuing where the last one ended."""

    def __init__(self, nbytes: int, depth: int, ring: int) -> None:
        self.count = max(depth, min(PASS_MESSAGES, PASS_BYTES // nbytes))
        self.nbytes = nbytes
        self._depth = depth
        self._at = 0
        self._used = ring - ring % nbytes

    def __call__(self, send: Callable[[Flow], None]) -> Callable[[], None]:
        """Send the next flow with `send`."""

        def call() -> None:
            flow = Flow(self._at, self.nbytes, self.count, self._depth)
            self._at = (self._at + self.nbytes * self.count) % self._used
            send(flow)

        return call


def check(send: Callable[[Flow], None], source: SharedFile, target: SharedFile, what: str) -> None:
    """Send everything once; the two memories must be equal afterwards."""
    target.array[:] = 0
    send(Flow(0, CHECKED, target.memory.nbytes // CHECKED, 4))
    if not numpy.array_equal(source.array, target.array):
        raise RuntimeError(f"{what} did not bring all bytes")


def measure_scheme(scheme: str, options: Options, folder: Path, on_row: Callable[[Row], None]) -> None:
    """Measure all cases of one channel, reporting each as soon as it is done. `folder`, in /dev/shm, is removed by the
    caller.

    The raw technology is measured if there is one of that name. First, all bytes are verified to arrive.

    :raises ChannelUnavailable: it does not work here.
    """
    region = find(scheme)
    found = region.availability()
    if not found.is_ok:
        raise ChannelUnavailable(found.why)
    source = SharedFile(folder / "source", options.ring)
    source.array[:] = numpy.frombuffer(numpy.random.default_rng(7).bytes(options.ring), dtype=numpy.uint8)
    with Receiver(scheme, folder / "target", options.ring) as receiver:
        target = SharedFile(receiver.path, options.ring)
        sender = Sender(region, source)
        raw = RAW[scheme](source.memory) if options.has_raw and scheme in RAW else None
        try:
            sender.connect(receiver.remote)
            check(sender.send, source, target, f"channel {scheme}")
            if raw is not None:
                raw.connect(receiver.raw_detail)
                check(raw.send, source, target, f"raw {scheme}")
            for size, depth in options.cases:
                on_row(_row(scheme, sender, raw, Walk(size, depth, options.ring), depth, options.repeats))
        finally:
            if raw is not None:
                raw.close()
            sender.region.close()


def measure_memcpy(options: Options, folder: Path, on_row: Callable[[Row], None]) -> None:
    """One thread copies from one such memory to the other, message by message: the least that any channel has to do."""
    source, target = (SharedFile(folder / name, options.ring) for name in ("source", "target"))

    def copy(flow: Flow) -> None:
        for offset in flow.offsets(options.ring):
            ctypes.memmove(target.memory.address + offset, source.memory.address + offset, flow.nbytes)

    for size in options.sizes:
        walk = Walk(size, 1, options.ring)
        timing = measure({"copy": walk(copy)}, reference="copy", repeats=options.repeats)["copy"]
        on_row(Row(MEMCPY, size, 1, None, significant(timing.rate(walk.count * size / 1e9)), None))


def _row(scheme: str, sender: Sender, raw: Raw | None, walk: Walk, depth: int, repeats: int) -> Row:
    calls = {"ours": walk(sender.send)}
    if raw is not None:
        calls = {"raw": walk(raw.send), **calls}
    timings = measure(calls, reference="raw" if raw is not None else "ours", repeats=repeats)
    amount = walk.count * walk.nbytes / 1e9
    rates = {name: significant(timing.rate(amount)) for name, timing in timings.items()}
    ratio = significant(timings["ours"].ratio) if raw is not None else None
    return Row(scheme, walk.nbytes, depth, rates.get("raw"), rates["ours"], ratio)


def goals(rows: list[Row]) -> list[Figure]:
    """Medians over the large sizes, of channels measured together with their technology."""
    found = []
    for scheme, depth in dict.fromkeys((row.scheme, row.in_flight) for row in rows):
        of_case = [row for row in rows if (row.scheme, row.in_flight) == (scheme, depth) and row.nbytes >= LARGE]
        large = [(row, row.ratio) for row in of_case if row.ratio is not None]
        if not large:
            continue
        words = "one in flight" if depth == 1 else f"{depth} in flight"
        parts = ", ".join(f"{row.nbytes / MIB:g} MB {row.gb_s:.2f} of {row.raw_gb_s or 0.0:.2f}" for row, _ in large)
        ratio = statistics.median(ratio for _, ratio in large)
        name = f"{scheme}, {words}: share of the raw rate at ≥ 1 MB"
        found.append(at_least(name, ratio, "", GOAL, f"GB/s: {parts}"))
    return found
