"""Fixtures of the tests of the worker half on streams: the fake driver, the interpreted kernel, and beds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_cuda import FakeCuda, fake_cuda
from node_harness import NodeProcess, NodeThread
from stream_bed import Bed, WholePageLock, use_interpreted
from toy_engine import Engines

from pdx.client import connection
from pdx.client.connection import Connection
from pdx.cuda.memory import num_mapped
from pdx.wire.messages import Hello, Ping


@pytest.fixture(autouse=True)
def _told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes hear with the next heartbeat of what is counted, and tests wait for that."""
    monkeypatch.setattr(connection, "HEARTBEAT_S", 0.05)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """Two fake GPUs in this process, where nothing stays mapped, registered or open."""
    with fake_cuda(gpus=2) as driver:
        yield driver
        assert num_mapped() == 0
        assert driver.leftovers() == {}
        assert driver.spoiled == []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What all engines tell their nodes, but for what a clock tells them."""
    log: list[Any] = []
    tell = Connection.tell

    def recorded(self: Connection, body: Any) -> None:
        if not isinstance(body, Ping):
            log.append(body)
        tell(self, body)

    monkeypatch.setattr(Connection, "tell", recorded)
    return log


@pytest.fixture
def on_disk(start_here: Callable[..., NodeThread], place: Any) -> Callable[[], NodeThread]:
    """Starts a node with a disk; the next one finds what the one before has left there."""
    return lambda: start_here(disks=[str(place / "disk")], disk_reserve_bytes=0)


@pytest.fixture
def beds(fake: FakeCuda, address: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bed]]:
    use_interpreted(monkeypatch)
    made: list[Bed] = []

    class Recording(Connection):
        def __init__(self, address: str, hello: Hello) -> None:
            self.kind = hello.kind
            super().__init__(address, hello)

        def tell(self, body: Any) -> None:
            if self.kind == "worker" and not isinstance(body, Ping):  # which a clock tells, not the worker
                made[0].log.append(body)
            super().tell(body)

    monkeypatch.setattr("pdx.engine.link.Connection", Recording)
    monkeypatch.setattr("pdx.engine.gpu_copier.PageLock", WholePageLock)

    def make(on_gpu: bool, *flags: str, is_killed: bool = False, **settings: Any) -> Bed:
        made.append(Bed(address, on_gpu=on_gpu, is_killed=is_killed))
        made[-1].start_node(*flags, **settings)
        return made[-1]

    yield make
    for bed in made:
        bed.close()


@pytest.fixture
def bed(beds: Callable[..., Bed]) -> Bed:
    """The quicker one, where it makes no difference: host memory."""
    return beds(False)


@pytest.fixture
def killed_bed(beds: Callable[..., Bed]) -> Bed:
    """The same, of whose node a test kills or stops the process."""
    return beds(False, is_killed=True)


@pytest.fixture
def gpu_bed(beds: Callable[..., Bed]) -> Bed:
    return beds(True)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def engines(start_here: Callable[..., NodeThread], request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Makes engines of one node, `engines.node`."""
    with contextlib.closing(Engines(start_here(**getattr(request, "param", {})))) as made:
        yield made


@pytest.fixture
def engines_of_killed(start_node: Callable[..., NodeProcess]) -> Iterator[Engines]:
    """The same, of whose node a test kills the process."""
    with contextlib.closing(Engines(start_node())) as made:
        yield made
