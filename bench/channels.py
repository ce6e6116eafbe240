"""Each channel against the technology under it, called directly: `python -m pdx.bench.channels [SCHEME…]`.

Messages of 4 KB to 16 MB from one process to another, one and many in flight. Both sides walk through the same two
256 MiB of shared memory, so that caches help nobody; both are timed in the same rounds, one after the other. Writes
`results/channels.json` and `results/channels.png`. The last line is JSON.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy
from rich.table import Table

from pdx.bench.channel_raw import RAW, Flow, Raw, RawShm, SharedFile
from pdx.bench.places import RESULTS
from pdx.bench.receiver import Receiver
from pdx.bench.report import Figure, at_least, console, plain, publish
from pdx.bench.timing import measure
from pdx.channel import Channel, Piece, Region, RemoteRegion, Transfer
from pdx.errors import ChannelUnavailable
from pdx.registry import find

MIB = 1 << 20
RING = 256 * MIB
SIZES = tuple((4 << 10) << (2 * step) for step in range(7))  # 4 KB … 16 MB
MANY = 8
PASS_BYTES = 128 * MIB  # in one measurement, unless that would be more than
PASS_MESSAGES = 1024
REPEATS = 7
GOALS = {"shm": 0.9, "tcp": 0.9, "nixl": 0.9, "ucx": 0.85}
LARGE = 1 * MIB  # goals hold from here on
NOTIFY = b"bench"
POLL_S = 0.0002  # between looks at what does not wake us


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case; rates in GB/s of bytes sent."""

    scheme: str
    nbytes: int
    in_flight: int
    raw_gb_s: float
    gb_s: float
    ratio: float
    one_thread_gb_s: float = 0.0  # shm: memcpy by one thread, where `raw` has more


class Sender:
    """Our channel as `Raw.send` has the raw one."""

    def __init__(self, region: type[Region], file: SharedFile) -> None:
        self._bell = threading.Event()
        self.region = region.register(file.memory, wake=self._bell.set)
        self._ring = file.memory.nbytes
        self._channel: Channel | None = None

    def connect(self, remote: RemoteRegion) -> None:
        """To a receiver."""
        self._channel = self.region.connect(remote)

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """See `Channel.write`."""
        assert self._channel is not None
        return self._channel.write(pieces, notify)

    def send(self, flow: Flow) -> None:
        """All messages; returns when all are acknowledged."""
        under_way: deque[Transfer] = deque()
        for offset in flow.offsets(self._ring):
            under_way.append(self.write([Piece(offset, offset, flow.nbytes)], NOTIFY))
            if len(under_way) == flow.depth:
                self.finish(under_way.popleft())
        while under_way:
            self.finish(under_way.popleft())

    def finish(self, transfer: Transfer) -> None:
        """Wait until it is over, as a node does."""
        while True:
            self._bell.clear()
            if transfer.poll():
                break
            self._bell.wait(POLL_S if self.region.is_polled else 5.0)
        if transfer.error is not None:
            raise transfer.error


