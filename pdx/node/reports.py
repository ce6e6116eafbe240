"""What a node tells of itself: its status to who asks, its heartbeat to the proxy, with the marks of transfers."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from pdx.cuda.memory import num_mapped
from pdx.node.peers.peers import Peers
from pdx.node.sessions import Session, Sessions
from pdx.security.address import reachable_url
from pdx.store.store import Store
from pdx.store.tiers import Tiers
from pdx.store.transfers import Transfers
from pdx.telemetry.env import Env
from pdx.telemetry.host import host_id
from pdx.wire.messages import VERSION
from pdx.wire.proxy import EngineReport, MarkReport, NodeReport
from pdx.wire.status import ArenaStatus, AttachedStatus, NodeStatus

MAX_MARKS = 4096


class Reports:
    """Collects marks, and reads everything else where it is. Owned by the node's control loop."""

    def __init__(
        self,
        env: Env,
        *,
        name: str,
        epoch: int,
        store: Store,
        sessions: Sessions,
        transfers: Transfers,
        tiers: Tiers,
        peers: Peers,
        marks: deque[MarkReport],
        gpus: Sequence[str],
    ) -> None:
        self._name = name
        self._epoch = epoch
        self._store = store
        self._sessions = sessions
        self._transfers = transfers
        self._tiers = tiers
        self._peers = peers
        self._counters = env.counters
        self._gpus = gpus
        self._clock = env.clock
        self._started = env.clock()
        self.marks = marks  # to be told with the next heartbeat
        self.news = True  # engines came or went since the last one

    def status(self) -> NodeStatus:
        """Everything `pdx node --status` shows."""
        now = self._clock()
        chunks, nbytes, pins = self._store.index.census()
        return NodeStatus(
            name=self._name,
            epoch=self._epoch,
            pid=os.getpid(),
            uptime_s=now - self._started,
            arena_bytes=self._store.total_bytes,
            free_bytes=self._store.free_bytes,
            chunks=chunks,
            chunk_bytes=nbytes,
            leases=self._store.num_leases,
            pins=pins,
            transfers=len(self._transfers),
            attached=[self._attached(session, now) for session in self._sessions],
            counters=dict(self._counters),
            listen=self._peers.connections.address,
            peers=self._peers.statuses(),
            gpu=self._gpus[0],
            arenas=[
                ArenaStatus(gpu, pool.total_bytes, pool.free_bytes)
                for gpu, pool in zip(self._gpus, self._store.pools, strict=True)
            ],
            mapped=num_mapped(),
            pinned_bytes=self._store.index.pinned_bytes,
            tiers=self._tiers.statuses(),
        )

    def heartbeat(self) -> NodeReport:
        """What the proxy hears; takes the marks collected since the last one."""
        engines = [
            EngineReport(
                hello.engine,
                hello.role,
                self._url(session),
                session.running,
                hello.facts,
                session.layout,
                hello.shape,
            )
            for session in self._sessions
            if (hello := session.hello).kind == "scheduler"
        ]
        marks = list(self.marks)
        self.marks.clear()
        self.news = False
        return NodeReport(
            VERSION,
            self._name,
            self._epoch,
            self._store.total_bytes,
            self._store.free_bytes,
            engines,
            marks,
            listen=self._peers.connections.address,
            public_key=self._peers.connections.public_key,
            host=host_id(),
            sent_ns=time.monotonic_ns(),
        )

    def _url(self, session: Session) -> str:
        return reachable_url(session.hello.url, self._peers.connections.address)

    def _attached(self, session: Session, now: float) -> AttachedStatus:
        hello = session.hello
        return AttachedStatus(
            pid=hello.pid,
            kind=hello.kind,
            name=hello.name,
            engine=hello.engine,
            shard=hello.shard,
            role=hello.role,
            url=self._url(session),
            running=session.running,
            silent_s=now - session.last_seen,
            unshared=session.unshared,
            facts=msgspec.structs.asdict(hello.facts) if hello.facts is not None else {},
        )
