"""The copies of chunks between tiers: which slices go next, and when a copy is over. No sockets, no threads here.

Every movement is a copy: a push to a peer, a store on disk, a load from disk, a copy from one arena to another. A copy
either reads an arena of this node and writes a tier, slice by slice while its chunks are filled (`Copies.store`), or it
reads a tier and fills an arena (`Copies.load`).

Each tier has a queue. The copy with the highest priority goes first. Within a priority, the copy goes first that has
the fewest bytes still to be computed, because its decoder waits soonest, and the load of the fewest bytes, so that a
long prompt does not delay short ones. Once loads of `OVERTAKEN` times its bytes have been submitted after it, a load
goes before those, so that short ones do not starve it. Bytes in flight per tier are bounded by
`Tier.max_inflight_bytes`, and those of loads by `AHEAD_S`, so that the order still matters when there is more to copy
than the tier can take.
Slices are grouped until a job is worth its cost (`group_bytes`), or nothing more will be filled.

Fills, ends of jobs and grants are only recorded; `pump`, once per turn of the control loop, gives the resulting jobs to
the tiers. The cost of a message depends on what it changes, not on how much else is in flight.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pdx.errors import ArenaTooSmall, PdxError, ProtocolError, TierError
from pdx.memory.slot import Slot
from pdx.store.chunk import NODE, Chunk, Claim, Origin, Wanted
from pdx.store.copy import Copy, CopyQueue, CopyState, CopyStep, Item, Priority, alike
from pdx.store.deadlines import Deadlines
from pdx.store.history import Cause
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.tier import Grant, Hit, Job, Tier
from pdx.telemetry.env import Env
from pdx.telemetry.faults import counted
from pdx.telemetry.trace import Tracer

log = logging.getLogger("pdx.node")

_NOTHING = CopyQueue()  # for every tier without copies; never added to


class Copies:
    """All copies of a node. Owned by the control loop."""

    def __init__(self, store: Store, env: Env, *, group_bytes: int, tracer: Tracer | None = None) -> None:
        """Tiers use the clock of `env`, too, to say when a job began and ended (`Job`)."""
        self._store = store
        self._clock = env.clock
        self._group_bytes = group_bytes
        self._counters = env.counters
        self._timings = env.timings
        self._tracer = tracer
        self._numbers = itertools.count(1)
        self._copies: dict[int, Copy] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._queues: defaultdict[Tier, CopyQueue] = defaultdict(CopyQueue)  # not by name: names are not unique
        self._of_transfer: defaultdict[str, list[Copy]] = defaultdict(list)
        self._items: defaultdict[Chunk, list[Item]] = defaultdict(list)  # of granted copies, by chunk
        self._touched: dict[Copy, None] = {}  # copies whose next job may have changed since the last `pump` …
        self._may_give: set[Tier] = set()  # … and tiers that may be given jobs
        self.landed: list[Chunk] = []  # chunks that were loaded or never will be; emptied by whoever notifies waiters

    def __len__(self) -> int:
        return len(self._copies)

    def of(self, tier: Tier) -> list[Copy]:
        """The copies to and from a tier."""
        return list(self.queue(tier).copies.values())

    def of_transfer(self, transfer: str, tier: Tier) -> Copy | None:
        """The transfer's copy to a tier, if one is in flight."""
        return next((copy for copy in self._of_transfer.get(transfer, ()) if copy.tier is tier), None)

    def queue(self, tier: Tier) -> CopyQueue:
        """A tier's queue, read-only."""
        return self._queues.get(tier, _NOTHING)

    # ---- starting ---------------------------------------------------------------------------

    def store(
        self,
        tier: Tier,
        keys: Sequence[bytes],
        shards: int,
        *,
        arenas: Sequence[int] = (),
        to: Sequence[int] = (),
        priority: Priority,
        deadline: float,
        transfer: str | None = None,
        layout: bytes = b"",
        want: int = 0,
    ) -> list[Copy]:
        """Copy the leading keys that are here, or being filled, to a tier; return the copies.

        `arenas`: where the chunks lie, see `Store`; `to`: their destinations, if the tier is that of this node's
        arenas.
        """
        found: list[tuple[bytes, list[Chunk]]] = []
        for key in keys:
            chunks = self._store.index.known(key, shards, arenas)
            if chunks is None or chunks[0].slot.nbytes < chunks[0].reservation.layers:
                break  # a slice of no bytes cannot be copied
            found.append((key, chunks))
        copies: list[Copy] = []
        for run in alike(found):
            chunks = [chunk for _, of_key in run for chunk in of_key]
            self._store.hold(chunks, is_use=priority < Priority.STORE)
            copy = Copy(
                next(self._numbers),
                tier,
                [key for key, _ in run],
                shards,
                chunks,
                priority,
                deadline,
                transfer=transfer,
                layout=layout,
                want=want,
                arenas=to,
            )
            copies.append(copy)
            self._add(copy)
        return copies

    def load(
        self,
        found: Sequence[Hit],
        wanted: Wanted,
        *,
        priority: Priority,
        deadline: float,
    ) -> list[Copy]:
        """Copy the wanted keys in `found` from the tiers that have them into the first arena, as far as there is room;
        return the copies."""
        copies: list[Copy] = []
        shards = wanted.shards
        for size, group in itertools.groupby(found, key=lambda each: each[2]):
            run = list(group)
            claim = Claim(
                keys=[key for key, _, _ in run],
                nbytes=size.nbytes,
                layers=size.layers,
                owner=NODE,
                writers=[NODE] * shards,
                partial=True,
                is_named=wanted.is_named,
                deadline=deadline,
                who=wanted.who,
            )
            try:
                granted, slots, is_full = self._store.reserve(claim)
            except ArenaTooSmall:
                self._counters["loads_without_room"] += 1
                return copies
            of_tier: dict[Tier, tuple[list[bytes], list[Chunk]]] = {}
            for at, index in enumerate(granted):
                keys, chunks = of_tier.setdefault(run[index][1], ([], []))
                keys.append(run[index][0])
                chunks += [self._store.at(slot) for slot in slots[at * shards : (at + 1) * shards]]
            for tier, (keys, chunks) in of_tier.items():
                of_load = msgspec.structs.replace(chunks[0].reservation, origin=Origin(tier.name, tier.kind))
                for chunk in chunks:
                    chunk.reservation = of_load
                    chunk.is_stored = True
                copies.append(Copy(next(self._numbers), tier, keys, shards, chunks, priority, deadline, is_load=True))
                self._add(copies[-1])
            if is_full:
                self._counters["loads_without_room"] += 1
                break
        return copies

    def _add(self, copy: Copy) -> None:
        self._counters["copies"] += 1
        self._copies[copy.number] = copy
        copy.begun_ns = int(self._clock() * 1e9)
        self._deadlines.add([copy.number], copy.deadline)
        for older in self._queues[copy.tier].add(copy):
            self._rank(older)
        if copy.transfer is not None:
            self._of_transfer[copy.transfer].append(copy)
        if copy.is_load:
            self._grant(copy, Grant(range(len(copy.keys))))
        else:
            self._ask(copy)

    def _ask(self, copy: Copy) -> None:
        """Ask the tier for room, once per copy."""
        if copy.tier.is_ready and not copy.is_asked and copy.state is CopyState.QUEUED:
            copy.is_asked = True
            grant = copy.tier.admit(copy)
            if grant is not None:
                self._grant(copy, grant)

    def ready(self, tier: Tier) -> None:
        """A tier takes copies from now on: ask it for room for those that waited."""
        self._may_give.add(tier)
        for copy in self.of(tier):
            self._ask(copy)

    # ---- reports of tiers -------------------------------------------------------------------

    def granted(self, tier: Tier, number: int, grant: Grant) -> None:
        """A tier has granted room for keys of a copy.

        :raises ProtocolError: the grant does not answer a request.
        """
        copy = self._copies.get(number)
        if copy is None or copy.tier is not tier:
            return  # given up meanwhile; the tier was told, or is being told
        if copy.state is not CopyState.QUEUED:
            if copy.state is CopyState.RUNNING:
                raise ProtocolError(f"{tier.name} grants room for copy {number} twice")
            return
        self._grant(copy, grant)

    def _grant(self, copy: Copy, grant: Grant) -> None:
        held, held_bytes = copy.chunks, copy.held_bytes
        try:
            copy.grant(grant)
        except ProtocolError:
            self._give_up(copy)  # or the tier would keep room for it
            raise
        copy.step(CopyStep.GRANT)
        wanted = set(grant.keys)
        if not copy.is_load:
            self._store.unhold([chunk for at, chunk in enumerate(held) if at // copy.shards not in wanted])
        self._queues[copy.tier].count(copy, copy.held_bytes - held_bytes)
        is_dead = False
        for item in copy.items:
            self._items[item.chunk].append(item)
            is_dead = is_dead or item.is_dead
        self._counters["offered_chunks"] += len(copy.keys) * copy.shards
        self._counters["granted_chunks"] += len(copy.items)
        if is_dead:
            self._source_is_gone(copy)
        elif not copy.ungiven:  # nothing was granted
            copy.step(CopyStep.ALL_GIVEN)
            self._drain(copy)
        else:
            self._touched[copy] = None

    def stopped(self, tier: Tier, number: int, text: str) -> None:
        """A tier refuses the rest of this copy."""
        copy = self._copies.get(number)
        if copy is not None and copy.tier is tier and copy.state is not CopyState.DRAINING:
            if text:
                log.warning("%s stopped a copy: %r", tier.name, text)
            self._counters["copies_stopped"] += 1
            self._give_up(copy)

    def lost(self, tier: Tier) -> None:
        """A tier is gone; its jobs end with errors, or have ended."""
        for copy in self.of(tier):
            copy.is_lost = True
            self._counters["copies_lost"] += not copy.is_given_up
            if copy.state is CopyState.DRAINING:
                copy.is_given_up = True  # all jobs were given; whether they arrived cannot be known
            else:
                self._give_up(copy)

    # ---- events of this node ----------------------------------------------------------------

    def changed(self, chunks: Iterable[Chunk]) -> None:
        """Slices of these chunks were filled, or their writers gave up."""
        dead: dict[Copy, None] = {}
        for chunk in chunks:
            for item in self._items.get(chunk, ()):
                if item.copy.state is not CopyState.RUNNING or item.copy.is_load:
                    continue
                if item.is_dead:
                    dead[item.copy] = None
                elif item.copy.note(item):
                    self._touched[item.copy] = None
        for copy in dead:
            self._source_is_gone(copy)

    def is_filled_here(self, key: bytes, shards: int, arenas: Sequence[int] = ()) -> bool:
        """Whether a copy is filling this key in an arena of this node."""
        chunks = self._store.index.known(key, shards, arenas)
        return chunks is not None and any(chunk.writer == NODE and chunk.state is State.FILLING for chunk in chunks)

    def cancel(self, transfer: str) -> None:
        for copy in list(self._of_transfer.get(transfer, ())):
            if copy.state is not CopyState.DRAINING:
                self._counters["copies_cancelled"] += 1
                self._give_up(copy)

    def give_up(self, copies: Iterable[Copy]) -> int:
        """Give up these copies, which are no longer needed; return how many were not over."""
        left = [copy for copy in copies if copy.number in self._copies]
        for copy in left:
            self._end(copy)
        return len(left)

    def _end(self, copy: Copy) -> None:
        """Give up a copy in any state."""
        if copy.state is CopyState.DRAINING:
            copy.is_given_up = True
            copy.tier.cancel(copy)
        else:
            self._give_up(copy)

    def tick(self, now: float) -> None:
        """Give up copies whose deadline has passed; write pending trace spans."""
        if self._tracer is not None:
            self._tracer.flush()
        for number in self._deadlines.take(now):
            copy = self._copies[number]
            if copy.state is CopyState.DRAINING and not copy.is_load:
                continue
            counted(log, self._counters, "copies_late", "%r is dropped: it was not over in time", copy)
            if copy.is_load:
                if self._queues[copy.tier].loaded_ns < copy.begun_ns:  # else the tier works, for other loads
                    copy.tier.late_at = now
                if not copy.copied_bytes:  # else its jobs have already been measured
                    copy.tier.load_rate.moved(0, copy.begun_ns, int(self._clock() * 1e9))
            self._end(copy)

    def copied_bytes(self, transfer: str, kind: str) -> int:
        """Bytes copied so far by a transfer's copies in flight to tiers of this kind."""
        copies = self._of_transfer.get(transfer, ())
        return sum(copy.copied_bytes for copy in copies if copy.tier.kind == kind)

    # ---- jobs -------------------------------------------------------------------------------

    def pump(self) -> None:
        """Give each tier the jobs that have become due, the most urgent first, up to its limit in flight. To be called
        after each turn of the control loop."""
        while self._touched:
            self._rank(self._touched.popitem()[0])
        while self._may_give:
            queue = self._queues.get(self._may_give.pop())
            if queue is not None:
                for due in (queue.due_loads, queue.due):
                    while due and queue.has_room(copy := queue.copies[due[0][2]]):
                        self._give(queue, copy)

    def _give(self, queue: CopyQueue, copy: Copy) -> None:
        job = copy.next_job()
        queue.in_flight += job.nbytes
        copy.under_way += 1
        if copy.is_load:
            copy.given_bytes += job.nbytes
            queue.to_load[copy.priority, copy.size_class] -= job.nbytes
            queue.loads, queue.load_bytes = queue.loads + 1, queue.load_bytes + job.nbytes
            copy.tier.load(job)
        else:
            copy.tier.store(job)
        if not copy.ungiven:
            copy.step(CopyStep.ALL_GIVEN)
        if not copy.ungiven or not copy.is_due(self._group_bytes):
            self._rank(copy)

    def _rank(self, copy: Copy) -> None:
        queue = self._queues.get(copy.tier)
        if queue is not None and queue.rank(copy, self._group_bytes):  # None: it was the tier's last copy and is over
            self._may_give.add(copy.tier)

    def done(self, tier: Tier, job: Job, error: PdxError | None) -> None:
        """A job is over; the tier no longer accesses the arena for it."""
        queue = self._queues[tier]
        queue.in_flight -= job.nbytes
        self._may_give.add(tier)
        copy = self._copies.get(job.number)
        if copy is not None:
            copy.under_way -= 1
            self._measure(queue, copy, job)
            if error is None:
                copy.copied(job)
                copy.tier.tally.moved(job, is_load=copy.is_load)
                if copy.is_load:
                    copy.chunks[0].reservation.origin.moved(job.nbytes, job.start_ns, job.end_ns)
                copy.record(job, self._counters, self._tracer)
                if copy.tier.changed is not None and not copy.is_load:
                    copy.tier.changed.update((part.key, copy.shards) for part in job.parts)
                for part in job.parts if copy.is_load else ():
                    if job.form:  # lossy: the chunk keeps its form when it is copied on
                        chunk = self._store.at(part.slot)
                        chunk.hints = msgspec.structs.replace(chunk.hints, form=job.form)
                    self.land(part.slot, part.first_layer, part.count)
            elif not copy.is_given_up:  # else the error is expected
                if not isinstance(error, TierError):  # tiers log those themselves, rate-limited
                    log.warning("%s failed: %s", repr(copy), str(error))
                self._counters["jobs_failed"] += 1
                if copy.is_load:  # the others may be good
                    self.give_back([part.slot for part in job.parts], Cause.NOT_LOADED, f"{tier.name}: {error}")
                elif copy.state is CopyState.RUNNING and copy.priority < Priority.STORE:  # a request needs all of it
                    self._give_up(copy)
            if copy.state is CopyState.DRAINING:
                self._drain(copy)
        self._forget_if_idle(tier)

    def _measure(self, queue: CopyQueue, copy: Copy, job: Job) -> None:
        """Record how fast a job has moved its bytes, even if they are no longer wanted."""
        if copy.is_load:
            queue.loads, queue.load_bytes = queue.loads - 1, queue.load_bytes - job.nbytes
        if not job.end_ns:
            return
        rate = copy.tier.load_rate if copy.is_load else copy.tier.store_rate
        rate.moved(job.nbytes, job.start_ns, job.end_ns)
        if copy.is_load:
            queue.loaded_ns = int(self._clock() * 1e9)
            copy.tier.late_at = -math.inf

    def close(self) -> None:
        """Write the remaining trace spans. Idempotent."""
        if self._tracer is not None:
            self._tracer.close()

    def land(self, slot: Slot, first_layer: int, count: int) -> None:
        """A copy has filled these slices of a slot that the node itself fills; seal the chunk if it is whole."""
        chunks = self._store.fill([slot], first_layer, count, NODE)
        if chunks[0].is_complete:
            self._store.seal(chunks)
        self.landed += chunks

    # ---- ending -----------------------------------------------------------------------------

    def _source_is_gone(self, copy: Copy) -> None:
        self._counters["copies_without_source"] += 1
        self._give_up(copy)

    def _give_up(self, copy: Copy) -> None:
        copy.is_given_up = True
        if copy.is_load:  # its jobs not yet given never will be
            self._queues[copy.tier].to_load[copy.priority, copy.size_class] -= copy.held_bytes - copy.given_bytes
        copy.step(CopyStep.GIVE_UP)
        self._rank(copy)
        copy.tier.cancel(copy)
        self._drain(copy)

    def _drain(self, copy: Copy) -> None:
        """End a draining copy once none of its jobs accesses the arena any more."""
        if copy.under_way:
            return
        copy.step(CopyStep.DRAINED)
        self._remove(copy)
        if copy.items and copy.is_complete:
            took = self._timings["pdx_node_copy_seconds", copy.tier.kind, "load" if copy.is_load else "store"]
            took.observe(self._clock() - copy.begun_ns / 1e9)
        if copy.is_load:
            # Chunks not loaded by now never will be.
            slots = [chunk.slot for chunk in copy.chunks]
            self.give_back(slots, Cause.NOT_LOADED, f"{copy.tier.name} in time")
        else:
            self._store.unhold(copy.chunks)
        copy.tier.copy_ended(copy)

    def give_back(self, slots: Iterable[Slot], why: Cause, detail: str = "") -> None:
        """Nothing more is written to these slots, which the node itself fills: free those that are not sealed."""
        left = self._store.unfinished(slots)
        self._store.let_go(left, why, detail)
        self.landed += left

    def _remove(self, copy: Copy) -> None:
        del self._copies[copy.number]
        self._deadlines.discard(copy.number, copy.deadline)
        self._touched.pop(copy, None)
        self._queues[copy.tier].remove(copy)
        self._forget_if_idle(copy.tier)
        if copy.transfer is not None:
            _take(self._of_transfer, copy.transfer, copy)
        for item in copy.items:
            _take(self._items, item.chunk, item)

    def _forget_if_idle(self, tier: Tier) -> None:
        queue = self._queues[tier]
        if not queue.copies and not queue.in_flight:
            del self._queues[tier]


def _take(lists: dict[Any, list[Any]], key: object, value: object) -> None:
    """Remove a value from a list, and the list once it is empty."""
    lists[key].remove(value)
    if not lists[key]:
        del lists[key]
