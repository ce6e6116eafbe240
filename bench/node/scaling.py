"""What a node's messages cost by how much it holds: `python -m pdx.bench.node.scaling`. About two minutes.

Each message at 10,000, 100,000 and 500,000 chunks, by processor time of the node's control loop, so that other
processes do not count. In every round each size is asked in turn. Then requests that each evict 16 chunks and have a
partial chunk. `tests/node/test_message_cost.py` counts the steps of the same messages. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

from pdx.bench.harness.nodes import Asking, asking, one_node
from pdx.bench.harness.report import Figure, at_least, at_most, plain, publish
from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import Abort, Admit, Admitted, Answer, Ask, Bye, Cancel, Done, Fill, Release
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import Status

SIZES = (10_000, 100_000, 500_000)
ROUNDS = 15
WARMUPS = 5
RATIO, STATUS_RATIO, REQUEST_RATIO = 2.0, 3.0, 0.7
REQUESTS = 150  # of each size in a row
TURNS = 8
REQUEST_CHUNKS = 16
REQUEST_CHUNK_BYTES = 2 * GRANULE_BYTES  # a partial chunk takes a part of that
WRITER_CHUNKS = 4_000  # of the writer that dies
ASKED_CHUNKS = 64  # in one reservation
CANCELLED_CHUNKS = 8
FILL_CHUNKS = 2_000  # sealed by one message when a store is filled
_TAIL_BYTES = 100

Step = tuple[str, Callable[[], object]]
Times = dict[str, dict[int, list[float]]]  # step -> size -> milliseconds per round


class Process(Protocol):
    """A process that is attached to the node."""

    def ask(self, body: Ask) -> Answer:
        """To the node and back."""

    def end(self) -> None:
        """The process is gone; what it was writing is free when this returns."""


class Bed(Protocol):
    """A node."""

    def attach(self) -> Process:
        """One more process."""

    def spent_s(self) -> float:
        """Processor time of the node's control loop."""


class RealNode:
    """A node behind its socket."""

    def __init__(self, address: str, stack: contextlib.ExitStack) -> None:
        self._address = address
        self._stack = stack
        status = stack.enter_context(asking(address)).call(Status())
        assert isinstance(status, NodeStatus)
        self._schedule = Path(f"/proc/{status.pid}/schedstat")  # of its main thread

    def attach(self) -> Process:
        return _Connected(self._stack.enter_context(asking(self._address)))

    def spent_s(self) -> float:
        return int(self._schedule.read_text().split()[0]) / 1e9


class _Connected:
    def __init__(self, client: Asking) -> None:
        self.ask = client.call

    def end(self) -> None:
        self.ask(Bye())


class Load:
    """A node with `chunks` sealed chunks of `chunk_bytes`, room for `WRITER_CHUNKS` more, and what it is asked."""

    def __init__(self, bed: Bed, chunks: int, chunk_bytes: int = GRANULE_BYTES) -> None:
        self.chunks = chunks
        self.bed = bed
        self._chunk_bytes = chunk_bytes
        self._names = 0
        self._client = bed.attach()
        self.seal(chunks)

    @staticmethod
    def arena_bytes(chunks: int, chunk_bytes: int = GRANULE_BYTES) -> int:
        return (chunks + WRITER_CHUNKS) * chunk_bytes

    def round(self) -> Generator[Step, Any, None]:
        """The steps of a round, each with its name; whoever drives it carries each out and sends back the answer.

        Steps of one name belong together. The store holds the same before and after.
        """
        client = self._client
        reserved = yield "reserve 64", lambda: client.ask(Admit(self._keys(ASKED_CHUNKS), self._chunk_bytes))
        yield "abort 64", lambda: client.ask(Abort(reserved.granted_slots))
        writer = self.bed.attach()
        writer.ask(Admit(self._keys(WRITER_CHUNKS), self._chunk_bytes))  # from now on the store is full
        reserved = yield "reserve 64, evicting", lambda: client.ask(Admit(self._keys(64), self._chunk_bytes))
        yield "seal 64", lambda: client.ask(Fill(reserved.granted_slots, layers=1, seal=True))
        yield from self._partial_chunk()
        yield from self._cancel()
        yield "status", lambda: client.ask(Status())
        yield "death of a writer with 4,000 slots", writer.end
        self.seal(self.chunks - self.sealed())

    def _partial_chunk(self) -> Generator[Step, Any, None]:
        """A chunk and the end of a prompt, from one process to another."""
        client, keys, transfer = self._client, self._keys(2), self._transfer()
        ask = Admit(keys, self._chunk_bytes, tail_nbytes=_TAIL_BYTES, transfer=transfer, part="writes")
        name = "partial chunk: reserve, seal, look up, release"
        reserved = yield name, lambda: client.ask(ask)
        assert len(reserved.granted_slots) == len(keys)
        yield name, lambda: client.ask(Fill(reserved.granted_slots, layers=1, seal=True))
        found = yield name, lambda: client.ask(Admit(keys, lease_s=30.0, transfer=transfer))
        assert found.hits == len(keys)
        yield name, lambda: client.ask(Release(found.lease))

    def _cancel(self) -> Generator[Step, Any, None]:
        client, transfer = self._client, self._transfer()
        reserved = client.ask(Admit(self._keys(CANCELLED_CHUNKS), self._chunk_bytes, transfer=transfer, part="writes"))
        yield "cancel of 8 chunks", lambda: client.ask(Cancel(transfer))
        assert isinstance(reserved, Admitted)
        client.ask(Abort(reserved.granted_slots))
        yield "cancel of an unknown transfer", lambda: client.ask(Cancel(self._transfer()))

    def request(self, chunks: int, tail_bytes: int) -> None:
        """One prompt of which nothing is there: looked up, reserved, sealed, handed over, with a partial chunk."""
        client, keys, transfer = self._client, self._keys(chunks + 1), self._transfer()
        client.ask(Admit(keys, lease_s=30.0, transfer=transfer))
        reserved = client.ask(Admit(keys, self._chunk_bytes, tail_nbytes=tail_bytes, transfer=transfer, part="writes"))
        assert isinstance(reserved, Admitted)
        assert len(reserved.granted_slots) == len(keys), reserved
        client.ask(Fill(reserved.granted_slots, layers=1, seal=True))
        found = client.ask(Admit(keys, lease_s=30.0, transfer=transfer))
        assert isinstance(found, Admitted)
        assert found.hits == len(keys)
        assert isinstance(client.ask(Release(found.lease)), Done)

    def sealed(self) -> int:
        status = self._client.ask(Status())
        assert isinstance(status, NodeStatus)
        return status.chunks["sealed"]

    def seal(self, count: int) -> None:
        for first in range(0, count, FILL_CHUNKS):
            keys = self._keys(min(FILL_CHUNKS, count - first))
            reserved = self._client.ask(Admit(keys, self._chunk_bytes))
            assert isinstance(reserved, Admitted)
            assert len(reserved.granted_slots) == len(keys), f"no room for {len(keys)} chunks"
            self._client.ask(Fill(reserved.granted_slots, layers=1, seal=True))

    def _keys(self, count: int) -> list[bytes]:
        self._names += count
        return [number.to_bytes(16, "little") for number in range(self._names - count, self._names)]

    def _transfer(self) -> str:
        self._names += 1
        return f"transfer-of-the-bench-{self._names}"


