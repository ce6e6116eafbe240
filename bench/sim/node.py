"""A real node's service on virtual time, without sockets and with tiers of modelled speed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from pdx.bench.sim.clock import Clock
from pdx.bench.sim.replay import sparse_arena
from pdx.bench.sim.requests import SCOPE, Request
from pdx.bench.sim.tier import Device, ModelledTier, PeersTier
from pdx.config import NodeConfig, StoreChoice
from pdx.errors import PdxError
from pdx.memory.arena import GRANULE_BYTES
from pdx.node.service import PROBE_BYTES, Service
from pdx.node.sessions import Session
from pdx.store.policies.by_name import Maker, find
from pdx.store.store import LRU
from pdx.store.tier import Job, Tier
from pdx.telemetry.env import Env
from pdx.wire.messages import (
    VERSION,
    Admit,
    Admitted,
    Answer,
    Ask,
    Expect,
    Fill,
    FindMoved,
    Hello,
    Moved,
    Ping,
    Release,
)
from pdx.wire.moved import Part, Piece

ENGINE_S = 86_400.0  # leases and reservations do not expire: a simulated engine is never late
WAIT_S = 3600.0
TICK_S = 1.0
LEAST_BLOCKS = 256  # a node has at least 1 MiB
AnyTier = TypeVar("AnyTier", bound=ModelledTier)


class SimulatedNode:
    """One node, and what engines of one kind ask it. A slot of the smallest size stands for a real block."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        blocks: int,
        block_bytes: float,
        devices: Sequence[Device] = (),
        policy: str = "lru",
        disk_policy: str = "lru",
        maker: Maker | None = None,
        wanted: Mapping[bytes, Mapping[int, int]] | None = None,
        store: StoreChoice = "all",
        window: float = 0.1,
    ) -> None:
        """`blocks`: room in memory. `maker`: replaces the eviction policy that `policy` names. `wanted`: replaces, for
        the tiers, what the queue wants. `store`, `window`: as in `pdx.store.storing`."""
        self._clock = clock
        self._wanted = wanted
        self._disk_policy = find(disk_policy, clock)
        self._arena = sparse_arena(folder / "arena", blocks + PROBE_BYTES // GRANULE_BYTES)
        config = NodeConfig(
            address=f"ipc://{folder}/node.sock",
            arena_bytes=max(LEAST_BLOCKS, blocks) * GRANULE_BYTES,
            policy=policy,
            store=store,
            store_window=window,
            group_bytes=GRANULE_BYTES,
            max_lease_s=ENGINE_S,
            reserve_s=ENGINE_S,
            fetch_s=60.0,
            name="simulated",
        )
        self.service = Service(config, [self._arena], 1, Env(clock), policy=maker)
        # It has no sockets, and so no peers.
        self.service.peers.turn = list  # type: ignore[method-assign]
        self.service.peers.tick = lambda: None  # type: ignore[method-assign]
        self.tiers: list[ModelledTier] = [self._tier(device, block_bytes / GRANULE_BYTES) for device in devices]
        self.service.tiers.below.extend([tier] for tier in self.tiers)
        self._scale = block_bytes / GRANULE_BYTES
        self._scheduler = self._attach("scheduler")
        self._worker = self._attach("worker")
        self._late_callbacks: dict[int, Callable[[Admitted], None]] = {}
        self.tick_at = 0.0  # when its deadlines are checked next
        self.most_blocks = 0  # the most that memory has held after a turn
        self.is_touched = False  # whether a turn might change something now
        self.on_touched: Callable[[SimulatedNode], None] = lambda node: None  # called when this becomes true

    def add_peers(self, others: Sequence[SimulatedNode], device: Device) -> None:
        """Let this node fetch what the others have in memory, as over a network, where that pays."""
        tier = self._tier(device, self._scale, PeersTier)
        tier.others = [node.service.store for node in others]
        self.tiers.append(tier)
        self.service.tiers.below.append([tier])

    def _tier(self, device: Device, scale: float, kind: type[AnyTier] = ModelledTier) -> AnyTier:  # type: ignore[assignment]
        service = self.service
        return kind(
            device,
            self._clock,
            self._done,
            scale=scale,
            chunk_bytes=GRANULE_BYTES,
            on_removed=service.tiers.storing.removed,
            is_used=service.tiers.is_used,
            wanted=service.store.wanted if self._wanted is None else self._wanted,
            policy=self._disk_policy if device.kind == "disk" else LRU,
        )

    def _done(self, tier: Tier, job: Job, error: PdxError | None) -> None:
        self._touch()
        self.service.copies.done(tier, job, error)

    def _touch(self) -> None:
        if not self.is_touched:
            self.is_touched = True
            self.on_touched(self)

    def _attach(self, kind: str) -> Session:
        hello = Hello(VERSION, os.getpid(), kind, name="simulated", engine="simulated")  # type: ignore[arg-type]
        return self.service.attach(kind.encode(), hello, os.getpid())[0]

    # ---- what an engine asks -----------------------------------------------------------------

    def report_pace(self, block_s: float) -> None:
        """Report how long the engine computes for a block: loads that would take longer are skipped. 0: unknown."""
        self._ask(self._worker, Ping(chunk_s=block_s))

    def admit(self, name: str, request: Request, then: Callable[[Admitted, Sequence[bytes]], None]) -> None:
        """Ask for the request's blocks, and for room for the missing ones. `then` is called, now or later, with the
        answer and the keys of the hits. Blocks of the same content at other positions are used if they are more."""

        def answered(answer: Admitted) -> None:
            pieces = self._find_moved(request, answer.hits)
            if not pieces:
                then(answer, request.keys[: answer.hits])
                return

            def found(moved: Admitted) -> None:
                is_more = moved.hits > answer.hits
                self.release(answer if is_more else moved)
                hits, lease = (moved if is_more else answer).hits, (moved if is_more else answer).lease
                then(replace(answer, hits=hits, lease=lease), (keys if is_more else request.keys)[:hits])

            keys, parts = [piece.key for piece in pieces], [Part(1, piece.shift) for piece in pieces]
            self._admit(Admit(keys, lease_s=ENGINE_S, wait_s=WAIT_S, request=name, moved=parts), found)

        ask = Admit(list(request.keys), GRANULE_BYTES, 1, lease_s=ENGINE_S, partial=True, wait_s=WAIT_S, request=name)
        self._admit(replace(ask, tokens=request.prompt_tokens), answered)

    def _find_moved(self, request: Request, hits: int) -> list[Piece]:
        """Its leading blocks, at whatever positions they were computed, if there are more than `hits`; else none."""
        if hits >= request.num_whole:
            return []
        found = self._ask(self._scheduler, FindMoved(SCOPE, request.ids, 1))
        assert isinstance(found, Moved)
        return found.pieces if len(found.pieces) > hits else []

    def _admit(self, ask: Admit, then: Callable[[Admitted], None]) -> None:
        answer = self._ask(self._scheduler, ask)
        if answer is None:
            self._late_callbacks[self._scheduler.last_seq] = then
        elif isinstance(answer, Admitted):
            then(answer)

    def expect(self, request: str, keys: Sequence[bytes]) -> None:
        """Announce that a queued request will ask for these keys."""
        self._ask(self._scheduler, Expect(request, list(keys)))

    def seal_granted(self, answer: Admitted) -> None:
        """Fill and seal all that was granted: it is computed."""
        if answer.granted_slots:
            self._ask(self._worker, Fill(answer.granted_slots, 0, 1, seal=True))

    def store_answer(self, request: Request) -> None:
        """Store the further whole blocks that the answer has completed."""
        if request.answer_keys:
            parent = request.keys[request.num_whole - 1] if request.num_whole else b""
            tokens = request.answer_tokens
            ask = Admit(list(request.answer_keys), GRANULE_BYTES, 1, partial=True, parent=parent, tokens=tokens)
            answer = self._ask(self._scheduler, ask)
            if isinstance(answer, Admitted):
                self.seal_granted(answer)

    def release(self, answer: Admitted) -> None:
        """Release the lease: the hits are in the engine's own memory."""
        if answer.lease:
            self._ask(self._scheduler, Release(answer.lease))

    def leading_in_memory(self, request: Request) -> int:
        """How many of its leading blocks are in host memory, at whatever positions they were computed."""
        count = self.in_memory(request.keys)
        return max(count, self.in_memory([piece.key for piece in self._find_moved(request, count)]))

    def in_memory(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are in host memory."""
        return len(self.service.store.find(keys, 1))

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are in memory or a tier below: what a proxy's index knows of a node."""
        own = [tier for tier in self.tiers if not isinstance(tier, PeersTier)]
        at = 0
        while at < len(keys):
            rest = keys[at:]
            if not (found := self.in_memory(rest) or max((len(tier.find(rest, 1)) for tier in own), default=0)):
                break
            at += found
        return at

    def origins(self, keys: Sequence[bytes]) -> list[str]:
        """Where the bytes of these keys in host memory came from: for each the name of a tier, or of the engine."""
        return [chunks[0].reservation.origin.name for chunks in self.service.store.find(keys, 1)]

    def refresh(self, keys: Sequence[bytes]) -> None:
        """Rank these keys again: the oracle's answers for them have changed."""
        self.service.store.refresh([chunk for key in keys for chunk in self.service.store.index.of(key)])
        for tier in self.tiers:
            tier.refresh(keys)

    def _ask(self, session: Session, ask: Ask) -> Answer | None:
        self._tick()
        self._touch()
        session.last_seq += 1
        return self.service.handle(session, ask)

    def turn(self) -> None:
        """Run a turn of the control loop: advance copies and give late answers. Call it after each event."""
        self.is_touched = False
        self._tick()
        self.service.turn()
        store = self.service.store
        self.most_blocks = max(self.most_blocks, (store.total_bytes - store.free_bytes) // GRANULE_BYTES)
        for _, number, answer in self.service.admissions.late_answers():
            if isinstance(answer, Admitted):
                self._touch()
                self._late_callbacks.pop(number)(answer)

    def _tick(self) -> None:
        if self._clock.now >= self.tick_at:
            self.tick_at = self._clock.now + TICK_S
            self.service.tick()

    @property
    def due_at(self) -> float:
        """When the next late answer is due, even if nothing happens before."""
        return self.service.admissions.due_in(0.0)

    def close(self) -> None:
        """Detach and discard everything. :raises PdxError: the node has contained internal errors meanwhile."""
        errors = self.service.counters["internal_errors"]
        self.service.tiers.close()
        self.service.sessions.close()
        self.service.peers.close()
        self._arena.close()
        if errors:
            raise PdxError(f"the simulated node has had {errors} internal errors; the first one is told above")
