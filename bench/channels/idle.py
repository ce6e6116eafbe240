"""A tcp channel that nobody used for a while still writes at once: `python -m pdx.bench.channels.idle [--seconds N]`.

Between two processes; nothing but the kernel's keepalive probes goes over the streams meanwhile. The reference is the
same write on the same channel just before. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from pdx.bench.channels.measure import NOTIFY, Sender
from pdx.bench.channels.raw import SharedFile
from pdx.bench.channels.receiver import Receiver
from pdx.bench.harness.engines import say
from pdx.bench.harness.report import at_most, plain, publish
from pdx.transports.channel import Piece
from pdx.transports.registry import find

MEMORY_BYTES = 64 << 20
WRITE_BYTES = 1 << 20
WRITES = 50
PAUSE_S = 0.2  # between the writes of the reference: the threads sleep then, too
SAY_EVERY_S = 600.0
GOAL_MS = 50.0  # "at once"; connecting again, or a resent segment, would take longer


def write_ms(sender: Sender) -> float:
    """One write, until it is acknowledged; an error is raised."""
    start = time.perf_counter()
    sender.finish(sender.write([Piece(0, 0, WRITE_BYTES)], NOTIFY))
    return (time.perf_counter() - start) * 1e3


def sleep(seconds: float) -> None:
    """Do nothing, and say so now and then."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        say(f"  idle for {left:,.0f} s more")
        time.sleep(min(left, SAY_EVERY_S))


def measure(seconds: float) -> tuple[list[float], float]:
    """Times of a write: with short pauses, and of the first after the long one."""
    with tempfile.TemporaryDirectory(prefix="pdx-bench-", dir="/dev/shm") as folder:
        source = SharedFile(Path(folder) / "source", MEMORY_BYTES)
        with Receiver("tcp", Path(folder) / "target", MEMORY_BYTES) as receiver:
            sender = Sender(find("tcp"), source)
            try:
                sender.connect(receiver.remote)
                before = []
                for _ in range(WRITES):
                    time.sleep(PAUSE_S)
                    before.append(write_ms(sender))
                sleep(seconds)
                return before, write_ms(sender)
            finally:
                sender.region.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    before, after_ms = measure(seconds)
    usual_ms = statistics.median(before)
    figures = [
        plain(
            f"write of 1 MB, {PAUSE_S} s after the last one", usual_ms, "ms", f"worst of {WRITES}: {max(before):.1f}"
        ),
        at_most(f"the first write after {seconds:,.0f} s without any", after_ms, "ms", GOAL_MS, "no new connection"),
    ]
    publish("idle", f"a tcp channel after {seconds:,.0f} s of silence", figures, {"before_ms": before})


if __name__ == "__main__":
    main()