def drive(steps: Generator[Step, Any, None], take: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Carry out a round: `take` is given each step's name and call, and returns what the call returns."""
    answer = None
    while True:
        try:
            name, call = steps.send(answer)
        except StopIteration:
            return
        answer = take(name, call)


@contextlib.contextmanager
def loads(chunk_bytes: int) -> Iterator[list[Load]]:
    with contextlib.ExitStack() as stack:
        made = []
        for chunks in SIZES:
            address = stack.enter_context(one_node(Load.arena_bytes(chunks, chunk_bytes)))
            made.append(Load(RealNode(address, stack), chunks, chunk_bytes))
        yield made


def rounds() -> Times:
    """Every step at every size, in turns."""
    times: Times = defaultdict(lambda: defaultdict(list))
    with loads(GRANULE_BYTES) as made:
        for turn in range(-WARMUPS, ROUNDS):
            for load in made:
                spent: dict[str, float] = defaultdict(float)

                def take(name: str, call: Callable[[], Any], load: Load = load, spent: dict[str, float] = spent) -> Any:
                    began = load.bed.spent_s()
                    answer = call()
                    spent[name] += load.bed.spent_s() - began
                    return answer

                drive(load.round(), take)
                if turn >= 0:
                    for name, seconds in spent.items():
                        times[name][load.chunks].append(seconds * 1e3)
    return times


def requests() -> dict[int, list[float]]:
    """Requests per second of the node's processor time, at every size, in turns."""
    draw = random.Random(0)
    rates: dict[int, list[float]] = defaultdict(list)
    with loads(REQUEST_CHUNK_BYTES) as made:
        for load in made:
            load.seal(load.chunks + WRITER_CHUNKS - load.sealed())  # no room is left
        for turn in range(-1, TURNS):
            for load in made:
                began = load.bed.spent_s()
                for _ in range(REQUESTS):
                    load.request(REQUEST_CHUNKS, draw.randint(1, REQUEST_CHUNK_BYTES))
                if turn >= 0:
                    rates[load.chunks].append(REQUESTS / (load.bed.spent_s() - began))
    return rates


def figures(times: Times) -> list[Figure]:
    """One per step: milliseconds at the largest size, and how many times those at the smallest that is."""
    found = []
    for name, by_size in times.items():
        medians = [statistics.median(by_size[chunks]) for chunks in SIZES]
        note = ", ".join(f"{value:.3f} ms at {chunks:,}" for value, chunks in zip(medians, SIZES, strict=True))
        bound = STATUS_RATIO if name == "status" else RATIO
        found.append(at_most(f"{name}: 500k / 10k", medians[-1] / medians[0], "", bound, note))
    return found


def main() -> None:
    times, rates = rounds(), requests()
    per_s = [statistics.median(rates[chunks]) for chunks in SIZES]
    note = ", ".join(f"{value:,.0f}/s at {chunks:,}" for value, chunks in zip(per_s, SIZES, strict=True))
    name = "requests/s that evict and have a partial chunk: 500k / 10k"
    publish(
        "scaling",
        "what messages cost a node by how many chunks it holds: 10,000, 100,000 and 500,000",
        [
            *figures(times),
            at_least(name, per_s[-1] / per_s[0], "", REQUEST_RATIO, note),
            plain("the same at 500k", per_s[-1], "1/s", f"{REQUEST_CHUNKS} chunks each, processor time of the node"),
        ],
        {"rounds": ROUNDS, "over_socket_ms": times, "requests_per_s": rates},
    )


if __name__ == "__main__":
    main()