class Walk:
    """Hands out flows that go on where the last one ended."""

    def __init__(self, nbytes: int, depth: int) -> None:
        self.count = max(depth, min(PASS_MESSAGES, PASS_BYTES // nbytes))
        self.nbytes = nbytes
        self._depth = depth
        self._at = 0

    def __call__(self, send: Callable[[Flow], None]) -> Callable[[], None]:
        """Send the next flow so."""

        def call() -> None:
            flow = Flow(self._at, self.nbytes, self.count, self._depth)
            self._at = (self._at + self.nbytes * self.count) % RING
            send(flow)

        return call


def check(send: Callable[[Flow], None], source: SharedFile, target: SharedFile, what: str) -> None:
    """A pass over everything must make the two memories equal."""
    target.array[:] = 0
    send(Flow(0, 4 * MIB, RING // (4 * MIB), 4))
    if not numpy.array_equal(source.array, target.array):
        raise RuntimeError(f"{what} did not bring all bytes")


def measure_scheme(scheme: str, repeats: int) -> list[Row]:
    """All sizes and depths of one channel.

    :raises ChannelUnavailable: it does not work here.
    """
    region = find(scheme)
    found = region.availability()
    if not found.is_ok:
        raise ChannelUnavailable(found.why)
    with tempfile.TemporaryDirectory(prefix="pdx-bench-", dir="/dev/shm") as folder:
        source = SharedFile(Path(folder) / "source", RING)
        source.array[:] = numpy.frombuffer(numpy.random.default_rng(7).bytes(RING), dtype=numpy.uint8)
        with Receiver(scheme, Path(folder) / "target", RING) as receiver:
            target = SharedFile(receiver.path, RING)
            sender, raw = Sender(region, source), RAW[scheme](source.memory)
            try:
                sender.connect(receiver.remote)
                raw.connect(receiver.raw_detail)
                check(sender.send, source, target, f"channel {scheme}")
                check(raw.send, source, target, f"raw {scheme}")
                return [_row(scheme, sender, raw, size, depth, repeats) for depth in (1, MANY) for size in SIZES]
            finally:
                raw.close()
                sender.region.close()


def _row(scheme: str, sender: Sender, raw: Raw, nbytes: int, depth: int, repeats: int) -> Row:
    walk = Walk(nbytes, depth)
    calls = {"raw": walk(raw.send), "ours": walk(sender.send)}
    if isinstance(raw, RawShm) and depth > 1:
        calls["one thread"] = walk(raw.copy_alone)
    timings = measure(calls, reference="raw", repeats=repeats)
    amount = walk.count * nbytes / 1e9
    rates = {name: round(timing.rate(amount), 3) for name, timing in timings.items()}
    ratio = round(timings["ours"].ratio, 3)
    return Row(scheme, nbytes, depth, rates["raw"], rates["ours"], ratio, rates.get("one thread", 0.0))


def show(rows: list[Row]) -> None:
    """All rows as a table."""
    table = Table(title=f"channels against what is under them, GB/s, median of {REPEATS}", title_justify="left")
    for column in ("channel", "bytes", "in flight", "raw", "ours", "ours / raw"):
        table.add_column(column, justify="left" if column == "channel" else "right")
    for row in rows:
        rates = (f"{row.raw_gb_s:.3f}", f"{row.gb_s:.3f}", f"{row.ratio:.3f}")
        table.add_row(row.scheme, f"{row.nbytes:,}", str(row.in_flight), *rates)
    console.print(table)


def draw(rows: list[Row], path: Path) -> None:
    """Rate over message size; ours solid, raw dashed."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    for axis, depth in zip(axes, (1, MANY), strict=True):
        for number, scheme in enumerate(schemes):
            chosen = [row for row in rows if row.scheme == scheme and row.in_flight == depth]
            sizes = [row.nbytes for row in chosen]
            color = f"C{number}"
            axis.plot(sizes, [row.gb_s for row in chosen], color=color, marker="o", label=f"pdx {scheme}")
            axis.plot(sizes, [row.raw_gb_s for row in chosen], color=color, linestyle="--", label=f"raw {scheme}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(SIZES, [f"{size >> 10} KB" if size < MIB else f"{size >> 20} MB" for size in SIZES])
        axis.set_title("one in flight" if depth == 1 else f"{depth} in flight")
        axis.set_xlabel("message size")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("GB/s")
    axes[1].legend()
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def figures(rows: list[Row], skipped: dict[str, str]) -> list[Figure]:
    """The medians over the large sizes that goals are set for."""
    found = []
    for scheme in dict.fromkeys(row.scheme for row in rows):
        for depth, words in ((1, "one in flight"), (MANY, f"{MANY} in flight")):
            large = [row for row in rows if (row.scheme, row.in_flight) == (scheme, depth) and row.nbytes >= LARGE]
            ratio = statistics.median(row.ratio for row in large)
            parts = ", ".join(f"{row.nbytes // MIB} MB {row.gb_s:.2f} of {row.raw_gb_s:.2f}" for row in large)
            name = f"{scheme}, {words}: share of the raw rate at ≥ 1 MB"
            found.append(at_least(name, ratio, "", GOALS[scheme], f"GB/s: {parts}"))
            if large[0].one_thread_gb_s:
                alone = statistics.median(row.gb_s / row.one_thread_gb_s for row in large)
                found.append(plain(f"{scheme}, {words}: against memcpy by one thread", alone, ""))
    return found + [plain(f"{scheme}: skipped", 0.0, "", why) for scheme, why in skipped.items()]


def main() -> None:
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    for scheme in sys.argv[1:] or RAW:
        try:
            rows += measure_scheme(scheme, REPEATS)
        except ChannelUnavailable as error:
            skipped[scheme] = str(error)
    show(rows)
    if len(sys.argv) > 1:
        return  # a look at some of them is no result
    draw(rows, RESULTS / "channels.png")
    details: dict[str, Any] = {"rows": [asdict(row) for row in rows], "skipped": skipped}
    title = f"channels against the technology under them, median of {REPEATS} rounds"
    publish("channels", title, figures(rows, skipped), details)


if __name__ == "__main__":
    main()
