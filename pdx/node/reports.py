"""What a node reports about itself: its status, and the heartbeat to the proxy, with the marks of transfers."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from pdx.cuda.memory import num_mapped
from pdx.node.sessions import Session
from pdx.security.address import reachable_url
from pdx.telemetry.host import host_id
from pdx.wire.messages import VERSION
from pdx.wire.proxy import EngineReport, NodeReport
from pdx.wire.status import ArenaStatus, AttachedStatus, NodeStatus

if TYPE_CHECKING:
    from pdx.node.service import Service

MAX_REACHED = 1024


def node_status(service: Service) -> NodeStatus:
    """Everything `pdx node --status` shows."""
    now = service.env.clock()
    chunks, nbytes, pins = service.store.index.census()
    return NodeStatus(
        name=service.name,
        epoch=service.epoch,
        pid=os.getpid(),
        uptime_s=now - service.started_at,
        arena_bytes=service.store.total_bytes,
        free_bytes=service.store.free_bytes,
        chunks=chunks,
        chunk_bytes=nbytes,
        leases=service.store.num_leases,
        pins=pins,
        transfers=len(service.transfers),
        attached=[_attached(service, session, now) for session in service.sessions],
        counters=dict(service.counters),
        listen=service.peers.connections.address,
        peers=service.peers.statuses(),
        gpu=service.gpus[0],
        arenas=[
            ArenaStatus(gpu, pool.total_bytes, pool.free_bytes)
            for gpu, pool in zip(service.gpus, service.store.pools, strict=True)
        ],
        mapped=num_mapped(),
        pinned_bytes=service.store.index.pinned_bytes,
        tiers=service.tiers.statuses(),
    )


def heartbeat(service: Service) -> NodeReport:
    """The report to the proxy; takes out the marks collected since the last one."""
    engines = [
        EngineReport(
            hello.engine,
            hello.role,
            engine_url(service, session),
            session.running,
            hello.facts,
            session.layout,
            hello.shape,
            hello.groups,
            session.is_draining,
        )
        for session in service.sessions
        if (hello := session.hello).kind == "scheduler"
    ]
    marks = list(service.marks)
    service.marks.clear()
    service.has_news = False
    return NodeReport(
        VERSION,
        service.name,
        service.epoch,
        service.store.total_bytes,
        service.store.free_bytes,
        engines,
        marks,
        listen=service.peers.connections.address,
        public_key=service.peers.connections.public_key,
        host=host_id(),
        sent_ns=time.monotonic_ns(),
        reaches=service.peers.tiers.reached[:MAX_REACHED],
    )


def engine_url(service: Service, session: Session) -> str:
    """The URL at which other hosts reach the engine of a session."""
    return reachable_url(session.hello.url, service.peers.connections.address)


def _attached(service: Service, session: Session, now: float) -> AttachedStatus:
    hello = session.hello
    return AttachedStatus(
        pid=hello.pid,
        kind=hello.kind,
        name=hello.name,
        engine=hello.engine,
        shard=hello.shard,
        role=hello.role,
        url=engine_url(service, session),
        running=session.running,
        silent_s=now - session.last_seen,
        unshared=session.unshared,
        facts=msgspec.structs.asdict(hello.facts) if hello.facts is not None else {},
        shards=session.shards,
        groups=session.groups,
    )
