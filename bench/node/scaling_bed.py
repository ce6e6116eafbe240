"""What `pdx.bench.node.scaling` asks of a node that holds many chunks, in this process or over its socket.

One round of messages costs a node the same however much it holds, if each costs what it changes. Chunks are as small as
chunks get: a node never touches their bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import zmq

from pdx.client.connection import Connection
from pdx.config import NodeConfig, listen_address
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.node.service import PROBE_BYTES, Service
from pdx.node.start import start
from pdx.wire.messages import (
    VERSION,
    Abort,
    Admit,
    Admitted,
    Answer,
    Ask,
    Bye,
    Cancel,
    Done,
    Fill,
    Hello,
    NodeStatus,
    Release,
    Status,
)

WRITER_CHUNKS = 4_000  # of the writer that dies
ASKED_CHUNKS = 64  # in one reservation
CANCELLED_CHUNKS = 8
FILL_CHUNKS = 2_000  # sealed by one message when a store is filled
FOR_EVER_S = 100.0  # longer than anything is remembered
ANSWER_S = 60.0
_TAIL_BYTES = 100

Step = tuple[str, Callable[[], object]]


class Process(Protocol):
    """A process that is attached to the node."""

    def ask(self, body: Ask) -> Answer:
        """To the node and back."""

    def end(self) -> None:
        """It is gone; what it was writing is free when this returns."""


class Bed(Protocol):
    """A node."""

    def attach(self) -> Process:
        """One more process."""

    def pass_time(self) -> bool:
        """All deadlines are over by now; False: this node's clock cannot be moved."""

    def tick(self) -> None:
        """What the node does a few times a second."""

    def spent_s(self) -> float:
        """Processor time of the thread that does all this."""


class Here:
    """A node's own classes in this process, without its loop; its arena is a file of which no byte is touched."""

    def __init__(self, folder: Path, arena_bytes: int) -> None:
        config = NodeConfig(address=f"ipc://{folder}/run/node.sock", arena_bytes=arena_bytes)
        path, nbytes = folder / "arena", arena_bytes + PROBE_BYTES
        with path.open("wb") as file:
            file.truncate(nbytes + nbytes // GRANULE_BYTES * 8)
        self._now = 0.0
        self._routes = 0
        self._arena = Arena(path, nbytes, writable_generations=True)
        self.service = Service(config, [self._arena], 1, lambda: self._now)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.service.peers.open(self._context, listen_address(config), "127.0.0.1", lambda _: None, lambda _: None)

    def attach(self) -> Process:
        """One more process: this one."""
        self._routes += 1
        hello = Hello(VERSION, os.getpid(), "client", name="bench")
        session, _ = self.service.attach(self._routes.to_bytes(4, "little"), hello, os.getpid())
        return _Session(self.service, session)

    def pass_time(self) -> bool:
        """Deadlines are over as soon as the node looks."""
        self._now += FOR_EVER_S
        return True

    def tick(self) -> None:
        """Deadlines, and answers to who waits."""
        self.service.tick()
        for _ in self.service.admissions.late_answers():
            pass

    def spent_s(self) -> float:
        """Of this thread."""
        return time.thread_time()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.detach_all()
        self.service.peers.close()
        self._context.term()
        self._arena.close()


class _Session:
    def __init__(self, service: Service, session: Any) -> None:
        self._service, self._session = service, session

    def ask(self, body: Ask) -> Answer:
        answer = self._service.handle(self._session, body)
        assert answer is not None, "no answer is kept back from who does not ask for that"
        return answer

    def end(self) -> None:
        self._service.end(self._session)


class There:
    """A real node over its socket."""

    def __init__(self, folder: Path, arena_bytes: int) -> None:
        self._address = f"ipc://{folder}/run/node.sock"
        self._process = start(NodeConfig(address=self._address, arena_bytes=arena_bytes))
        self._schedule = Path(f"/proc/{self._process.pid}/schedstat")  # of its main thread
        self._connections: list[Connection] = []

    def attach(self) -> Process:
        """One more connection."""
        connection = Connection(self._address, Hello(VERSION, os.getpid(), "client", name="bench"))
        self._connections.append(connection)
        if not connection.attach(ANSWER_S):
            raise RuntimeError(f"the node at {self._address} does not answer")
        return _Connected(connection)

    def pass_time(self) -> bool:
        """Not this one's."""
        return False

    def tick(self) -> None:
        """It does so by itself."""

    def spent_s(self) -> float:
        """Of its control loop."""
        return int(self._schedule.read_text().split()[0]) / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        self._process.terminate()
        self._process.wait(ANSWER_S)


class _Connected:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, body: Ask) -> Answer:
        return self._connection.call(body, ANSWER_S)

    def end(self) -> None:
        self._connection.call(Bye(), ANSWER_S)


class Load:
    """A node with `chunks` sealed chunks of `chunk_bytes`, room for `WRITER_CHUNKS` more, and what it is asked."""

    def __init__(self, bed: Bed, chunks: int, chunk_bytes: int = GRANULE_BYTES) -> None:
        self.chunks = chunks
        self.bed = bed
        self._chunk_bytes = chunk_bytes
        self._names = 0
        self._client = bed.attach()
        self._seal(chunks)

    @staticmethod
    def arena_bytes(chunks: int, chunk_bytes: int = GRANULE_BYTES) -> int:
        """The arena that it needs."""
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
        if self.bed.pass_time():
            yield "tick that ends them", self.bed.tick
        self._seal(self.chunks - self._sealed())

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

    def fill_up(self) -> None:
        """Seal chunks until no room is left."""
        self._seal(self.chunks + WRITER_CHUNKS - self._sealed())

    def _sealed(self) -> int:
        status = self._client.ask(Status())
        assert isinstance(status, NodeStatus)
        return status.chunks["sealed"]

    def _seal(self, count: int) -> None:
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
