"""A node with a disk in this process: what is said to it as sessions say it, and its loop turned by who waits."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raw_engine import CHUNK_BYTES, LAYERS, Engine, key

from pdx.config import NodeConfig
from pdx.errors import NodeError, ProtocolError
from pdx.memory.arena import Arena
from pdx.node.reports import node_status
from pdx.node.service import PROBE_BYTES, Service
from pdx.node.sessions import Session
from pdx.store.chunk import NODE, Claim
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.wire.messages import VERSION, Answer, Ask, Hello, Refused
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import CheckFinish, JobStatus

ARENA_BYTES = 8 << 20


def contents_of(first: int, count: int = 8, nbytes: int = CHUNK_BYTES) -> dict[bytes, bytes]:
    """Random bytes of chunks, by their keys."""
    return {key(number): os.urandom(nbytes) for number in range(first, first + count)}


class Said:
    """One session of the node."""

    def __init__(self, bed: ControlBed, **hello: Any) -> None:
        self._bed = bed
        route = next(bed.routes).to_bytes(4, "big")
        self.session: Session
        self.session, _ = bed.service.attach(route, Hello(VERSION, os.getpid(), **hello), os.getpid())

    def ask(self, ask: Ask) -> Any:
        """The answer to it, also where that comes late."""
        bed = self._bed
        number = self.session.last_seq = self.session.last_seq + 1
        try:
            answer: Answer | None = bed.service.handle(self.session, ask)
        except (NodeError, ProtocolError) as error:
            return Refused.of(error)
        if answer is None:
            bed.until(lambda: (self.session, number) in bed.late, f"{type(ask).__name__} is answered")
            answer = bed.late.pop((self.session, number))
        bed.turn()
        return answer

    def refused(self, ask: Ask) -> str:
        """The name of the error that the node refuses it with."""
        answer = self.ask(ask)
        assert isinstance(answer, Refused), answer
        return answer.error


class BedEngine(Engine):
    """Both halves are sessions of the bed."""

    def __init__(self, bed: ControlBed, **hello: Any) -> None:
        self.arena = bed.arena
        self.scheduler = Said(bed, kind="scheduler", engine="e" * 16, **hello)
        self.worker = Said(bed, kind="worker", engine="e" * 16)


class ControlBed:
    """The node. Its clock is the real one, for its disk is a real one; nothing here depends on it."""

    def __init__(self, place: Path, arena: Arena, env: Env | None = None, **settings: Any) -> None:
        self.arena = arena
        self.routes = itertools.count(1)
        self.late: dict[tuple[Session, int], Answer] = {}
        common = {"disks": [str(place / "disk")], "store": "write-back", "store_window": 1e-9, **settings}
        nbytes = arena.nbytes - PROBE_BYTES
        config = NodeConfig(address=f"ipc://{place}/node.sock", arena_bytes=nbytes, **common)
        self.service = Service(config, [arena], 1, env or Env())
        self.service.open_tiers()
        [disks] = self.service.tiers.below
        self.disk = disks[0]
        self.until(lambda: all(disk.is_counted for disk in disks), "they are counted")
        self.wire = Said(self, kind="controller")

    def turn(self) -> None:
        """One turn of its loop."""
        self.service.env.mailbox.deliver()
        self.service.turn()
        for session, number, answer in self.service.admissions.late_answers():
            self.late[session, number] = answer

    def until(self, is_so: Callable[[], Any], what: str) -> Any:
        """Turn it until that is so; what it then returned."""
        return wait_until(lambda: self.turn() or is_so(), what=what)

    def put(self, first: int, count: int, nbytes: int = CHUNK_BYTES, **claim: Any) -> list[bytes]:
        """Sealed chunks that the node itself has filled; their keys."""
        keys = [key(number) for number in range(first, first + count)]
        store = self.service.store
        _, slots, _ = store.reserve(Claim(keys=keys, nbytes=nbytes, layers=LAYERS, owner=NODE, writers=[NODE], **claim))
        store.seal(store.fill(slots, 0, LAYERS, NODE))
        return keys

    def status(self) -> NodeStatus:
        """As `pdx node --status`."""
        return node_status(self.service)

    def over(self, status: Any) -> JobStatus:
        """The job's end."""
        assert isinstance(status, JobStatus), status
        ask = CheckFinish(status.job)
        return self.until(lambda: (last := self.wire.ask(ask)).is_over and last, "the job is over")

    def run(self, verb: Any) -> JobStatus:
        """A job, to its end."""
        return self.over(self.wire.ask(verb))

    def close(self) -> None:
        """End it."""
        self.service.controls.jobs.close()
        self.service.tiers.close()
        self.service.sessions.close()
        self.service.peers.close()


@contextlib.contextmanager
def control_bed(
    place: Path, kind: Callable[..., ControlBed] = ControlBed, nbytes: int = ARENA_BYTES, **settings: Any
) -> Iterator[ControlBed]:
    """The node, until the end of the block."""
    with Arena.create(place / "arena", nbytes + PROBE_BYTES) as arena:
        made = kind(place, arena, **settings)
        try:
            yield made
        finally:
            made.close()
