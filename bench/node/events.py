"""What a node's events cost its control loop: `python -m pdx.bench.node.events`. About a minute.

One real `Service` whose arena is full gets the same messages in turns, as its control loop decodes, handles and answers
them: each request evicts 64 chunks, writes 64, looks them up with a lease and gives that back. In one turn nobody is
told, in one the events are published and nobody subscribes, in one a process of its own subscribes, in one a
`pdx proxy --chunk-index` follows. Counted is the processor time of the control loop's thread, and that of the whole
process, which has the thread that publishes. No byte of a chunk is touched, so no real node has so many chunks come and
go in a second. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.cli.ports import free_ports
from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES
from pdx.node.daemon import Daemon
from pdx.node.events.publisher import Publisher
from pdx.node.proxies import Proxies
from pdx.testing.waiting import wait_until
from pdx.wire.messages import (
    VERSION,
    Admit,
    Admitted,
    Answer,
    Ask,
    Fill,
    FromNode,
    Hello,
    Release,
    ToNode,
    decode_to_node,
    encode,
)

ROUNDS = 60
REQUESTS = 20  # of each turn
CHUNKS = 64  # of a request
BLOCKS = 16  # of a chunk
FULL_CHUNKS = 8192
READ_TURNS = 32  # between two looks at what the proxy says
GOAL = 1.02
NOBODY, UNHEARD, SUBSCRIBER, PROXY = "told to nobody", "published, unheard", "a subscriber", "a proxy"
NAMES = (NOBODY, UNHEARD, SUBSCRIBER, PROXY)
_SUBSCRIBE = """
import sys
from pdx.client.events import Subscriber
with Subscriber(sys.argv[1], sys.argv[2]) as blocks:
    while True:
        blocks.poll(1.0)
"""


class Bed:
    """A service, and what its control loop does but for the sockets of processes."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        control, (port,) = f"ipc://{folder}/proxy.sock", free_ports(1)
        config = NodeConfig(
            address=f"ipc://{folder}/node.sock", arena_bytes=FULL_CHUNKS * GRANULE_BYTES, name="bench", proxy=control
        )
        self._daemon = stack.enter_context(Daemon(config))
        self.service = self._daemon.service
        self._session, _ = self.service.attach(b"route", Hello(VERSION, os.getpid(), "client"), os.getpid())
        self._seq = 0
        self._parent = os.urandom(16)
        daemon = self._daemon
        self._proxies, (self._proxy,) = daemon._proxies, daemon._proxies._all.values()
        self._nobody = daemon._proxies = Proxies((), self.service, daemon._context, daemon._poller)
        self._is_followed = False
        self._turns = 0
        proxy = ("proxy", "--port", str(port), "--control", control, "--chunk-index", "--log-level", "warning")
        stack.enter_context(running("-m", "pdx.cli.main", *proxy))
        self._addresses = (f"ipc://{folder}/events.sock", f"ipc://{folder}/replay.sock")
        self._heard_addresses = (f"ipc://{folder}/heard-events.sock", f"ipc://{folder}/heard-replay.sock")
        stack.enter_context(running("-c", _SUBSCRIBE, *self._heard_addresses))
        for _ in range(FULL_CHUNKS // CHUNKS):
            self.request()

    def _ask(self, body: Ask) -> Answer:
        self._seq += 1
        envelope = decode_to_node(encode(ToNode(self._seq, True, body)))
        answer = self.service.handle(self._session, envelope.body)
        assert answer is not None
        encode(FromNode(self._seq, answer))
        self.turn()
        return answer

    def turn(self) -> None:
        """The end of a turn of the control loop."""
        self.service.turn()
        self._turns += 1
        if self._is_followed and self._turns % READ_TURNS == 0:  # a node polls it with its other sockets
            self._proxies.serve(self._proxy.line.sockets[0])
        self._daemon._tell_changes(time.monotonic())

    def request(self) -> None:
        """Another prompt: evict, write, look up, give back."""
        keys = [os.urandom(16) for _ in range(CHUNKS)]
        blocks = os.urandom(16 * BLOCKS * CHUNKS)
        names = {"blocks": blocks, "chunk_blocks": BLOCKS, "parent": self._parent}
        admitted = self._ask(Admit(keys, GRANULE_BYTES, **names))  # type: ignore[arg-type]
        assert isinstance(admitted, Admitted)
        self._ask(Fill(admitted.granted_slots, layers=1, seal=True))
        found = self._ask(Admit(keys, lease_s=30.0, **names))  # type: ignore[arg-type]
        assert isinstance(found, Admitted)
        assert found.hits == CHUNKS
        self._ask(Release(found.lease))

    @contextlib.contextmanager
    def told_to(self, name: str) -> Iterator[None]:
        """Somebody is told of chunks, and has heard what is there."""
        if name in (UNHEARD, SUBSCRIBER):
            address, replay = self._heard_addresses if name == SUBSCRIBER else self._addresses
            publisher = Publisher(self.service.events, address=address, replay=replay)
            self._daemon._publisher = publisher

            def is_ready() -> bool:
                self.turn()
                return publisher._is_whole and (name == UNHEARD or bool(publisher._subscribed))

            wait_until(is_ready, what=name)
        self._is_followed = name == PROXY
        if self._is_followed:
            follower, self._daemon._proxies = self._proxy.follower, self._proxies
            self.service.events.follow(follower)

            def is_told() -> bool:
                self.turn()
                self._proxies.report(time.monotonic())
                return bool(follower._stream and follower._feed is None and not follower._frames)

            wait_until(is_told, what=name)
        yield
        if self._daemon._publisher is not None:
            self._daemon._publisher.close()
            self._daemon._publisher = None
        if self._is_followed:
            self._is_followed = False
            self.service.events.leave(self._proxy.follower)
            self._daemon._proxies = self._nobody


@contextlib.contextmanager
def running(*command: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-P", *command], stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """By who is told, for each round: microseconds of one request, of the control loop and of the process."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder, contextlib.ExitStack() as stack:
        bed = Bed(Path(folder), stack)
        for turn in range(-2, rounds):
            for name in (*NAMES[turn % 4 :], *NAMES[: turn % 4]):
                with bed.told_to(name):
                    bed.request()
                    loop, process = time.thread_time(), time.process_time()
                    for _ in range(REQUESTS):
                        bed.request()
                    spent = time.thread_time() - loop, time.process_time() - process
                if turn >= 0:
                    times[name].append((spent[0] / REQUESTS * 1e6, spent[1] / REQUESTS * 1e6))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.node.events", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    times = measure(parser.parse_args().rounds)
    figures: list[Figure] = []
    for at, what in enumerate(("control loop", "process")):
        base = [each[at] for each in times[NOBODY]]
        figures.append(plain(f"{what}, {NOBODY}", statistics.median(base), "µs per request"))
        for name in NAMES[1:]:
            ratios = [each[at] / of_base for each, of_base in zip(times[name], base, strict=True)]
            ratio, label = statistics.median(ratios), f"{what}, {name}"
            figures.append(at_most(label, ratio, "×", GOAL) if not at else plain(label, ratio, "×"))
    publish("events", f"requests of {CHUNKS} chunks that evict as many, median of {len(times[NOBODY])} rounds", figures)


if __name__ == "__main__":
    main()
